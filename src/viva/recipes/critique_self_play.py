"""Critique self-play (CoNL): propose, rank blindly and criticise, revise or defend, final verdict.

    viva train critique_self_play model_name=<hub name or path> num_agents=4 batch_size=16 \\
        train_prompts_path=prompts.jsonl log_path=/tmp/run2

Options are ``key=value``; ``--help`` lists them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import chz

from viva.conversation.messages import counted
from viva.conversation.protocol import Protocol
from viva.recipes.protocol import ConversationConfig
from viva.recipes.reward import is_own, refuse_unused
from viva.selfplay.critique import critique_protocol
from viva.selfplay.user_code import reward_named

if TYPE_CHECKING:
    from viva.rewards.base import Reward
    from viva.rewards.review import ReviewRules


@chz.chz
class Config(ConversationConfig):
    """Options of critique self-play."""

    num_agents: int = chz.field(default=4, doc="agents in each conversation, 2 to 26")
    reward: str | None = chz.field(
        default=None,
        doc="pays instead of the preset: r_sol, r_meta or r_diag alone, another name of viva.rewards, "
        "shuffled_NAME, path.py:FUNCTION",
    )
    preset: Literal["paper", "robust"] = chz.field(
        default="robust", doc="how scores become rewards: as the CoNL paper, or its repaired form"
    )
    reward_weights: dict[str, float] | None = chz.field(
        default=None,
        doc="weights of r_sol, r_meta and r_diag; default: 1, 0, 0 by robust and 1, 1, 2 by paper",
    )
    prior_precision: float = chz.field(
        default=1.0, doc="of the Gaussian prior on Bradley-Terry strengths; larger pulls scores together"
    )
    solution_floor: float | None = chz.field(
        default=None,
        doc="solutions that differ by fewer standard errors train nothing; default: 0.1 by robust, 0 by paper",
    )
    revision_votes: Literal["judge", "agents"] = chz.field(
        default="judge",
        doc="robust: who compares revised with initial solutions, the policy's label probabilities or the agents",
    )
    ballots: Literal["written", "labels"] = chz.field(
        default="written",
        doc="how agents vote: by rankings that they write, or pair by pair by label probabilities, without a token",
    )
    votes_on_own: bool | None = chz.field(
        default=None, doc="let agents rank their own solution too; default: only between two agents"
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
        if self.reward_weights and max(weights.values()) <= 0:
            raise ValueError(
                f"reward_weights leave no stream a weight above 0, so nothing would be learnt; got {weights} with "
                f"preset={self.preset}. Give r_sol, r_meta or r_diag one"
            )
        floor = rules.solution_floor if self.solution_floor is None else self.solution_floor
        return replace(rules, weights=weights, prior_precision=self.prior_precision, solution_floor=floor)

    def declared(self, reward: Reward) -> Protocol:
        """The conversation in which solutions are reviewed."""
        return critique_protocol(
            self.num_agents,
            personas=self.personas,
            on_failure=self.on_failure,
            votes_on_own=self.votes_on_own,
            comparisons=reward.agents_compare,
            ballots=self.ballots,
        )

    def paid_by(self) -> Reward:
        """The reward by the recipe's rules and judge, as far as they are its own."""
        from viva.judging.judge import JudgeOptions
        from viva.rewards.comas import Comas
        from viva.rewards.critique import PeerReview
        from viva.rewards.review import STREAMS

        rules = self.rules()
        if rules.fit == "separate":
            why = f"preset={self.preset} compares no revised solution with an initial one"
            refuse_unused(self, ["revision_votes"], why, remedy="use preset=robust, or leave it out")
            if self.num_agents == 2 and self.votes_on_own is False:
                raise ValueError(
                    f"votes_on_own=false leaves each of two agents one solution, which cannot be ranked, and "
                    f"preset={self.preset} scores by rankings alone, so nothing would be trained; leave votes_on_own "
                    "out, or use num_agents=3 or more, or preset=robust"
                )
        by_judge = self.revision_votes == "judge"
        own = PeerReview(rules=rules, compared_by=JudgeOptions() if by_judge else None)
        if self.reward is None:
            return own
        named = reward_named(self.reward)
        of, is_whole = named.inner, is_own(self.reward)
        if isinstance(of, PeerReview) and not is_whole:
            if of.name in STREAMS:
                refuse_unused(self, ["reward_weights"], f"reward={self.reward} pays one stream alone")
                own = own.only(of.name)
            if (
                of.name == "r_meta"
                and self.num_agents < 4
                and not (self.votes_on_own and self.num_agents > 2)
            ):
                raise ValueError(
                    f"reward={self.reward} needs voters who meet on a pair, of whom {self.num_agents} agents have too "
                    "few, so nothing would be trained; use num_agents=4 or more, or votes_on_own=true among three"
                )
            return named.around(own)
        if isinstance(of, Comas) and not is_whole:
            refuse_unused(self, ["reward_weights"], f"reward={self.reward} has no streams with weights")
            return named.around(replace(of, review=own))
        unused = ["preset", "reward_weights", "prior_precision", "solution_floor", "revision_votes"]
        refuse_unused(self, unused, f"reward={self.reward} has no such rules")
        return named

    def summary(self) -> str:
        """One conversation in words."""
        told = f"{self.preset} rewards" if self.reward is None else f"reward {self.reward}"
        return f"{counted(self.num_agents, 'agent')}, {told}{self.controlled_by()}"
