"""From the options of the recipe to a run: checks first, then data, then the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from signal import Signals
from typing import TYPE_CHECKING

from tinker_cookbook.renderers.base import Renderer

from viva.conversation.wording import counted
from viva.eval.answers import is_correct
from viva.judging.judge import PolicySelfComparisonJudge
from viva.judging.policy import PolicyRef
from viva.recipes.common import OpenRun
from viva.recipes.loop import judged_by, make_training, run_recipe
from viva.recipes.plan import Plan, plan_run
from viva.rewards.base import Grader
from viva.rewards.review import ReviewRules, review_rules
from viva.run.log import StopRule
from viva.selfplay.critique import critique_group, critique_protocol
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.training.data import BuilderFactory, PromptItem
from viva.training.loop import Training

if TYPE_CHECKING:
    from viva.recipes.critique_self_play.train import Config

__all__ = ["build_training", "conversation_factory", "make_plan", "needs_judge", "rules_of", "run"]


def rules_of(config: Config) -> ReviewRules:
    """The preset with what the options change in it.

    Raises:
        ValueError: If a weight has an unknown name, or a number is out of range.
    """
    rules = review_rules(config.preset)
    weights = {**rules.weights, **(config.reward_weights or {})}
    return replace(rules, weights=weights, prior_precision=config.prior_precision)


def make_plan(config: Config) -> Plan[Config]:
    """Check all options and load the prompts; no model is loaded.

    Raises:
        ValueError: For anything the user has to mend.
    """
    rules = rules_of(config)
    _stop_rule(config)
    critique_protocol(config.num_agents, personas=config.personas, comparisons=_agents_compare(config, rules))
    return plan_run(
        config,
        recipe="critique_self_play",
        summary=f"{counted(config.num_agents, 'agent')}, {config.preset} rewards",
    )


def _stop_rule(config: Config) -> StopRule | None:
    return None if config.stop_at is None else StopRule(levels=config.stop_at)


def _agents_compare(config: Config, rules: ReviewRules) -> bool:
    return rules.fit == "joint" and config.revision_votes == "agents"


async def run(config: Config) -> Signals | None:
    """Do the whole run, see `viva.recipes.loop.run_recipe`."""
    return await run_recipe(lambda: make_plan(config), build_training)


def needs_judge(config: Config) -> bool:
    """Whether label probabilities compare revised with initial solutions."""
    return rules_of(config).fit == "joint" and config.revision_votes == "judge"


async def build_training(plan: Plan[Config], opened: OpenRun) -> Training:
    """The loop's parts for an open run."""
    config = plan.config
    judge_policy: PolicyRef | None = None
    policy_refs: Sequence[PolicyRef] = ()
    if needs_judge(config):
        judge_policy, policy_refs = await judged_by(config.judge_policy, plan, opened)
    make_builder = conversation_factory(config, opened.renderer, judge_policy)
    return make_training(plan, opened, make_builder, policy_refs=policy_refs, stop_rule=_stop_rule(config))


def conversation_factory(
    config: Config, renderer: Renderer, judge_policy: PolicyRef | None, *, grader: Grader = is_correct
) -> BuilderFactory:
    """Makes the recipe's conversation for a prompt and a seed.

    Args:
        config: The options.
        renderer: Of the policy that talks and judges.
        judge_policy: Who compares revised with initial solutions; ``None``, or not asked, where `needs_judge` is false.
        grader: Tells for the metrics whether a solution is right.
    """
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
