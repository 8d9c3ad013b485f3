"""Bad input as data, in ``bad_input.txt``: what is typed, and the parts that the one message must have.

A line is ``arguments | part | part ...``, with arguments split at spaces. The parts name what was wrong and the value
that came in, then what is allowed or what to do. Files and folders are those of ``bad_world``. ``T``, ``K`` and ``M``
are the three recipes with good options, of which those that are given take the place; ``RUN`` is the command of the run
in ``run``, and ``EVAL`` an evaluation with a good test set. Where ``loaded`` stands, a model has to be loaded to find
out; in all other areas none may be.
"""

from dataclasses import dataclass
from pathlib import Path

from bad_world import GOOD_RUN


@dataclass(frozen=True, kw_only=True)
class Case:
    """One command that must be refused."""

    area: str
    arguments: tuple[str, ...]
    parts: tuple[str, ...]
    loads: bool = False
    """Whether a model has to be loaded to see it."""

    @property
    def name(self) -> str:
        return f"{self.area}: {' '.join(self.arguments)}"[:150]


_BASE = {
    "model_name": "models/good",
    "train_prompts_path": "good.jsonl",
    "log_path": "new",
    "num_agents": "2",
    "batch_size": "2",
    "max_steps": "1",
    "max_tokens": "4",
    "trackers": "[]",
    "device": "cpu",
}
_RECIPES = {
    "T": ("conversation_preference_rl", {}),
    "K": ("critique_self_play", {}),
    "M": ("math_efficiency", {"batch_size": "8", "num_agents": "3"}),
}


def _train(letter: str, options: list[str]) -> tuple[str, ...]:
    recipe, own = _RECIPES[letter]
    given = {option.partition("=")[0] for option in options}
    if given & {"hf_dataset_name", "train_prompts"}:
        given.add("train_prompts_path")
    base = [f"{name}={value}" for name, value in {**_BASE, **own}.items() if name not in given]
    return ("train", recipe, *base, *(option for option in options if option != "train_prompts_path"))


def _resume(options: list[str]) -> tuple[str, ...]:
    """The good run's command, with some options in place of its own; ``again`` is resuming it."""
    options = ["behavior_if_exists=resume" if option == "again" else option for option in options]
    given = {option.partition("=")[0] for option in options}
    return (*(option for option in GOOD_RUN if option.partition("=")[0] not in given), *options)


def _evaluate(words: list[str]) -> tuple[str, ...]:
    base = {"test_prompts_path": "good.jsonl", "kinds": '["direct"]', "output": "out.json"}
    given = {word.partition("=")[0] for word in words}
    target, *options = words
    return ("eval", target, *(f"{name}={v}" for name, v in base.items() if name not in given), *options)


def _case(area: str, line: str) -> Case:
    typed, *parts = (part.strip() for part in line.split(" | "))
    words = typed.split(" ")
    if words[0] in _RECIPES:
        arguments = _train(words[0], words[1:])
    elif words[0] == "RUN":
        arguments = _resume(words[1:])
    elif words[0] == "EVAL":
        arguments = _evaluate(words[1:])
    else:
        arguments = tuple(words)
    area, _, loads = area.partition(", ")
    return Case(area=area, arguments=arguments, parts=tuple(parts), loads=loads == "loaded")


def _read(path: Path) -> tuple[Case, ...]:
    cases: list[Case] = []
    area = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            area = line.strip("[]")
        elif line:
            cases.append(_case(area, line))
    return tuple(cases)


CASES = _read(Path(__file__).with_suffix(".txt"))
