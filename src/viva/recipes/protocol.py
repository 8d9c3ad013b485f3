"""A conversation of your own, declared as a Protocol, with any reward.

    viva train path.py:PROTOCOL reward=path.py:FUNCTION num_agents=2 train_prompts_path=prompts.jsonl

The protocol is played by scripted agents before a model is loaded, so that its mistakes are reported first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import chz

from viva.conversation.messages import counted
from viva.conversation.protocol import Control, Protocol
from viva.conversation.roles import Roles, assign
from viva.recipes.reward import AskedConfig, is_own
from viva.run.alarms import MEASURED, Level, StopRule, read_levels
from viva.selfplay.check import dry_runs, find_protocol
from viva.selfplay.controls import controlled
from viva.selfplay.user_code import reward_named, source_digests

if TYPE_CHECKING:
    from tinker_cookbook.renderers.base import Renderer

    from viva.judging.comparison import Judge
    from viva.judging.judge import PolicyRef
    from viva.judging.scorer import Scorer
    from viva.recipes.common import OpenRun
    from viva.recipes.plan import Plan
    from viva.rewards.base import Grader, Reward
    from viva.training.data import BuilderFactory
    from viva.training.loop import Evaluator, Training


@dataclass(frozen=True, kw_only=True)
class Game:
    """A conversation and the reward that pays it, as a recipe's options declare them."""

    protocol: Protocol
    reward: Reward
    num_agents: int

    def factory(
        self,
        renderer: Renderer,
        grader: Grader,
        *,
        judge: Judge | None = None,
        scorer: Scorer | None = None,
        voter_policy: PolicyRef | None = None,
        roles: Roles | None = None,
        initial_judge: Judge | None = None,
        initial_judge_pairs: int = 0,
    ) -> BuilderFactory:
        """Makes the conversation about a prompt, for a seed.

        The arguments are fields of `MultiAgentConversationEnvGroupBuilder`, but for ``voter_policy``: the policy that
        votes by label probabilities, where the protocol has such votes.
        """
        from viva.judging.judge import PolicySelfComparisonJudge
        from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder

        voter = None
        if voter_policy is not None and self.protocol.votes_by_labels:
            voter = PolicySelfComparisonJudge(voter_policy, renderer)
        return lambda item, seed: MultiAgentConversationEnvGroupBuilder(
            question=item.question,
            renderer=renderer,
            protocol=self.protocol,
            reward=self.reward,
            judge=judge,
            scorer=scorer,
            voter=voter,
            roles=roles,
            initial_judge=initial_judge,
            initial_judge_pairs=initial_judge_pairs,
            answer=item.answer,
            grader=grader,
            num_agents=self.num_agents,
            seed=seed,
        )


@chz.chz
class ConversationConfig(AskedConfig):
    """Options of a recipe that trains conversations."""

    reward: str | None = None
    prompts: dict[str, str] | None = chz.field(
        default=None,
        doc='other words: the system message and what segments ask, like {"system": "...", "proposal": "..."}',
    )

    policies: str | dict[str, str] = chz.field(
        default="shared",
        doc='who talks: one policy (shared), one each (per_agent, per_role), or by name, like {"agent_0": "trained", '
        '"others": "initial"}; weights: trained, initial, past:STEPS, league:STEPS, a run, RUN@CHECKPOINT, a model',
    )
    judge_member: str | None = chz.field(
        default=None, doc="policies: whose weights judge; default: critic if there is one, else the main one"
    )

    control: Control | None = chz.field(
        default=None,
        doc="take the content away: foreign_critiques, shuffled_critiques, no_critiques or no_exchange",
    )

    stop_at: dict[str, float] | None = chz.field(
        default=None,
        doc="end the run and keep its best checkpoint when a metric rises above, like {'reward_truth_gap': 0.45}",
    )
    stop_on: list[str] | None = chz.field(
        default=None,
        doc="end the run and keep its best checkpoint when one of these alarms fires, like ['mutual_votes']",
    )
    alarm_levels: str | None = chz.field(
        default=None,
        doc="JSON file with what alarms compare with (benchmarks/alarms.py); default: the run's own steps before",
    )

    initial_judge_pairs: int = chz.field(
        default=0,
        doc="pairs of a conversation's final solutions that the policy at the start judges, too, for the alarm "
        "initial_judge",
    )

    def stop_rule(self) -> StopRule | None:
        """The rule that ends the run early; `ValueError` if it could never end one, or always would."""
        if "initial_judge" in (self.stop_on or ()) and not self.initial_judge_pairs:
            raise ValueError(
                "stop_on names initial_judge, which needs pairs that the policy at the start judges, too; give "
                "initial_judge_pairs=3, or another number above 0"
            )
        return StopRule.of({"stop_at": self.stop_at, "stop_on": self.stop_on})

    def levels(self) -> Mapping[str, Level]:
        """Reference levels of the alarms, by name.

        Raises:
            ValueError: If the file cannot be read, or lacks an alarm that is to end the run.
        """
        found = MEASURED if self.alarm_levels is None else read_levels(self.alarm_levels)
        if missing := sorted(set(self.stop_on or ()) - found.keys()):
            raise ValueError(
                f"stop_on names {', '.join(missing)}, of which alarm_levels={self.alarm_levels} says nothing; add "
                "them there, or leave one of the two out"
            )
        return found

    def named_reward(self) -> object:
        """Name or value of the reward; ``None``: the recipe's own."""
        return self.reward

    def paid_by(self) -> Reward:
        """The reward, before the judge and scorer of the options.

        Raises:
            ValueError: If there is no such reward, or an option is given that would not change it.
        """
        return reward_named(self.named_reward())

    def declared(self, reward: Reward) -> Protocol:
        """The protocol for a reward, before its words and controls; `ValueError` if it could not be held."""
        raise NotImplementedError

    def game(self) -> Game:
        """The conversation that the options declare, and its reward; `ValueError` if it could not be held or paid."""
        reward = self.asking(self.paid_by(), is_whole=is_own(self.named_reward()))
        protocol = self.declared(reward)
        if self.prompts is not None:
            protocol = protocol.with_prompts(self.prompts)
        if self.control is not None:
            protocol = controlled(protocol, self.control, self.num_agents)
        protocol.check()
        reward.check(protocol, self.num_agents)
        return Game(protocol=protocol, reward=reward, num_agents=self.num_agents)

    def record(self) -> dict[str, object]:
        """Entries of ``config.json`` beside the options."""
        code = source_digests(self.reward)
        return {"user_code": code} if code else {}

    def summary(self) -> str:
        """One conversation in words, like ``3 agents x 5 rounds``."""
        raise NotImplementedError

    async def build_training(self, plan: Plan, opened: OpenRun) -> Training:
        """The loop's parts for an open run."""
        from viva.judging.judge import PolicyRef
        from viva.recipes.judges import asked_by, initial_judge
        from viva.recipes.loop import direct_evaluators, make_training
        from viva.recipes.policies import MemberEvaluator, judging_member, open_members
        from viva.training.data import PromptDataset
        from viva.training.followers import Current

        game, talking = self.game(), PolicyRef(timeout_s=plan.config.policy_timeout_s)
        roles, members, judging, judged = self.roles(game), None, None, opened
        evaluators: list[Evaluator] = []
        if roles is not None:
            members = await open_members(roles, plan, opened)
            judging = judging_member(roles, self.judge_member)
            judged = replace(opened, client=members.trained.get(judging, opened.client))
            evaluators = [
                MemberEvaluator(inner=evaluator, name=name)
                for name in members.others
                for evaluator in direct_evaluators(plan, opened)
            ]
        judge, scorer, followers = await asked_by(game.reward, plan, judged)
        factory = partial(
            game.factory,
            opened.renderer,
            plan.check.is_right,
            judge=judge,
            scorer=scorer,
            voter_policy=talking,
            roles=roles,
        )
        trained = factory()
        if self.initial_judge_pairs:
            unchanging, more = await initial_judge(plan, judged, self.judge_text())
            trained = factory(initial_judge=unchanging, initial_judge_pairs=self.initial_judge_pairs)
            followers = [*followers, *more]
        training = await make_training(
            plan,
            opened,
            factory(),
            dataset=PromptDataset(order=plan.order, make_builder=trained),
            followers=[
                Current(each.policy, judging) if isinstance(each, Current) else each
                for each in (*followers, Current(talking))
            ],
            evaluators=evaluators,
        )
        return replace(training, members=members, stop_rule=self.stop_rule(), alarms=self.levels())

    def roles(self, game: Game) -> Roles | None:
        """The policies of a conversation; ``None`` where there is one. `ValueError` if they do not fit it."""
        return None if self.policies == "shared" else assign(self.policies, game.protocol, game.num_agents)

    def make_plan(self) -> Plan:
        """Check all options and load the prompts; conversations that need a partner have one."""
        from viva.recipes.judges import with_checked_judge
        from viva.recipes.plan import at_least, plan_run

        game = self.game()
        at_least(self, {"initial_judge_pairs": 0})
        self.stop_rule()
        levels, record = self.levels(), self.record()
        if self.alarm_levels is not None:
            record["levels"] = {name: asdict(level) for name, level in levels.items()}
        recipe = type(self).__module__.rpartition(".")[2]
        plan = plan_run(self, recipe=recipe, summary=self.summary(), record=record)
        _check_answers(plan, game.reward, self.stop_at)
        plan = with_checked_judge(plan, game.reward, self.judge_text())
        if (roles := self.roles(game)) is not None or self.judge_member is not None:
            from viva.recipes.policies import with_checked_policies

            plan = with_checked_policies(plan, roles, game.reward, self.judge_member)
        if self.control == "foreign_critiques":
            _check_partners(plan)
        return plan

    def controlled_by(self) -> str:
        """The control in words, for summaries; empty without one."""
        return "" if self.control is None else f", control {self.control}"


def _check_answers(plan: Plan, reward: Reward, stop_at: Mapping[str, float] | None) -> None:
    """Refuse what needs known answers where no problem to train on has one; of some, those without are void."""
    if any(item.answer is not None for item in plan.order.items):
        return
    none = "known answers, and no problem to train on has one"
    if reward.needs_answers:
        raise ValueError(
            f"the reward {reward.name} needs {none}; give them in the key answer, or use majority"
        )
    if stop_at:
        raise ValueError(
            f"stop_at watches {', '.join(stop_at)}, which needs {none}; give some, or use stop_on, which needs none"
        )


def _check_partners(plan: Plan) -> None:
    """Refuse batches without two conversations on different problems."""
    items, number = plan.order.items, plan.order.groups_per_batch
    first = items[0].question
    spoken = plan.test[: plan.config.num_test_conversations]
    told = None
    if number < 2:
        told = f"batch_size={number * plan.unit.samples} holds one; give {2 * plan.unit.samples} or more"
    elif all(items[place].question == first for place in range(1, len(items))):
        told = "all prompts to train on are the same; give more of them"
    elif spoken and len({item.question for item in spoken}) < 2:
        told = f"num_test_conversations={len(spoken)} has one problem; give 2 or more, or 0"
    if told is not None:
        raise ValueError(
            f"control=foreign_critiques needs conversations on two problems in every batch: {told}"
        )


@chz.chz
class Config(ConversationConfig):
    """Options of a protocol of the user's own."""

    protocol: str = chz.field(doc="path.py:PROTOCOL or module:PROTOCOL; critique or round_robin")
    reward: str | None = chz.field(
        default=None,
        doc="a name of viva.rewards (docs/rewards.md has the table), shuffled_NAME, path.py:FUNCTION or "
        "module:FUNCTION; default: the protocol's",
    )
    on_failure: Literal["void", "continue"] | None = chz.field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=None, doc="when an agent fails; default: as the protocol says"
    )
    personas: dict[int, str] | None = chz.field(default=None, doc="persona texts; default: the protocol's")

    log_path: str = "runs/protocol"

    def named_reward(self) -> object:
        """Name or value of the reward, of the options or else of the protocol."""
        if self.reward is not None:
            return self.reward
        return find_protocol(self.protocol, self.num_agents).reward

    def declared(self, reward: Reward) -> Protocol:
        """The protocol with what the options change in it; `ValueError` if there is none."""
        del reward
        protocol = find_protocol(self.protocol, self.num_agents)
        if self.personas is not None:
            protocol = replace(protocol, personas=self.personas)
        if self.on_failure is not None:
            protocol = replace(protocol, on_failure=self.on_failure)
        return protocol

    def record(self) -> dict[str, object]:
        """Entries of ``config.json`` beside the options."""
        name = self.paid_by().name
        return {"reward_name": name, "user_code": source_digests(self.protocol, self.reward)}

    def summary(self) -> str:
        """One conversation in words."""
        game = self.game()
        told = f"{game.protocol.name}, reward {game.reward.name}{self.controlled_by()}"
        return f"{counted(self.num_agents, 'agent')}, {told}"

    def make_plan(self) -> Plan:
        """Check all options, play the protocol with scripted agents and load the prompts."""
        game = self.game()
        protocol, reward = game.protocol, game.reward
        runs = dry_runs(protocol, self.num_agents)
        if problems := [f"{run.case}: {problem}" for run in runs for problem in run.problems]:
            listed = "\n".join(f"- {problem}" for problem in problems)
            raise ValueError(
                f"protocol {protocol.name!r} does not work with {self.num_agents} agents:\n{listed}"
            )
        reward.check_played(runs[0].conversation)
        return super().make_plan()
