"""Whose turn it is: agents of one conversation wait for one another here, and for nobody who has left."""

import asyncio
from typing import Literal

from viva.conversation.records import AgentResponse, Conversation, Failure, ReplyStatus, Turn

__all__ = ["MultiAgentCoordinator", "Order", "OutOfTurnError"]

Order = Literal["sequential", "simultaneous"]
"""``sequential``: agents 0, 1, 2, ... reply one after another and see everything said before.
``simultaneous``: all reply to the rounds before; nobody sees a reply of the same round."""


class OutOfTurnError(RuntimeError):
    """A reply came from an agent that had not been given a turn, or not any more."""


class MultiAgentCoordinator:
    """Synchronises the turns of N agents on one event loop.

    An agent's turn belongs to the round it was given by `wait_for_turn`, whenever the reply arrives. An agent
    that fails leaves with a recorded reason and the others go on without it, as long as ``min_agents`` are
    left.

    Args:
        question: What the agents talk about.
        num_agents: Their number; ids count from 0.
        max_rounds: Turns of every agent.
        order: Who replies when, see `Order`.
        min_agents: With fewer agents left than this, the conversation is over for all of them.

    Raises:
        ValueError: If a number is out of range or the order is unknown.
    """

    def __init__(
        self,
        question: str,
        num_agents: int,
        max_rounds: int,
        *,
        order: Order = "sequential",
        min_agents: int = 1,
    ) -> None:
        if num_agents < 1 or max_rounds < 1:
            raise ValueError(
                f"num_agents and max_rounds must be at least 1; got num_agents={num_agents}, "
                f"max_rounds={max_rounds}"
            )
        if order not in ("sequential", "simultaneous"):
            raise ValueError(f"order must be 'sequential' or 'simultaneous'; got {order!r}")
        if not 1 <= min_agents <= num_agents:
            raise ValueError(f"min_agents must be from 1 to num_agents={num_agents}; got {min_agents}")
        self.question = question
        self.num_agents = num_agents
        self.max_rounds = max_rounds
        self.order: Order = order
        self.min_agents = min_agents
        self._condition = asyncio.Condition()
        self._turns_A_R: list[list[Turn]] = [[] for _ in range(num_agents)]
        self._given_A: list[int | None] = [None] * num_agents
        self._failure_A: list[Failure | None] = [None] * num_agents

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
        """What was said so far, in order of (round, agent), whatever arrived first."""
        turns = [turn for turns_R in self._turns_A_R for turn in turns_R]
        return Conversation(
            question=self.question,
            num_agents=self.num_agents,
            max_rounds=self.max_rounds,
            turns=tuple(sorted(turns, key=lambda turn: (turn.round_index, turn.agent_id))),
            failures=tuple(failure for failure in self._failure_A if failure is not None),
        )

    def visible_turns(self, agent_id: int) -> tuple[Turn, ...]:
        """What an agent may read now: all that was said, or (``simultaneous``) the rounds before its own."""
        turns = self.conversation.turns
        if self.order == "sequential":
            return turns
        round_index = len(self._turns_A_R[agent_id])
        return tuple(turn for turn in turns if turn.round_index < round_index)

    def is_out(self, agent_id: int) -> bool:
        """Whether an agent has no turn left: it took them all, it failed, or too few agents are left."""
        has_replied_to_all = len(self._turns_A_R[agent_id]) == self.max_rounds
        return (
            has_replied_to_all
            or self._failure_A[agent_id] is not None
            or self.num_agents_left < self.min_agents
        )

    async def wait_for_turn(self, agent_id: int) -> int | None:
        """Wait until it is the agent's turn.

        Returns:
            The round of the turn, counted from 0; ``None`` if the agent has no turn left.

        Raises:
            ValueError: If there is no such agent.
        """
        self._check_agent(agent_id)
        async with self._condition:
            await self._condition.wait_for(lambda: self.is_out(agent_id) or self._may_reply(agent_id))
            if self.is_out(agent_id):
                return None
            self._given_A[agent_id] = len(self._turns_A_R[agent_id])
            return self._given_A[agent_id]

    async def submit_response(
        self,
        agent_id: int,
        response: AgentResponse,
        *,
        prompt: str = "",
        text: str = "",
        status: ReplyStatus = ReplyStatus.OK,
    ) -> Turn:
        """Record the reply to the turn the agent was given, and wake whoever is next.

        Args:
            agent_id: Who replies.
            response: The reply as it was read.
            prompt: The user message it answers.
            text: The reply as decoded.
            status: How the reply was read.

        Raises:
            OutOfTurnError: If the agent was given no turn, has replied already, or has left.
            ValueError: If there is no such agent.
        """
        self._check_agent(agent_id)
        async with self._condition:
            round_index = self._given_A[agent_id]
            if self.is_out(agent_id) or round_index is None:
                raise OutOfTurnError(self._why_out_of_turn(agent_id))
            self._given_A[agent_id] = None
            turn = Turn(
                agent_id=agent_id,
                round_index=round_index,
                prompt=prompt,
                text=text,
                response=response,
                status=status,
            )
            self._turns_A_R[agent_id].append(turn)
            self._condition.notify_all()
            return turn

    async def fail(self, agent_id: int, reason: str) -> None:
        """End an agent's part with a recorded reason; nobody waits for it any longer.

        Only the first failure counts, and none after the agent's last turn.

        Raises:
            ValueError: If there is no such agent.
        """
        self._check_agent(agent_id)
        if not self.is_out(agent_id):
            # before the first await: a failure is recorded even if this call is itself cancelled
            round_index = len(self._turns_A_R[agent_id])
            self._failure_A[agent_id] = Failure(agent_id=agent_id, round_index=round_index, reason=reason)
            self._given_A[agent_id] = None
        async with self._condition:
            self._condition.notify_all()

    def _may_reply(self, agent_id: int) -> bool:
        num_turns = {
            other: len(self._turns_A_R[other])
            for other in range(self.num_agents)
            if self._failure_A[other] is None
        }
        round_index = min(num_turns.values())
        if self.order == "simultaneous":
            return num_turns[agent_id] == round_index
        return agent_id == min(other for other, count in num_turns.items() if count == round_index)

    def _check_agent(self, agent_id: int) -> None:
        if not 0 <= agent_id < self.num_agents:
            raise ValueError(f"agent_id must be from 0 to {self.num_agents - 1}; got {agent_id}")

    def _why_out_of_turn(self, agent_id: int) -> str:
        if (failure := self._failure_A[agent_id]) is not None:
            why = f"it left in round {failure.round_index} ({failure.reason})"
        elif self.is_out(agent_id):
            why = "the conversation is over for it"
        else:
            why = "it has not been given a turn; call wait_for_turn first"
        return f"agent {agent_id} may not reply: {why}"
