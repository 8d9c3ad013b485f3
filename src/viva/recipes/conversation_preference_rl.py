"""Conversation preference RL: agents take turns, the policy compares their solutions, win minus loss pays.

    viva train conversation_preference_rl model_name=<hub name or path> num_agents=3 max_rounds=5 batch_size=12 \\
        train_prompts_path=prompts.jsonl log_path=/tmp/run1

Options are ``key=value``; ``--help`` lists them. Everything that can be wrong with them is reported before a model
is loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import chz

from viva.conversation.protocol import counted
from viva.recipes.protocol import ConversationConfig, Game
from viva.recipes.reward import refuse_unused, reward_named, user_code

if TYPE_CHECKING:
    from viva.recipes.plan import Plan
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

    def game(self) -> Game:
        """The conversation in turns, and the reward.

        Raises:
            ValueError: If it could not be held or paid, or an option of the judge is out of range.
        """
        from viva.recipes.plan import at_least
        from viva.selfplay.round_robin import round_robin_protocol
        from viva.selfplay.user_code import is_target

        at_least(self, {"max_rounds": 1})
        is_whole = self.reward is not None and is_target(self.reward)
        reward = self.asking(self.paid_by(), is_whole=is_whole)
        protocol = round_robin_protocol(
            self.max_rounds, order=self.order, personas=self.personas, on_failure=self.on_failure
        )
        protocol = self.changed(protocol)
        reward.check(protocol, self.num_agents)
        return Game(protocol=protocol, reward=reward, num_agents=self.num_agents)

    def paid_by(self) -> Reward:
        """The reward, with this recipe's tournament where it is one.

        Raises:
            ValueError: If there is no such reward, or an option is given that would not change it.
        """
        from viva.rewards import Shuffled, Tournament, tournament
        from viva.selfplay.user_code import is_target

        own = tournament(pattern=self.tournament_pattern)
        if self.reward is None:
            return own
        named = reward_named(self.reward)
        of = named.of if isinstance(named, Shuffled) else named
        is_whole = is_target(self.reward)
        """A value of the user's own, which says all about itself."""
        if isinstance(of, Tournament) and not is_whole:
            return replace(named, of=own) if isinstance(named, Shuffled) else own
        refuse_unused(self, ["tournament_pattern"], f"reward={self.reward} is no tournament")
        return named

    def summary(self) -> str:
        """One conversation in words."""
        told = ("" if self.reward is None else f", reward {self.reward}") + self.controlled_by()
        return (
            f"{counted(self.num_agents, 'agent')} x {counted(self.max_rounds, 'round')} ({self.order}){told}"
        )

    def make_plan(self) -> Plan:
        """Check all options and load the prompts."""
        if self.num_agents >= 2:  # else a later check tells it better
            self.game()
        return self.planned(
            recipe="conversation_preference_rl",
            summary=self.summary(),
            record={"user_code": user_code(self.reward)} if user_code(self.reward) else None,
        )
