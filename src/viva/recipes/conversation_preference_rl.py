"""Conversation preference RL: agents take turns, the policy compares their solutions, win minus loss pays.

    viva train conversation_preference_rl model_name=<hub name or path> num_agents=3 max_rounds=5 batch_size=12 \\
        train_prompts_path=prompts.jsonl log_path=/tmp/run1

Options are ``key=value``; ``--help`` lists them. Everything that can be wrong with them is reported before a model
is loaded.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import chz

from viva.conversation.protocol import counted
from viva.recipes.protocol import ConversationConfig, Game
from viva.recipes.reward import CHOICE, refuse_unused, reward_named, user_code

if TYPE_CHECKING:
    from viva.recipes.plan import Plan
    from viva.rewards import Tournament
    from viva.rewards.base import Reward

_JUDGE = (
    *CHOICE,
    "judge_mode",
    "judge_prompt",
    "judge_prompt_path",
    "judge_max_tokens",
    "judge_max_off_set_mass",
)


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
    judge_mode: Literal["logprob", "verdict"] = chz.field(
        default="logprob", doc="compare the labels' probabilities, or let the judge write a verdict"
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

    def game(self) -> Game:
        """The conversation in turns, and the reward.

        Raises:
            ValueError: If it could not be held or paid, or an option of the judge is out of range.
        """
        from viva.selfplay.round_robin import round_robin_protocol
        from viva.selfplay.user_code import is_target

        is_whole = self.reward is not None and is_target(self.reward)
        reward = self.asking(self.paid_by(), is_whole=is_whole)
        protocol = round_robin_protocol(
            self.max_rounds, order=self.order, personas=self.personas, on_failure=self.on_failure
        )
        protocol = self.changed(protocol)
        reward.check(protocol, self.num_agents)
        return Game(protocol=protocol, reward=reward, num_agents=self.num_agents)

    def paid_by(self) -> Reward:
        """The reward, with this recipe's judge if it needs one.

        Raises:
            ValueError: If there is no such reward, or an option is given that would not change it.
        """
        from viva.judging.comparison import JUDGE_SYSTEM_PROMPT
        from viva.rewards import Shuffled, Tournament
        from viva.selfplay.user_code import is_target

        own = self.tournament()
        if self.reward is None:
            return own
        named = reward_named(self.reward)
        of = named.of if isinstance(named, Shuffled) else named
        is_whole = is_target(self.reward)
        """A value of the user's own, which says all about itself."""
        if isinstance(of, Tournament) and not is_whole:
            return replace(named, of=own) if isinstance(named, Shuffled) else own
        refuse_unused(self, ["tournament_pattern"], f"reward={self.reward} is no tournament")
        if is_whole or of.judge is None:
            # a run keeps the default text in its config.json, from which it is evaluated and repeated
            is_default = self.judge_text() == JUDGE_SYSTEM_PROMPT
            names = [name for name in _JUDGE if not (is_default and name == "judge_prompt")]
            refuse_unused(self, names, f"reward={self.reward} asks no judge of this recipe")
            return named
        return named.judged_by(own.compared_by)

    def tournament(self) -> Tournament:
        """The reward.

        Raises:
            ValueError: For the first option of this recipe's own that is out of range.
        """
        from viva.recipes.plan import at_least
        from viva.rewards import tournament

        at_least(self, {"max_rounds": 1, "judge_max_tokens": 1})
        if not 0 <= self.judge_max_off_set_mass <= 1:
            raise ValueError(f"judge_max_off_set_mass must be from 0 to 1; got {self.judge_max_off_set_mass}")
        return tournament(
            pattern=self.tournament_pattern,
            mode=self.judge_mode,
            system_prompt=self.judge_text(),
            max_tokens=self.judge_max_tokens,
            max_off_set_mass=self.judge_max_off_set_mass,
        )

    def judge_text(self) -> str:
        """The judge's system message: the text, the file's, or the package's.

        Raises:
            ValueError: If there are two texts, or none can be read.
        """
        from viva.judging.comparison import JUDGE_SYSTEM_PROMPT

        text = JUDGE_SYSTEM_PROMPT if self.judge_prompt is None else self.judge_prompt
        if self.judge_prompt_path is not None:
            if self.judge_prompt is not None:
                raise ValueError("give judge_prompt or judge_prompt_path, not both")
            path = Path(self.judge_prompt_path).expanduser()
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"judge_prompt_path={path} cannot be read as UTF-8 text: {error}") from error
        if not text.strip():
            raise ValueError(
                "judge_prompt must be text that is not empty; it must ask for a JSON object with preference"
            )
        return text

    def summary(self) -> str:
        """One conversation in words."""
        told = ("" if self.reward is None else f", reward {self.reward}") + self.controlled_by()
        return (
            f"{counted(self.num_agents, 'agent')} x {counted(self.max_rounds, 'round')} ({self.order}){told}"
        )

    def make_plan(self) -> Plan:
        """Check all options and load the prompts."""
        self.paid_by()
        if self.num_agents >= 2:  # else a later check tells it better
            self.game()
        code = {"user_code": user_code(self.reward)} if user_code(self.reward) else {}
        return self.planned(
            recipe="conversation_preference_rl",
            summary=self.summary(),
            record={"judge_prompt": self.judge_text(), **code},
        )
