"""The recipe on the built-in policy: a real run with a visible result in minutes.

    python -m viva.recipes.math_efficiency.demo [key=value ...]

Writes arithmetic word problems to train and test on, then runs the recipe on them with the options of
`demo_options`: bare questions, the same behind an instruction that helps, and second attempts after feedback; all
trained into the bare question. Any option of the recipe may be given to change it. An earlier demonstration's run is
replaced. ``viva estimate runs/math_demo/run`` then shows what every estimator makes of its samples.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from viva.recipes.demo import main_with, problem_options
from viva.recipes.math_efficiency.train_rl import main as train_main

__all__ = ["demo_options", "main"]


def demo_options(folder: Path, *, seed: int = 0) -> dict[str, str]:
    """The recipe's options for the built-in policy; writes the problems into `folder`."""
    from viva.tiny.tasks import CAREFUL

    return problem_options(folder, seed=seed) | {
        "strategies": "iid,prompt_augmentation,feedback",
        "hint": CAREFUL,
        "group_size": "4",
        "batch_size": "96",
        "max_steps": "20",
        "max_tokens": "72",
        "lora_rank": "16",
        "eval_every": "10",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; the process's exit code."""
    return main_with(train_main, lambda seed: demo_options(Path("runs/math_demo"), seed=seed), argv)


if __name__ == "__main__":
    sys.exit(main())
