"""The recipe on the built-in policy: a real run with a visible result in minutes.

    python -m viva.recipes.conversation_preference_rl.demo [key=value ...]

Writes arithmetic word problems to train and test on, then runs the recipe on them with the options of
`demo_options`; any option of the recipe may be given to change it. No answer ever enters the reward: answers
serve the held-out accuracy before, during and after. An earlier demonstration's run is replaced.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from viva.recipes.conversation_preference_rl.train import main as train_main
from viva.tiny.tasks import Split, problems

__all__ = ["demo_options", "main", "write_problems"]

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


def demo_options(folder: Path, *, seed: int = 0) -> dict[str, str]:
    """The recipe's options for the built-in policy; writes the problems into `folder`."""
    train_path = write_problems(folder / "train.jsonl", "train", _NUM_TRAIN, seed=seed)
    test_path = write_problems(folder / "test.jsonl", "test", _NUM_TEST, seed=0)
    return {
        "model_name": "tiny",
        "num_agents": "3",
        "max_rounds": "2",
        "batch_size": "48",
        "max_steps": "17",
        "max_tokens": "72",
        "learning_rate": "5e-4",
        "lora_rank": "16",
        "eval_every": "10",
        "max_test_samples": str(_NUM_TEST),
        "train_prompts_path": str(train_path),
        "test_prompts_path": str(test_path),
        "log_path": str(folder / "run"),
        "behavior_if_exists": "delete",
        "seed": str(seed),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; the process's exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    options = demo_options(Path("runs/demo"), seed=int(given.get("seed", "0"))) | given
    others = [argument for argument in arguments if "=" not in argument]  # such as --help
    return train_main([f"{name}={value}" for name, value in options.items()] + others)


if __name__ == "__main__":
    sys.exit(main())
