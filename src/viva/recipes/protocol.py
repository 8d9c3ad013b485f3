"""A conversation of your own, declared as a Protocol, with any reward.

    viva train path.py:PROTOCOL reward=path.py:FUNCTION num_agents=2 train_prompts_path=prompts.jsonl

Options are ``key=value``; ``--help`` lists them. The protocol is played by scripted agents before a model is loaded, so
that its mistakes are reported first. The options that all recipes share mean the same as in conversation preference RL.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import chz

from viva.conversation.prompts import counted
from viva.recipes.config import RecipeConfig

if TYPE_CHECKING:
    from tinker_cookbook.renderers.base import Renderer

    from viva.conversation.protocol import Protocol
    from viva.judging.policy import PolicyRef
    from viva.recipes.common import OpenRun
    from viva.recipes.plan import Plan
    from viva.rewards.base import Grader, Reward
    from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
    from viva.training.data import BuilderFactory, PromptItem
    from viva.training.loop import Training


@chz.chz
class Config(RecipeConfig):
    """Options of a protocol of the user's own."""

    protocol: str = chz.field(doc="path.py:PROTOCOL or module:PROTOCOL; critique or round_robin")
    reward: str | None = chz.field(
        default=None,
        doc="tournament, peer_review, path.py:FUNCTION or module:FUNCTION; default: the protocol's",
    )
    on_failure: Literal["void", "continue"] | None = chz.field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=None, doc="when an agent fails; default: as the protocol says"
    )
    personas: dict[int, str] | None = chz.field(default=None, doc="persona texts; default: the protocol's")

    log_path: str = "runs/protocol"

    @property
    def judge_policy(self) -> Literal["current", "initial"]:
        """Whose comparisons the reward asks for, if it asks for any."""
        judge = reward_of(self, protocol_of(self)).judge
        return "current" if judge is None else judge.policy


def protocol_of(config: Config) -> Protocol:
    """The protocol with what the options change in it.

    Raises:
        ValueError: If there is none, or it cannot be played.
    """
    from viva.selfplay.check import find_protocol

    protocol = find_protocol(config.protocol, config.num_agents)
    if config.personas is not None:
        protocol = replace(protocol, personas=config.personas)
    if config.on_failure is not None:
        protocol = replace(protocol, on_failure=config.on_failure)
    protocol.check()
    return protocol


def reward_of(config: Config, protocol: Protocol) -> Reward:
    """The reward that the options or the protocol name.

    Raises:
        ValueError: If there is none, or it cannot pay the protocol's conversations.
    """
    from viva.rewards import find_reward
    from viva.selfplay.user_code import is_target, load_target

    named = protocol.reward if config.reward is None else config.reward
    reward = find_reward(load_target(named) if isinstance(named, str) and is_target(named) else named)
    reward.check(protocol, config.num_agents)
    return reward


def make_plan(config: Config) -> Plan[Config]:
    """Check all options, play the protocol with scripted agents and load the prompts; no model is loaded.

    Raises:
        ValueError: For anything the user has to mend.
    """
    from viva.recipes.plan import plan_run
    from viva.selfplay.check import dry_runs
    from viva.selfplay.user_code import is_target, source_digest

    protocol = protocol_of(config)
    reward = reward_of(config, protocol)
    runs = dry_runs(protocol, config.num_agents)
    if problems := [f"{run.case}: {problem}" for run in runs for problem in run.problems]:
        listed = "\n".join(f"- {problem}" for problem in problems)
        raise ValueError(
            f"protocol {protocol.name!r} does not work with {config.num_agents} agents:\n{listed}"
        )
    reward.check_played(runs[0].conversation)
    named = [name for name in (config.protocol, config.reward) if name is not None and is_target(name)]
    return plan_run(
        config,
        recipe="protocol",
        summary=f"{protocol.name}, {counted(config.num_agents, 'agent')}, reward {reward.name}",
        record={
            "reward_name": reward.name,
            "user_code": {name: source_digest(name) for name in named},
        },
    )


async def build_training(plan: Plan[Config], opened: OpenRun) -> Training:
    """The loop's parts for an open run."""
    from viva.recipes.loop import judged_by, make_training

    config = plan.config
    judge = reward_of(config, protocol_of(config)).judge
    policy, policy_refs = None, []
    if judge is not None:
        policy, policy_refs = await judged_by(judge.policy, plan, opened)
    make_builder = conversation_factory(config, opened.renderer, policy, grader=plan.grader)
    return make_training(plan, opened, make_builder, policy_refs=policy_refs)


def conversation_factory(
    config: Config, renderer: Renderer, judge_policy: PolicyRef | None, *, grader: Grader
) -> BuilderFactory:
    """Makes the conversation for a prompt and a seed.

    Args:
        config: The options.
        renderer: Of the policy that talks and judges.
        judge_policy: Who judges, if the reward asks for it.
        grader: Tells for the metrics whether a solution is right.
    """
    from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder

    protocol = protocol_of(config)
    reward = reward_of(config, protocol)
    options = reward.judge
    judge = None if options is None or judge_policy is None else options.make(judge_policy, renderer)

    def make_builder(item: PromptItem, seed: int) -> MultiAgentConversationEnvGroupBuilder:
        return MultiAgentConversationEnvGroupBuilder(
            question=item.question,
            renderer=renderer,
            protocol=protocol,
            reward=reward,
            judge=judge,
            answer=item.answer,
            grader=grader,
            num_agents=config.num_agents,
            seed=seed,
        )

    return make_builder
