"""Expert iteration on problems with known answers: several search strategies, trained into the bare question.

    python -m viva.recipes.math_efficiency.train_rl model_name=<hub name or path> \\
        'strategies=["iid", "prompt_augmentation"]' train_prompts_path=problems.jsonl log_path=/tmp/run3

Options are ``key=value``; ``--help`` lists them. Everything that can be wrong with them is reported before a model
is loaded. The options that all recipes share mean the same as in conversation preference RL.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Literal

import chz

from viva.recipes.config import DEFAULT_DATAPOINTS, RecipeConfig, parse_options
from viva.threads import prepare_threads

__all__ = ["Config", "main"]


@chz.chz
class Config(RecipeConfig):
    """Options of math efficiency."""

    strategies: list[str] = chz.field(
        default_factory=lambda: ["iid", "prompt_augmentation"],
        doc="of iid, prompt_augmentation, feedback, conversation, best_of, module:FUNCTION, path.py:FUNCTION",
    )
    weights: dict[str, float] | None = chz.field(
        default=None, doc="share of every strategy in the update; default: each sample counts once"
    )
    assignment: Literal["all", "split"] = chz.field(
        default="all", doc="every strategy answers every problem, or each problem goes to one of them"
    )
    group_size: int = chz.field(
        default=4, doc="samples per problem and strategy; a conversation has num_agents"
    )
    batch_size: int | None = chz.field(
        default=None,
        doc="samples per step; default: the largest multiple up to 128 of what one problem takes",
    )
    max_training_datapoints: int = chz.field(default=DEFAULT_DATAPOINTS, doc="samples of the whole run")

    estimator: Literal[
        "importance_sampling",
        "token_tis",
        "balance",
        "none",
        "positives",
        "shaped",
        "seq_tis",
        "seq_is",
        "distill",
    ] = chz.field(default="shaped", doc="how samples of other contexts are weighed")
    estimator_options: dict[str, float | str | bool] | None = chz.field(
        default=None, doc="of the estimator, like {'gamma': 0.2}"
    )
    baseline: Literal["stratum", "prompt_union", "weighted", "none"] | None = chz.field(
        default=None, doc="what a reward is compared with; default: the estimator's own"
    )
    min_effective_share: float = chz.field(
        default=0.1, doc="lowest effective sample size and mean weight of a strategy, of 1; 0 lets all pass"
    )
    on_waste: Literal["warn", "stop"] = chz.field(default="warn", doc="what to do below that")
    samples_every: int = chz.field(
        default=10, doc="steps between batches that are kept for viva estimate; 0 keeps none"
    )

    length_weight: float = chz.field(
        default=0.1, doc="share of the reward of a right answer that depends on its length, below 1"
    )
    token_budget: int | None = chz.field(
        default=None, doc="length that the share refers to; default: max_tokens"
    )
    hint: str | None = chz.field(
        default=None, doc="prompt_augmentation: what the sampler is told; a text of its own by default"
    )
    leak_phrases: list[str] | None = chz.field(
        default=None,
        doc="words of hint, feedback or conversation that should not turn up in answers; counted",
    )
    feedback: Literal["verifier", "generated"] = chz.field(
        default="verifier", doc="feedback: right or wrong, or a critique by the policy itself"
    )
    train_behind: Literal["problem", "attempt"] = chz.field(
        default="problem",
        doc="feedback: train the second attempt behind the problem, or behind problem and first",
    )
    keep: Literal["best", "all"] = chz.field(
        default="best", doc="best_of: imitate the best right answer of a group, or all right ones"
    )
    conversation: Literal["critique", "round_robin"] = chz.field(
        default="critique", doc="conversation: which"
    )
    conversation_reward: Literal["verifier", "own"] = chz.field(
        default="verifier", doc="conversation: by the known answer, or by what the agents say of one another"
    )
    max_rounds: int = chz.field(default=2, doc="conversation=round_robin: rounds")

    hf_prompt_column: str = "question"
    hf_answer_column: str | None = "answer"
    log_path: str = "runs/math_efficiency"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe with command-line options; the process's exit code."""
    prepare_threads()
    config = parse_options(Config, argv)
    from viva.recipes.common import exit_code
    from viva.recipes.math_efficiency.build import run

    return asyncio.run(exit_code(run(config)))


if __name__ == "__main__":
    sys.exit(main())
