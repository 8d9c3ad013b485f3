"""The demonstration on a model that others trained: SmolLM2-135M-Instruct learns to answer word problems, in minutes.

Expert iteration on plain samples: 206 one-step problems to train on, answers known. It is asked 100 problems without a
step in common with those, before and after: greedily, at temperature 1, and for the majority of eight answers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from viva.engine.gguf import cache_folder

FOLDER = Path("runs/smollm2_demo")
_NUM_TRAIN, _NUM_TEST = 206, 100
_VOTES, _NUM_VOTED = 8, 50
"""Answers at temperature 1 to each of the first so many problems to test on: all of them take two minutes more."""

_NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jan", "Kim", "Leo")
_ITEMS = ("apples", "books", "coins", "dolls", "eggs", "forks", "pens", "stamps", "shells", "cards")
_STORIES = {
    "+": "{name} has {a} {items} and buys {b} more. How many {items} does {name} have?",
    "-": "{name} has {a} {items} and gives away {b}. How many {items} does {name} have left?",
    "x": "{name} has {a} boxes with {b} {items} each. How many {items} does {name} have?",
}
_ASKED = "Give only the final number."

_Step = tuple[str, int, int]


def model_path() -> Path:
    """Where `make models` puts SmolLM2-135M-Instruct."""
    return cache_folder() / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def _steps() -> list[_Step]:
    """All steps, shuffled alike for every seed; sums and products with the larger number first."""
    sums = {("+", max(a, b), min(a, b)) for a in range(3, 25) for b in range(2, 10)}
    differences = {("-", a, b) for a in range(11, 31) for b in range(2, 10)}
    products = {("x", a, b) for a in range(2, 10) for b in range(2, a + 1)}
    steps = sorted(sums | differences | products)
    random.Random(0).shuffle(steps)
    return steps


def word_problems(*, seed: int = 0) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Problems with their answers, to train and to test on; those to test on are the same for all seeds."""
    steps = _steps()
    test, train = steps[:_NUM_TEST], steps[_NUM_TEST : _NUM_TEST + _NUM_TRAIN]
    return _told(train, random.Random(seed + 1)), _told(test, random.Random(0))


def _told(steps: Sequence[_Step], rng: random.Random) -> list[tuple[str, int]]:
    problems: list[tuple[str, int]] = []
    for operator, left, right in steps:
        a, b = (right, left) if operator != "-" and rng.random() < 0.5 else (left, right)
        story = _STORIES[operator].format(name=rng.choice(_NAMES), items=rng.choice(_ITEMS), a=a, b=b)
        result = {"+": a + b, "-": a - b, "x": a * b}[operator]
        problems.append((f"{story} {_ASKED}", result))
    return problems


def real_options(folder: Path, model: str, *, seed: int = 0) -> dict[str, str]:
    """The recipe's options; writes the problems into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    train, test = word_problems(seed=seed)
    for name, problems in (("train", train), ("test", test)):
        lines = [json.dumps({"query": question, "answer": str(answer)}) for question, answer in problems]
        (folder / f"{name}.jsonl").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return {
        "model_name": model,
        "train_prompts_path": str(folder / "train.jsonl"),
        "test_prompts_path": str(folder / "test.jsonl"),
        "strategies": "iid",
        "group_size": "8",
        "batch_size": "64",
        "max_steps": "16",
        "max_tokens": "40",
        "temperature": "0.8",
        "learning_rate": "2e-4",
        "eval_every": "0",
        "log_path": str(folder / "run"),
        "behavior_if_exists": "delete",
        "seed": str(seed),
    }


async def show(run: Path) -> None:
    """Evaluate a run and its base model, print both side by side, and write the report anew."""
    from viva.eval.records import Evaluation, read_evaluation
    from viva.recipes.common import say
    from viva.recipes.evaluation import EvalOptions
    from viva.recipes.evaluation.build import evaluate
    from viva.view.report import write_report

    found: dict[tuple[str, float], Evaluation] = {}
    for temperature, count, most in ((0.0, 1, None), (1.0, _VOTES, _NUM_VOTED)):
        options = EvalOptions(
            against_checkpoint="base",
            eval_temperature=temperature,
            num_samples=count,
            max_test_samples=most,
            resamples=1000,
        )
        await evaluate(str(run), options)
    for path in (run / "eval").glob("*.json"):
        if "-against-" not in path.name:
            evaluation = read_evaluation(path)
            policy = "base" if evaluation.target["checkpoint"] == "base" else "last"
            found[policy, evaluation.options["eval_temperature"]] = evaluation
    rows = {
        "temperature 0": (0.0, "direct/avg@1"),
        "temperature 1": (1.0, f"direct/avg@{_VOTES}"),
        f"temperature 1, majority of {_VOTES}": (1.0, f"direct/maj@{_VOTES}"),
    }
    say(f"{'right on held-out problems':42} untrained    trained")
    for name, (temperature, key) in rows.items():
        before, after = (found[policy, temperature].figures[key] for policy in ("base", "last"))
        label = f"{name} ({before.num_problems} problems)"
        say(f"{label:42}{before.value:10.1%} {after.value:10.1%}")
    write_report(run)
