"""A user's function of a conversation as a reward."""

import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TypeAlias, cast

from viva.conversation.records import Conversation
from viva.judging.reasoning_gym import plain_answer
from viva.judging.records import ConversationRecord
from viva.rewards.base import NO_MODELS, Models, Played, Reward, Scored, agent_pay, paid, reply_credit

Pay: TypeAlias = Mapping[int, float] | Mapping[str, Mapping[int, float]]
"""Rewards by agent id, or by segment and agent id."""

RewardFunction = Callable[[Conversation], Pay | Awaitable[Pay]]


@dataclass(frozen=True, kw_only=True)
class FunctionReward(Reward):
    """A user's function of the `Conversation`, whose ``answer`` is the known one, if there is one.

    It returns a reward for each agent that finished, or one for each segment and agent; all tokens of the replies in
    a segment earn that segment's reward, and replies of segments that it leaves out earn nothing. It may be a
    coroutine function.
    """

    function: RewardFunction
    name: str = "function"

    async def score(self, played: Played) -> Scored:
        """Ask the function; what it raises itself passes through, with a note of where that was."""
        segments = {each.name: each.stream for round_ in played.protocol.rounds for each in round_.segments}
        answer = None if played.answer is None else plain_answer(played.answer)
        conversation = replace(played.conversation, answer=answer)
        totals, streams = self._checked(await self._call(conversation), conversation, segments)
        if streams is None:
            return paid(played, agent_pay(played, totals))
        played.record["streams"] = streams
        scored = Scored(
            rewards={(agent_id, 0): total for agent_id, total in totals.items()},
            credit=reply_credit(played, lambda turn: streams[turn.agent_id].get(turn.segment)),
        )
        return paid(played, scored)

    async def stored_pay(
        self, record: ConversationRecord, seed: int, models: Models = NO_MODELS
    ) -> dict[int, float]:
        """The function's pay of the stored conversation, all segments together, by agent."""
        del seed, models
        conversation = record.conversation()
        try:
            found = await self._call(conversation)
        except (LookupError, TypeError) as error:  # of the function, not of a damaged transcript
            where = "; ".join(error.__notes__)
            raise ValueError(f"{type(error).__name__}: {error}, {where}") from error
        # which segments earn, a transcript does not say
        totals, _ = self._checked(found, conversation, {turn.segment: "" for turn in conversation.turns})
        return totals

    async def _call(self, conversation: Conversation) -> object:
        try:
            found = self.function(conversation)
            return await found if inspect.isawaitable(found) else found
        except Exception as error:
            error.add_note(f"in the reward {self.name!r}{place_of(error)}")
            raise

    def _checked(
        self, found: object, conversation: Conversation, streams: Mapping[str, str | None]
    ) -> tuple[dict[int, float], dict[int, dict[str, float]] | None]:
        """The rewards that the function returned: by agent, and by agent and segment where it says so.

        ``streams`` are those of the segments.
        """
        what = f"the reward {self.name!r} must return rewards by agent id, or by segment and agent id"
        if not isinstance(found, Mapping) or not found:
            raise ValueError(f"{what}; got {found!r:.120}")
        pay = cast(Mapping[object, object], found)
        if not all(isinstance(key, str) for key in pay):
            missing = [agent_id for agent_id in conversation.finished if agent_id not in pay]
            return _numbers(pay, conversation, what, missing), None
        by_segment: dict[str, dict[int, float]] = {}
        for name, own in cast(Mapping[str, object], pay).items():
            if name not in streams:
                raise ValueError(f"{what}; got segment {name!r}, allowed: {', '.join(sorted(streams))}")
            if streams[name] is None:
                raise ValueError(
                    f"{what}; segment {name!r} earns nothing (stream=None): give it a stream, or no pay"
                )
            if not isinstance(own, Mapping):
                raise ValueError(f"{what}; got {own!r:.120} for segment {name!r}")
            by_segment[name] = _numbers(cast(Mapping[object, object], own), conversation, what, missing=[])
        streams_A = {
            agent_id: {name: paid_A[agent_id] for name, paid_A in by_segment.items() if agent_id in paid_A}
            for agent_id in conversation.finished
        }
        return {agent_id: math.fsum(own.values()) for agent_id, own in streams_A.items()}, streams_A


def place_of(error: BaseException) -> str:
    """The innermost place in the file of a user's function that was called; nothing where the call itself failed."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [each for each in frames if each.filename == frames[0].filename]
    return f", {Path(own[-1].filename).name} line {own[-1].lineno}" if own else ""


def _numbers(
    paid: Mapping[object, object], conversation: Conversation, what: str, missing: Sequence[int]
) -> dict[int, float]:
    """Rewards by agent, of whatever kind of number, as floats."""
    agents = range(conversation.num_agents)
    unknown = [key for key in paid if not isinstance(key, int) or key not in agents]
    if unknown or missing:
        wrong = f"unknown agents {unknown}" if unknown else f"nothing for agents {list(missing)}"
        raise ValueError(f"{what}; got {wrong}; agents that finished: {list(conversation.finished)}")
    for agent_id, value in paid.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(
                f"{what}, as finite numbers (of a truth value, float(...)); got {value!r} for agent {agent_id}"
            )
    return {agent_id: float(value) for agent_id, value in cast(Mapping[int, float], paid).items()}
