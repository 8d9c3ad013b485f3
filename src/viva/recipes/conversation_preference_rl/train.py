"""Conversation preference RL from the command line.

    python -m viva.recipes.conversation_preference_rl.train model_name=<hub name or path> num_agents=3 max_rounds=5 \\
        batch_size=12 train_prompts_path=prompts.jsonl log_path=/tmp/run1

Options are ``key=value``; ``--help`` lists them. Everything that can be wrong with them is reported before a model
is loaded.
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
    """Options of conversation preference RL."""

    max_rounds: int = chz.field(default=5, doc="rounds of each conversation")
    order: Literal["sequential", "simultaneous"] = chz.field(
        default="sequential", doc="one after another, or all at once without seeing replies of the same round"
    )

    judge_mode: Literal["logprob", "verdict"] = chz.field(
        default="logprob", doc="compare the labels' probabilities, or let the judge write a verdict"
    )
    judge_policy: Literal["current", "initial"] = chz.field(
        default="current", doc="judge with the policy being trained, or with what it was at the start"
    )
    judge_prompt: str | None = chz.field(
        default=None, doc="what the judge is told; a text of its own by default"
    )
    judge_prompt_path: str | None = chz.field(default=None, doc="file with what the judge is told")
    judge_max_tokens: int = chz.field(default=256, doc="longest verdict")
    judge_max_off_set_mass: float = chz.field(
        default=0.9,
        doc="with logprob: a comparison is invalid if anything but a label is more probable than this",
    )
    tournament_pattern: Literal["all_pairs_both_ways", "all_pairs_one_way"] = chz.field(
        default="all_pairs_both_ways", doc="compare every pair in both orders or in one"
    )

    log_path: str = "runs/conversation_preference_rl"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe with command-line options; the process's exit code."""
    prepare_threads()
    config = parse_options(Config, argv)
    from viva.recipes.common import exit_code
    from viva.recipes.conversation_preference_rl.build import run

    return asyncio.run(exit_code(run(config)))


if __name__ == "__main__":
    sys.exit(main())
