"""Conversation preference RL: agents take turns, the policy compares their solutions, win minus loss pays.

    viva train conversation_preference_rl model_name=<hub name or path> num_agents=3 max_rounds=5 batch_size=12 \\
        train_prompts_path=prompts.jsonl log_path=/tmp/run1

Options are ``key=value``; ``--help`` lists them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import chz

from viva.conversation.messages import counted
from viva.conversation.protocol import Protocol
from viva.recipes.protocol import ConversationConfig
from viva.recipes.reward import is_own, refuse_unused
from viva.selfplay.round_robin import round_robin_protocol
from viva.selfplay.user_code import reward_named

if TYPE_CHECKING:
    from viva.rewards.base import Reward


@chz.chz
class Config(ConversationConfig):
    """Options of conversation preference RL."""

    max_rounds: int = chz.field(default=5, doc="rounds of each conversation")
    order: Literal["sequential", "simultaneous"] = chz.field(
        default="sequential", doc="one after another, or all at once without seeing replies of the same round"
    )

    reward: str | None = chz.field(
        default=None,
        doc="pays instead of win minus loss: majority, maca, answers, another name of viva.rewards, shuffled_NAME, "
        "path.py:FUNCTION",
    )
    tournament_pattern: Literal["all_pairs_both_ways", "all_pairs_one_way"] = chz.field(
        default="all_pairs_both_ways", doc="compare every pair in both orders or in one"
    )

    log_path: str = "runs/conversation_preference_rl"

    def declared(self, reward: Reward) -> Protocol:
        """The conversation in turns."""
        from viva.recipes.plan import at_least

        del reward
        at_least(self, {"num_agents": 2, "max_rounds": 1})
        return round_robin_protocol(
            self.max_rounds, order=self.order, personas=self.personas, on_failure=self.on_failure
        )

    def paid_by(self) -> Reward:
        """The reward, with this recipe's tournament where it is one."""
        from viva.rewards import Tournament, tournament

        own = tournament(pattern=self.tournament_pattern)
        if self.reward is None:
            return own
        named = reward_named(self.reward)
        if isinstance(named.inner, Tournament) and not is_own(self.reward):
            return named.around(own)
        refuse_unused(self, ["tournament_pattern"], f"reward={self.reward} is no tournament")
        return named

    def summary(self) -> str:
        """One conversation in words."""
        told = ("" if self.reward is None else f", reward {self.reward}") + self.controlled_by()
        return (
            f"{counted(self.num_agents, 'agent')} x {counted(self.max_rounds, 'round')} ({self.order}){told}"
        )
