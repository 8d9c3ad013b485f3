"""Critique self-play (CoNL): propose, rank blindly and criticise, revise or defend, final verdict.

    viva train critique_self_play model_name=<hub name or path> num_agents=4 batch_size=16 \\
        train_prompts_path=prompts.jsonl log_path=/tmp/run2

Options are ``key=value``; ``--help`` lists them. Everything that can be wrong with them is reported before a model
is loaded. The options that all recipes share mean the same as in conversation preference RL.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import chz

from viva.conversation.protocol import counted
from viva.recipes.protocol import ConversationConfig, Game

if TYPE_CHECKING:
    from viva.recipes.plan import Plan
    from viva.rewards.review import ReviewRules


@chz.chz
class Config(ConversationConfig):
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

    def rules(self) -> ReviewRules:
        """The preset with what the options change in it.

        Raises:
            ValueError: If a weight has an unknown name, or a number is out of range.
        """
        from viva.rewards.review import review_rules

        rules = review_rules(self.preset)
        weights = {**rules.weights, **(self.reward_weights or {})}
        return replace(rules, weights=weights, prior_precision=self.prior_precision)

    def game(self) -> Game:
        """The conversation in which solutions are reviewed, and peer review.

        Raises:
            ValueError: If it could not be held, or the rules say nothing.
        """
        from viva.judging.judge import JudgeOptions
        from viva.rewards.critique import PeerReview
        from viva.selfplay.critique import critique_protocol

        rules, by_agents = self.rules(), self.revision_votes == "agents"
        protocol = critique_protocol(
            self.num_agents,
            personas=self.personas,
            on_failure=self.on_failure,
            votes_on_own=self.votes_on_own,
            comparisons=rules.fit == "joint" and by_agents,
        )
        judge = None if by_agents else JudgeOptions(policy=self.judge_policy)
        return Game(
            protocol=protocol, reward=PeerReview(rules=rules, compared_by=judge), num_agents=self.num_agents
        )

    def summary(self) -> str:
        """One conversation in words."""
        return f"{counted(self.num_agents, 'agent')}, {self.preset} rewards"

    def make_plan(self) -> Plan:
        """Check all options and load the prompts."""
        from viva.recipes.plan import plan_run
        from viva.run.log import StopRule

        self.game()
        return plan_run(
            self,
            recipe="critique_self_play",
            summary=self.summary(),
            stop_rule=None if self.stop_at is None else StopRule(levels=self.stop_at),
        )
