"""Demonstrations: the recipes with options under which a run shows something in minutes.

    python -m viva.recipes.demo [key=value ...]           # SmolLM2-135M-Instruct
    python -m viva.recipes.demo RECIPE [key=value ...]    # the built-in policy

Each writes word problems to train and test on, then runs the recipe on them; any option of the recipe may be given to
change it. An earlier demonstration's run is replaced. In the two self-play recipes no answer ever enters a reward:
answers serve the held-out accuracy and the audit. ``math_efficiency`` asks bare questions, the same behind an
instruction that helps, and second attempts after feedback, and trains all into the bare question; ``viva estimate
runs/math_demo/run`` then shows what every estimator makes of its samples.

The first asks for short answers to word problems: expert iteration on plain samples of 206 one-step problems with known
answers. It is asked 100 problems without a step in common with those.

All end with a table of the untrained and the trained policy: what is right at temperature 0, as sampled, and for the
majority of eight answers, and the replies that name the known answer. A gain that is none at temperature 0 is
sharpening.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from viva.engine.gguf import cache_folder
from viva.recipes.programs import train_recipe
from viva.threads import prepare_threads
from viva.tiny.tasks import CAREFUL, Split, problems

_NUM_BUILT_IN_TRAIN, _NUM_BUILT_IN_TEST = 2000, 500
FOLDERS = {
    "critique_self_play": Path("runs/critique_demo"),
    "conversation_preference_rl": Path("runs/demo"),
    "math_efficiency": Path("runs/math_demo"),
}
"""By recipe, the folder of its demonstration."""
_OPTIONS = {
    "critique_self_play": {
        "num_agents": "4",
        "batch_size": "48",
        "max_steps": "25",
        "max_tokens": "80",
        "eval_every": "13",
    },
    "conversation_preference_rl": {
        "num_agents": "3",
        "max_rounds": "2",
        "batch_size": "48",
        "max_steps": "17",
        "max_tokens": "72",
        "eval_every": "10",
    },
    "math_efficiency": {
        "strategies": "iid,prompt_augmentation,feedback",
        "hint": CAREFUL,
        "group_size": "4",
        "batch_size": "96",
        "max_steps": "20",
        "max_tokens": "72",
        "eval_every": "10",
    },
}
REAL_FOLDER = Path("runs/smollm2_demo")
_NUM_TRAIN, _NUM_TEST = 206, 100
_MAX_TOKENS, _MAX_TEST_TOKENS = 28, 40
"""Most tokens of a reply in training, and of one to a problem to test on. Right answers are short; the untrained
policy's others are not, and take most of the time."""
_VOTES, _NUM_VOTED = 8, 40
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


def write_problems(path: Path, split: Split, count: int, *, seed: int) -> Path:
    """Write the built-in policy's problems as JSON lines with ``query`` and ``answer``."""
    return _write(path, ((each.question, each.answer) for each in problems(split, count, seed=seed)))


def _write(path: Path, answers: Iterable[tuple[str, int]]) -> Path:
    lines = (json.dumps({"query": question, "answer": str(answer)}) for question, answer in answers)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def problem_options(folder: Path, *, seed: int = 0) -> dict[str, str]:
    """A recipe's options for data, folder and seed; writes the problems into `folder`.

    The test problems are the same for all seeds. An earlier run in the folder is replaced.
    """
    train_path = write_problems(folder / "train.jsonl", "train", _NUM_BUILT_IN_TRAIN, seed=seed)
    test_path = write_problems(folder / "test.jsonl", "test", _NUM_BUILT_IN_TEST, seed=0)
    return {
        "model_name": "tiny",
        "max_test_samples": str(_NUM_BUILT_IN_TEST),
        "train_prompts_path": str(train_path),
        "test_prompts_path": str(test_path),
        "log_path": str(folder / "run"),
        "behavior_if_exists": "delete",
        "seed": str(seed),
    }


def demo_options(recipe: str, folder: Path, *, seed: int = 0) -> dict[str, str]:
    """A recipe's options for the built-in policy; writes the problems into `folder`."""
    return problem_options(folder, seed=seed) | {"lora_rank": "16"} | _OPTIONS[recipe]


def model_path() -> Path:
    """SmolLM2-135M-Instruct, the file that `make models` fetches."""
    return cache_folder() / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def word_problems(*, seed: int = 0) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Problems with their answers, to train and to test on; those to test on are the same for all seeds."""
    # sums and products have the larger number first
    sums = {("+", max(a, b), min(a, b)) for a in range(3, 25) for b in range(2, 10)}
    differences = {("-", a, b) for a in range(11, 31) for b in range(2, 10)}
    products = {("x", a, b) for a in range(2, 10) for b in range(2, a + 1)}
    steps = sorted(sums | differences | products)
    random.Random(0).shuffle(steps)
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
    """The first demonstration's options; writes the problems into `folder`."""
    train, test = word_problems(seed=seed)
    train_path = _write(folder / "train.jsonl", train)
    test_path = _write(folder / "test.jsonl", test)
    return {
        "model_name": model,
        "train_prompts_path": str(train_path),
        "test_prompts_path": str(test_path),
        "strategies": "iid",
        "group_size": "8",
        "batch_size": "64",
        "max_steps": "16",
        "max_tokens": str(_MAX_TOKENS),
        "temperature": "0.8",
        "loss_fn_config": '{"temperature": 0.8}',  # trained as they are sampled, which saves a pass over them
        "learning_rate": "2e-4",
        "eval_every": "0",
        "log_path": str(folder / "run"),
        "behavior_if_exists": "delete",
        "seed": str(seed),
    }


async def show(run: Path, *, max_tokens: int | None = None) -> None:
    """Evaluate a run and its base model, print both side by side, and write the report anew.

    Args:
        run: Its folder.
        max_tokens: Of an answer; by default as in training.
    """
    from viva.eval.records import Evaluation, read_evaluation
    from viva.recipes.common import say
    from viva.recipes.evaluation import EvalOptions
    from viva.recipes.evaluation.build import evaluate
    from viva.view.files import read_config
    from viva.view.report import write_report

    found: dict[tuple[str, float], Evaluation] = {}
    num_voted = min(_NUM_VOTED, read_config(run).get("max_test_samples") or _NUM_VOTED)
    for temperature, count, most in ((0.0, 1, None), (1.0, _VOTES, num_voted)):
        options = EvalOptions(
            against_checkpoint="base",
            kinds=["direct"],
            eval_greedy=False,
            eval_temperature=temperature,
            max_tokens=max_tokens,
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
        "temperature 0, answer named": (0.0, "direct/avg@1_lenient"),
        "temperature 1": (1.0, f"direct/avg@{_VOTES}"),
        "temperature 1, answer named": (1.0, f"direct/avg@{_VOTES}_lenient"),
        f"temperature 1, majority of {_VOTES}": (1.0, f"direct/maj@{_VOTES}"),
    }
    say(f"{'right on held-out problems':42} untrained    trained")
    for name, (temperature, key) in rows.items():
        before, after = (found[policy, temperature].figures[key] for policy in ("base", "last"))
        label = f"{name} ({before.num_problems} problems)"
        say(f"{label:42}{before.value:10.1%} {after.value:10.1%}")
    write_report(run)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a demonstration, whose options the command line may change; the process's exit code."""
    prepare_threads()
    from viva.recipes.common import exit_code, say

    arguments = list(sys.argv[1:] if argv is None else argv)
    recipe = None  # the first demonstration, on a model that others trained
    if arguments and "=" not in arguments[0] and not arguments[0].startswith("-"):
        recipe = arguments.pop(0)
        if recipe not in FOLDERS:
            say(f"error: {recipe!r} has no demonstration; there are {', '.join(FOLDERS)}", is_error=True)
            return 2
    given = dict(argument.lstrip("-").split("=", 1) for argument in arguments if "=" in argument)
    model = given.get("model_name", str(model_path()))
    if recipe is None and "model_name" not in given and not Path(model).is_file():
        say(
            f"{model} is not there: `make models` fetches it from the Python index. Until then this demonstration "
            "trains the built-in policy.",
            is_error=True,
        )
        recipe = "critique_self_play"
    folder = REAL_FOLDER if recipe is None else FOLDERS[recipe]
    seed = int(given["seed"]) if given.get("seed", "").isdecimal() else 0  # the recipe refuses other seeds
    if recipe is None:
        options = real_options(folder, model, seed=seed)
    else:
        options = demo_options(recipe, folder, seed=seed)
    own = [f"{name}={value}" for name, value in options.items() if name not in given]
    code = train_recipe(recipe or "math_efficiency", [*own, *arguments])
    if code or "--help" in arguments:
        return code
    longest = _MAX_TEST_TOKENS if recipe is None and "max_tokens" not in given else None
    return asyncio.run(exit_code(show(Path(given.get("log_path", folder / "run")), max_tokens=longest)))


if __name__ == "__main__":
    sys.exit(main())
