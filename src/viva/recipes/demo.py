"""What the recipes' demonstrations share: arithmetic word problems in files, and the command line around a recipe."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from viva.tiny.tasks import Split, problems

__all__ = ["main_with", "problem_options", "write_problems"]

_NUM_TRAIN, _NUM_TEST = 2000, 500


def write_problems(path: Path, split: Split, count: int, *, seed: int) -> Path:
    """Write problems as JSON lines with ``query`` and ``answer``."""
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


def main_with(
    train_main: Callable[[Sequence[str]], int],
    options_for_seed: Callable[[int], Mapping[str, str]],
    argv: Sequence[str] | None,
) -> int:
    """Run a recipe with a demonstration's options, which the command line may change; the process's exit code.

    Args:
        train_main: The recipe's ``main``.
        options_for_seed: The demonstration's options.
        argv: The command line; ``None`` for the process's.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    given = dict(argument.lstrip("-").split("=", 1) for argument in arguments if "=" in argument)
    seed = given.get("seed", "")
    options = options_for_seed(int(seed) if seed.isdecimal() else 0)  # the recipe refuses other seeds
    return train_main([f"{name}={value}" for name, value in options.items() if name not in given] + arguments)
