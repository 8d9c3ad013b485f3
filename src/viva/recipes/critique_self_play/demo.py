"""The recipe on the built-in policy: a real run with a visible result in minutes.

    python -m viva.recipes.critique_self_play.demo [key=value ...]

Writes arithmetic word problems to train and test on, then runs the recipe on them with the options of
`demo_options`; any option of the recipe may be given to change it. No answer ever enters a reward: answers serve
the held-out accuracy and the audit of the rewards. An earlier demonstration's run is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from viva.recipes.critique_self_play.train import main as train_main
from viva.recipes.demo import main_with, problem_options

__all__ = ["demo_options", "main"]


def demo_options(folder: Path, *, seed: int = 0) -> dict[str, str]:
    """The recipe's options for the built-in policy; writes the problems into `folder`."""
    return problem_options(folder, seed=seed) | {
        "num_agents": "4",
        "batch_size": "48",
        "max_steps": "25",
        "max_tokens": "80",
        "lora_rank": "16",
        "eval_every": "13",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; the process's exit code."""
    return main_with(train_main, lambda seed: demo_options(Path("runs/critique_demo"), seed=seed), argv)


if __name__ == "__main__":
    sys.exit(main())
