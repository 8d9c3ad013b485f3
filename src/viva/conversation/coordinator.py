"""Turns of a conversation: agents of one conversation wait for one another here, and for nobody who has left.

Legend: ``_A`` agents, ``_L`` lanes (parallel generations of a round), ``_R`` rounds.
"""

import asyncio
import random
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from viva.conversation.guard import LineTokens
from viva.conversation.protocol import Protocol, View, draw_aliases, persona
from viva.conversation.records import Conversation, Failure, Reply, ReplyStatus, ToolCall, Turn


class OutOfTurnError(RuntimeError):
    """A reply came from an agent that had not been given a turn, or not any more."""


def view_of(
    protocol: Protocol, num_agents: int, present: Sequence[int], agent_id: int, round_index: int, key: str
) -> View:
    """An agent's place in a round, among those that are present; a key says what its letters are drawn from."""
    return View(
        agent_id=agent_id,
        num_agents=num_agents,
        round_index=round_index,
        aliases=draw_aliases(present, agent_id, round_index, key),
        persona=persona(agent_id, protocol.personas),
        seed=random.Random(f"view/{round_index}/{key}").getrandbits(32),
    )


class ConversationVoidError(RuntimeError):
    """A conversation that gives no rewards, by the failure rule."""


class MultiAgentCoordinator:
    """Synchronises the turns of N agents on one event loop.

    Lane l plays only the rounds with more than l parallel segments. A turn belongs to the round it was given by
    `wait_for_turn`, whenever the reply arrives. An agent that fails leaves in all its lanes, with a recorded reason,
    and what it said in that round is dropped: else it would depend on speed what of it is seen.

    ``seed`` is that of the letters that agents go by.

    Raises:
        ValueError: If a number is out of range or the protocol has mistakes.
    """

    def __init__(self, question: str, num_agents: int, protocol: Protocol, *, seed: int = 0) -> None:
        if num_agents < 1:
            raise ValueError(f"num_agents must be at least 1; got num_agents={num_agents}")
        protocol.check()
        self.question = question
        self.num_agents = num_agents
        self.protocol = protocol
        self.min_agents = protocol.agents_needed(num_agents)
        if self.min_agents > num_agents:
            raise ValueError(
                f"min_agents must be from 1 to num_agents={num_agents}; got {self.min_agents}. Use more agents, or "
                f"lower min_agents of protocol {protocol.name!r}."
            )
        self.line_tokens: LineTokens = {}
        """Tokens of the lines that its prompts show."""
        self._key = f"{seed}/{question}"
        self._condition = asyncio.Condition()
        self._rounds_L_R = [
            [index for index, round_ in enumerate(protocol.rounds) if len(round_.segments) > lane]
            for lane in range(protocol.num_lanes)
        ]
        self._turns: list[Turn] = []
        """Replies and calls of tools, as they arrived."""
        self._num_replies = dict.fromkeys(protocol.seats(num_agents), 0)
        self._given: dict[tuple[int, int], int] = {}
        """Rounds of the turns that were given and not replied to yet, by agent and lane."""
        self._failure_A: list[Failure | None] = [None] * num_agents

    @property
    def max_rounds(self) -> int:
        """Number of rounds."""
        return len(self.protocol.rounds)

    @property
    def episode_done(self) -> bool:
        """Whether nobody has a turn left."""
        return all(self.is_out(agent_id) for agent_id in range(self.num_agents))

    @property
    def num_agents_left(self) -> int:
        """Number of agents that have not failed."""
        return self._failure_A.count(None)

    @property
    def conversation(self) -> Conversation:
        """Turns so far, in order of (round, agent, lane), whatever arrived first."""
        return Conversation(
            question=self.question,
            num_agents=self.num_agents,
            max_rounds=self.max_rounds,
            turns=tuple(sorted(self._turns, key=lambda turn: (turn.round_index, turn.agent_id, turn.lane))),
            failures=tuple(failure for failure in self._failure_A if failure is not None),
        )

    def visible_turns(self, agent_id: int, lane: int = 0) -> tuple[Turn, ...]:
        """Turns that an agent may read before its next one; a prompt shows those that the round's sights name.

        All rounds before, and in a sequential round also what agents of lower id said in it.
        """
        self._check_seat(agent_id, lane)
        index = self._next_round(agent_id, lane)
        sequential = index < self.max_rounds and self.protocol.rounds[index].order == "sequential"
        horizon = (index, agent_id if sequential else 0)
        return tuple(turn for turn in self.conversation.turns if (turn.round_index, turn.agent_id) < horizon)

    def view(self, agent_id: int, lane: int = 0) -> View:
        """An agent's place in the round of its next turn."""
        self._check_seat(agent_id, lane)
        round_index = self._next_round(agent_id, lane)
        # agents that failed earlier are gone; one that fails in this round was still there when it began
        present = [
            other
            for other, failure in enumerate(self._failure_A)
            if failure is None or failure.round_index >= round_index
        ]
        return view_of(self.protocol, self.num_agents, present, agent_id, round_index, self._key)

    def is_out(self, agent_id: int, lane: int | None = None) -> bool:
        """Whether an agent has no turn left, in one lane or (``None``) in any.

        It took them all, it failed, or too few agents are left.
        """
        reached = self._reached(agent_id) if lane is None else self._next_round(agent_id, lane)
        return (
            reached == self.max_rounds
            or self._failure_A[agent_id] is not None
            or self.num_agents_left < self.min_agents
        )

    async def wait_for_turn(self, agent_id: int, lane: int = 0) -> int | None:
        """Wait until it is the agent's turn.

        Returns:
            The round of the turn, counted from 0; ``None`` if the agent has no turn left in this lane.

        Raises:
            ValueError: If there is no such agent or lane.
        """
        self._check_seat(agent_id, lane)
        async with self._condition:
            await self._condition.wait_for(
                lambda: self.is_out(agent_id, lane) or self._may_reply(agent_id, lane)
            )
            if self.is_out(agent_id, lane):
                return None
            round_index = self._next_round(agent_id, lane)
            self._given[agent_id, lane] = round_index
            return round_index

    async def submit_response(
        self,
        agent_id: int,
        response: Reply,
        *,
        lane: int = 0,
        prompt: str = "",
        text: str = "",
        status: ReplyStatus = ReplyStatus.OK,
    ) -> Turn:
        """Record the reply to the turn the agent was given, and wake whoever is next.

        It is kept as it was read and as it was decoded, with the user message that it answers. An ``unstructured``
        reply to a segment with ``on_invalid="fail"`` ends the agent's part. After a `ToolCall` it is the agent's turn
        still.

        Raises:
            OutOfTurnError: If the agent was given no turn, has replied already, or has left.
            ValueError: If there is no such agent or lane.
        """
        self._check_seat(agent_id, lane)
        async with self._condition:
            round_index = self._given.get((agent_id, lane))
            if self.is_out(agent_id, lane) or round_index is None:
                raise OutOfTurnError(self._why_out_of_turn(agent_id, lane))
            segment = self.protocol.rounds[round_index].segments[lane]
            turn = Turn(
                agent_id=agent_id,
                round_index=round_index,
                prompt=prompt,
                text=text,
                response=response,
                status=status,
                segment=segment.name,
                lane=lane,
            )
            if isinstance(response, ToolCall):
                self._turns.append(turn)
                return turn
            del self._given[agent_id, lane]
            if segment.on_invalid == "fail" and status is ReplyStatus.UNSTRUCTURED:
                self._end(agent_id, f"its reply to {segment.name!r} cannot be read: {text[:80]!r}")
            else:
                self._turns.append(turn)
                self._num_replies[agent_id, lane] += 1
            self._condition.notify_all()
            return turn

    async def fail(self, agent_id: int, reason: str) -> None:
        """End an agent's part, in all lanes, with a recorded reason; nobody waits for it any longer.

        Only the first failure counts, and none after the agent's last turn.

        Raises:
            ValueError: If there is no such agent.
        """
        self._check_seat(agent_id, 0)
        if not self.is_out(agent_id):
            # before the first await: a failure is recorded even if this call is itself cancelled
            self._end(agent_id, reason)
        async with self._condition:
            self._condition.notify_all()

    def check_finished(self) -> None:
        """Apply the protocol's failure rule to a conversation that has ended.

        Raises:
            ConversationVoidError: If the rule says that there are no rewards.
        """
        reasons = [
            f"agent {failure.agent_id} failed in round {failure.round_index + 1}: {failure.reason}"
            for failure in self.conversation.failures
        ]
        waiting = sorted(
            {agent_id for agent_id, lane in self._num_replies if not self.is_out(agent_id, lane)}
        )
        if waiting:
            reasons.append(f"agents {waiting} stopped before their last turn without giving a reason")
        if waiting or self.num_agents_left < self.min_agents:
            raise ConversationVoidError("; ".join(reasons))

    def _end(self, agent_id: int, reason: str) -> None:
        round_index = self._reached(agent_id)
        self._failure_A[agent_id] = Failure(agent_id=agent_id, round_index=round_index, reason=reason)
        self._turns = [
            turn for turn in self._turns if turn.agent_id != agent_id or turn.round_index < round_index
        ]
        for lane, rounds_R in enumerate(self._rounds_L_R):
            self._num_replies[agent_id, lane] = sum(each < round_index for each in rounds_R)
            self._given.pop((agent_id, lane), None)

    def _next_round(self, agent_id: int, lane: int) -> int:
        """Round of the next turn in a lane; the number of rounds if there is none."""
        rounds_R, taken = self._rounds_L_R[lane], self._num_replies[agent_id, lane]
        return rounds_R[taken] if taken < len(rounds_R) else self.max_rounds

    def _reached(self, agent_id: int) -> int:
        """The first round that the agent has not finished in all its lanes."""
        return min(self._next_round(agent_id, lane) for lane in range(len(self._rounds_L_R)))

    def _may_reply(self, agent_id: int, lane: int) -> bool:
        reached = {
            other: self._reached(other) for other in range(self.num_agents) if self._failure_A[other] is None
        }
        current = min(reached.values())
        if self._next_round(agent_id, lane) != current:
            return False
        round_ = self.protocol.rounds[current]
        return round_.order == "simultaneous" or agent_id == min(
            other for other, index in reached.items() if index == current
        )

    def _check_seat(self, agent_id: int, lane: int) -> None:
        if not 0 <= agent_id < self.num_agents:
            raise ValueError(f"agent_id must be from 0 to {self.num_agents - 1}; got {agent_id}")
        if not 0 <= lane < len(self._rounds_L_R):
            raise ValueError(f"lane must be from 0 to {len(self._rounds_L_R) - 1}; got {lane}")

    def _why_out_of_turn(self, agent_id: int, lane: int) -> str:
        if (failure := self._failure_A[agent_id]) is not None:
            why = f"it left in round {failure.round_index + 1} ({failure.reason})"
        elif self.is_out(agent_id, lane):
            why = "the conversation is over for it"
        else:
            why = "it has not been given a turn; call wait_for_turn first"
        return f"agent {agent_id} may not reply: {why}"


_T = TypeVar("_T")


def is_interrupted() -> bool:
    """Whether somebody cancels the running task; a `CancelledError` otherwise is a failure of what it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def gather_or_cancel(calls: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Results in the order of the calls.

    If one raises, or the caller is cancelled, the others are cancelled and waited for: nothing is left running.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
