"""Critique self-play (CoNL): propose, rank blindly and criticise, revise or defend, final verdict.

    viva train critique_self_play model_name=<hub name or path> num_agents=4 batch_size=16 \\
        train_prompts_path=prompts.jsonl log_path=/tmp/run2

Options are ``key=value``; ``--help`` lists them. Everything that can be wrong with them is reported before a model
is loaded. The options that all recipes share mean the same as in conversation preference RL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import chz

from viva.conversation.prompts import counted
from viva.recipes.config import RecipeConfig

if TYPE_CHECKING:
    from tinker_cookbook.renderers.base import Renderer

    from viva.judging.policy import PolicyRef
    from viva.recipes.common import OpenRun
    from viva.recipes.plan import Plan
    from viva.rewards.base import Grader
    from viva.rewards.review import ReviewRules
    from viva.run.log import StopRule
    from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
    from viva.training.data import BuilderFactory, PromptItem
    from viva.training.loop import Training


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


def rules_of(config: Config) -> ReviewRules:
    """The preset with what the options change in it.

    Raises:
        ValueError: If a weight has an unknown name, or a number is out of range.
    """
    from viva.rewards.review import review_rules

    rules = review_rules(config.preset)
    weights = {**rules.weights, **(config.reward_weights or {})}
    return replace(rules, weights=weights, prior_precision=config.prior_precision)


def make_plan(config: Config) -> Plan[Config]:
    """Check all options and load the prompts; no model is loaded.

    Raises:
        ValueError: For anything the user has to mend.
    """
    from viva.recipes.plan import plan_run
    from viva.selfplay.critique import critique_protocol

    rules = rules_of(config)
    _stop_rule(config)
    critique_protocol(config.num_agents, personas=config.personas, comparisons=_agents_compare(config, rules))
    return plan_run(
        config,
        recipe="critique_self_play",
        summary=f"{counted(config.num_agents, 'agent')}, {config.preset} rewards",
    )


def _stop_rule(config: Config) -> StopRule | None:
    from viva.run.log import StopRule

    return None if config.stop_at is None else StopRule(levels=config.stop_at)


def _agents_compare(config: Config, rules: ReviewRules) -> bool:
    return rules.fit == "joint" and config.revision_votes == "agents"


def needs_judge(config: Config) -> bool:
    """Whether label probabilities compare revised with initial solutions."""
    return rules_of(config).fit == "joint" and config.revision_votes == "judge"


async def build_training(plan: Plan[Config], opened: OpenRun) -> Training:
    """The loop's parts for an open run."""
    from viva.recipes.loop import judged_by, make_training

    config = plan.config
    judge_policy: PolicyRef | None = None
    policy_refs: Sequence[PolicyRef] = ()
    if needs_judge(config):
        judge_policy, policy_refs = await judged_by(config.judge_policy, plan, opened)
    make_builder = conversation_factory(config, opened.renderer, judge_policy, grader=plan.grader)
    return make_training(plan, opened, make_builder, policy_refs=policy_refs, stop_rule=_stop_rule(config))


def conversation_factory(
    config: Config, renderer: Renderer, judge_policy: PolicyRef | None, *, grader: Grader
) -> BuilderFactory:
    """Makes the recipe's conversation for a prompt and a seed.

    Args:
        config: The options.
        renderer: Of the policy that talks and judges.
        judge_policy: Who compares revised with initial solutions; ``None``, or not asked, where `needs_judge` is false.
        grader: Tells for the metrics whether a solution is right.
    """
    from viva.judging.judge import PolicySelfComparisonJudge
    from viva.selfplay.critique import critique_group

    rules = rules_of(config)
    judge: PolicySelfComparisonJudge | None = None
    if judge_policy is not None and needs_judge(config):
        judge = PolicySelfComparisonJudge(judge_policy, renderer)

    def make_builder(item: PromptItem, seed: int) -> MultiAgentConversationEnvGroupBuilder:
        return critique_group(
            question=item.question,
            answer=item.answer,
            renderer=renderer,
            rules=rules,
            judge=judge,
            grader=grader,
            num_agents=config.num_agents,
            on_failure=config.on_failure,
            votes_on_own=config.votes_on_own,
            personas=config.personas,
            seed=seed,
        )

    return make_builder
