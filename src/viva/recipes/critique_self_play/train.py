"""Critique self-play from the command line.

    python -m viva.recipes.critique_self_play.train model_name=<hub name or path> num_agents=4 batch_size=16 \\
        train_prompts_path=prompts.jsonl log_path=/tmp/run2

Options are ``key=value``; ``--help`` lists them. Everything that can be wrong with them is reported before a model
is loaded. The options that all recipes share mean the same as in conversation preference RL.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Literal

import chz

from viva.recipes.config import RecipeConfig, parse_options
from viva.threads import prepare_threads

__all__ = ["Config", "main"]


@chz.chz
class Config(RecipeConfig):
    """Options of critique self-play."""

    num_agents: int = chz.field(default=4, doc="agents in each conversation, 2 to 26")
    preset: Literal["paper", "robust"] = chz.field(
        default="robust", doc="how scores become rewards: as the CoNL paper, or its repaired form"
    )
    reward_weights: dict[str, float] | None = chz.field(
        default=None, doc="weights of the reward streams; default: {'r_sol': 1, 'r_meta': 1, 'r_diag': 2}"
    )
    prior_precision: float = chz.field(
        default=1.0, doc="of the Gaussian prior on Bradley-Terry strengths; larger pulls scores together"
    )
    revision_votes: Literal["judge", "agents"] = chz.field(
        default="judge",
        doc="robust: who compares revised with initial solutions, the policy's label probabilities or the agents",
    )
    judge_policy: Literal["current", "initial"] = chz.field(
        default="current",
        doc="whose label probabilities: of the policy being trained, or as it was at the start",
    )
    votes_on_own: bool | None = chz.field(
        default=None, doc="let agents rank their own solution too; default: only between two agents"
    )
    stop_at: dict[str, float] | None = chz.field(
        default=None,
        doc="end the run and keep its best checkpoint when a metric rises above, like {'reward_truth_gap': 0.45}",
    )

    log_path: str = "runs/critique_self_play"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe with command-line options; the process's exit code."""
    prepare_threads()
    config = parse_options(Config, argv)
    from viva.recipes.common import exit_code
    from viva.recipes.critique_self_play.build import run

    return asyncio.run(exit_code(run(config)))


if __name__ == "__main__":
    sys.exit(main())
