"""Conversation preference RL: agents take turns, the policy compares their solutions, win minus loss pays.

    viva train conversation_preference_rl model_name=<hub name or path> num_agents=3 max_rounds=5 batch_size=12 \\
        train_prompts_path=prompts.jsonl log_path=/tmp/run1

Options are ``key=value``; ``--help`` lists them. Everything that can be wrong with them is reported before a model
is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import chz

from viva.conversation.prompts import counted
from viva.recipes.config import RecipeConfig

if TYPE_CHECKING:
    from tinker_cookbook.renderers.base import Renderer

    from viva.judging.judge import JudgeOptions
    from viva.judging.policy import PolicyRef
    from viva.recipes.common import OpenRun
    from viva.recipes.plan import Plan
    from viva.rewards.base import Grader
    from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
    from viva.training.data import BuilderFactory, PromptItem
    from viva.training.loop import Training


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


def make_plan(config: Config) -> Plan[Config]:
    """Check all options and load the prompts; no model is loaded.

    Raises:
        ValueError: For anything the user has to mend.
    """
    from viva.recipes.plan import plan_run

    judge = judge_options(config)
    return plan_run(
        config,
        recipe="conversation_preference_rl",
        summary=f"{counted(config.num_agents, 'agent')} x {counted(config.max_rounds, 'round')}",
        record={"judge_prompt": judge.system_prompt},
    )


def judge_options(config: Config) -> JudgeOptions:
    """Check the options that only this recipe has; those of the judge.

    Raises:
        ValueError: For the first that is out of range.
    """
    from viva.judging.judge import JudgeOptions
    from viva.recipes.plan import at_least

    at_least(config, {"max_rounds": 1, "judge_max_tokens": 1})
    if not 0 <= config.judge_max_off_set_mass <= 1:
        raise ValueError(f"judge_max_off_set_mass must be from 0 to 1; got {config.judge_max_off_set_mass}")
    return JudgeOptions(
        policy=config.judge_policy,
        mode=config.judge_mode,
        system_prompt=judge_prompt(config),
        max_tokens=config.judge_max_tokens,
        max_off_set_mass=config.judge_max_off_set_mass,
    )


def judge_prompt(config: Config) -> str:
    """The judge's system message: the text, the file's, or the package's.

    Raises:
        ValueError: If there are two texts, or none can be read.
    """
    from viva.judging.comparison import JUDGE_SYSTEM_PROMPT

    text = JUDGE_SYSTEM_PROMPT if config.judge_prompt is None else config.judge_prompt
    if config.judge_prompt_path is not None:
        if config.judge_prompt is not None:
            raise ValueError("give judge_prompt or judge_prompt_path, not both")
        path = Path(config.judge_prompt_path).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"judge_prompt_path={path} cannot be read as UTF-8 text: {error}") from error
    if not text.strip():
        raise ValueError(
            "judge_prompt must be text that is not empty; it must ask for a JSON object with preference"
        )
    return text


async def build_training(plan: Plan[Config], opened: OpenRun) -> Training:
    """The loop's parts for an open run."""
    from viva.recipes.loop import judged_by, make_training

    policy, policy_refs = await judged_by(plan.config.judge_policy, plan, opened)
    make_builder = conversation_factory(plan.config, opened.renderer, policy, grader=plan.grader)
    return make_training(plan, opened, make_builder, policy_refs=policy_refs)


def conversation_factory(
    config: Config, renderer: Renderer, judge_policy: PolicyRef, *, grader: Grader
) -> BuilderFactory:
    """Makes the recipe's conversation for a prompt and a seed.

    Args:
        config: The options.
        renderer: Of the policy that talks and judges.
        judge_policy: Who judges.
        grader: Tells for the metrics whether a solution is right.
    """
    from viva.selfplay.round_robin import round_robin_group

    judge = judge_options(config).make(judge_policy, renderer)

    def make_builder(item: PromptItem, seed: int) -> MultiAgentConversationEnvGroupBuilder:
        return round_robin_group(
            question=item.question,
            answer=item.answer,
            num_agents=config.num_agents,
            max_rounds=config.max_rounds,
            renderer=renderer,
            judge=judge,
            tournament_pattern=config.tournament_pattern,
            personas=config.personas,
            order=config.order,
            on_failure=config.on_failure,
            seed=seed,
            grader=grader,
        )

    return make_builder
