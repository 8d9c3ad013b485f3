"""One interface for all rewards of a conversation: the shipped ones, and a user's function."""

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.rl.types import Metrics, Trajectory

from viva.conversation.protocol import Protocol
from viva.conversation.records import Conversation, ReplyStatus, Turn
from viva.judging.judge import JudgeOptions, PolicySelfComparisonJudge
from viva.rewards.streams import GroupCredit, SpanCredit

Grader = Callable[[str, str], bool]
"""Whether a solution (first) gives the answer (second)."""

Pay: TypeAlias = Mapping[int, float] | Mapping[str, Mapping[int, float]]
"""Rewards by agent id, or by segment and agent id."""

RewardFunction = Callable[[Conversation], Pay | Awaitable[Pay]]
"""A user's reward."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """A finished conversation with all that a reward may look at."""

    conversation: Conversation
    protocol: Protocol
    trajectories_G: Sequence[Trajectory]
    """The sampled tokens by seat."""
    renderer: Renderer
    judge: PolicySelfComparisonJudge | None
    """The judge that the reward asks for, see `Reward.judge`."""
    answer: str | None
    """The known answer; a reward that claims to need none does not look at it."""
    grader: Grader | None
    """For metrics about the truth."""
    seed: int
    record: dict[str, Any]
    """What the transcript keeps; rewards add to it what they find out, also before they raise."""

    @property
    def agents(self) -> tuple[int, ...]:
        """Ids of the agents that finished."""
        failed = {failure.agent_id for failure in self.conversation.failures}
        return tuple(each for each in range(self.conversation.num_agents) if each not in failed)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The pay of one conversation."""

    rewards: Mapping[tuple[int, int], float]
    """By agent and lane; a seat that is missing earns 0."""
    metrics: Mapping[int, Metrics] = field(default_factory=dict[int, Metrics])
    """By agent."""
    credit: GroupCredit | None = None
    """The tokens that earned it; ``None``: every token of a seat earns the seat's reward."""


class Reward(ABC):
    """A rule that pays the agents of a conversation."""

    name: str

    @property
    def judge(self) -> JudgeOptions | None:
        """The judge it needs, if it needs one."""
        return None

    def check(self, protocol: Protocol, num_agents: int) -> None:
        """Refuse a protocol whose conversations it cannot pay; by default none.

        Raises:
            ValueError: With what to change.
        """
        del protocol, num_agents

    def check_played(self, conversation: Conversation) -> None:
        """Refuse a protocol by how scripted agents play it; by default none.

        Raises:
            ValueError: With what to change.
        """
        del conversation

    def new_record(self, protocol: Protocol, judge: PolicySelfComparisonJudge | None) -> dict[str, Any]:
        """Fields of the transcript that are there even if nothing can be scored."""
        return {} if judge is None else {"judge": judge.described()}

    @abstractmethod
    async def score(self, played: Played) -> Scored:
        """Pay a conversation that the failure rule lets count.

        Raises:
            ValueError: If it cannot be paid; a failed reward never becomes a number.
        """


def graded(solutions: Mapping[int, str], answer: str | None, grader: Grader | None) -> dict[int, bool] | None:
    """Whether each solution is right, by agent id; ``None`` where no answer is known or nobody can tell."""
    if answer is None or grader is None:
        return None
    return {agent_id: grader(solution, answer) for agent_id, solution in solutions.items()}


def by_agent(values: Mapping[int, Any] | None) -> dict[str, Any] | None:
    """The same by agent id as text, as JSON has it."""
    return None if values is None else {str(agent_id): value for agent_id, value in values.items()}


def spoken(conversation: Conversation, agent_id: int) -> Metrics:
    """Replies of one agent that could not be read, and the length of the whole conversation in turns."""
    turns = [turn for turn in conversation.turns if turn.agent_id == agent_id]
    return {
        "episode_length": len(conversation.turns),
        "parsing_failures": sum(turn.status is ReplyStatus.UNSTRUCTURED for turn in turns),
    }


def correctness(played: Played) -> tuple[dict[int, bool] | None, dict[int, Metrics]]:
    """Which final solutions are right, and metrics by agent about first and final ones, where answers are known."""
    solutions = played.conversation.final_solutions
    correct = graded(solutions, played.answer, played.grader)
    if correct is None:
        return None, {}
    first = graded(played.conversation.first_solutions, played.answer, played.grader) or {}
    return correct, {
        agent_id: {
            "correct/first": float(first[agent_id]),
            "correct/final": float(is_right),
            f"agent_{agent_id}/correct": float(is_right),
        }
        for agent_id, is_right in correct.items()
    }


def turns_of_seats(played: Played) -> Iterator[tuple[int, int, Turn]]:
    """Seat, index of the transition and turn, for every turn of the agents that finished.

    Raises:
        ValueError: If a seat does not have one transition for each of its turns.
    """
    for seat, (agent_id, lane) in enumerate(played.protocol.seats(played.conversation.num_agents)):
        if agent_id not in played.agents:
            continue
        turns = [turn for turn in played.conversation.turns if (turn.agent_id, turn.lane) == (agent_id, lane)]
        num_transitions = len(played.trajectories_G[seat].transitions)
        if len(turns) != num_transitions:
            raise ValueError(
                f"agent {agent_id} took {len(turns)} turns in lane {lane}, but its trajectory has "
                f"{num_transitions} transitions; give the trajectories of this conversation in seat order"
            )
        yield from ((seat, index, turn) for index, turn in enumerate(turns))


def segment_credit(played: Played, pay: Callable[[Turn], float | None]) -> GroupCredit:
    """Credit on whole replies of the segments that earn something.

    Args:
        played: The conversation.
        pay: Reward of one turn; ``None``: its tokens earn nothing.
    """
    spans: list[SpanCredit] = []
    for seat, index, turn in turns_of_seats(played):
        stream = played.protocol.rounds[turn.round_index].segments[turn.lane].stream
        num_tokens = len(played.trajectories_G[seat].transitions[index].ac.tokens)
        reward = None if stream is None or not num_tokens else pay(turn)
        if stream is not None and reward is not None:
            spans.append(
                SpanCredit(
                    seat=seat,
                    transition=index,
                    start=0,
                    stop=num_tokens,
                    stream=stream,
                    round_index=turn.round_index,
                    reward=reward,
                )
            )
    return GroupCredit(spans=tuple(spans), weights=dict.fromkeys(played.protocol.streams, 1.0))


def agent_pay(played: Played, rewards: Mapping[int, float]) -> Scored:
    """One reward for every agent, on all tokens of the segments that earn."""
    segments = [segment for round_ in played.protocol.rounds for segment in round_.segments]
    earns_all = played.protocol.num_lanes == 1 and all(segment.stream for segment in segments)
    return Scored(
        rewards={(agent_id, 0): reward for agent_id, reward in rewards.items()},
        credit=None if earns_all else segment_credit(played, lambda turn: rewards[turn.agent_id]),
    )


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
        """Ask the function.

        Raises:
            ValueError: If it returns something else. What it raises itself passes through.
        """
        found = self.function(replace(played.conversation, answer=played.answer))
        if inspect.isawaitable(found):
            found = await found
        pay = self._checked(found, played)
        correct, metrics = correctness(played)
        played.record["correct"] = by_agent(correct)
        if isinstance(next(iter(pay)), str):
            by_segment = cast(Mapping[str, Mapping[int, float]], pay)
            scored = Scored(
                rewards={
                    (agent_id, 0): math.fsum(
                        paid[agent_id] for paid in by_segment.values() if agent_id in paid
                    )
                    for agent_id in played.agents
                },
                credit=segment_credit(
                    played, lambda turn: by_segment.get(turn.segment, {}).get(turn.agent_id)
                ),
            )
            played.record["streams"] = {
                str(agent_id): {name: paid[agent_id] for name, paid in by_segment.items() if agent_id in paid}
                for agent_id in played.agents
            }
        else:
            scored = agent_pay(played, cast(Mapping[int, float], pay))
        totals = {agent_id: scored.rewards[agent_id, 0] for agent_id in played.agents}
        played.record["rewards"] = by_agent(totals)
        own = {
            agent_id: spoken(played.conversation, agent_id)
            | {"reward/mean": total, f"agent_{agent_id}/reward": total}
            | metrics.get(agent_id, {})
            for agent_id, total in totals.items()
        }
        return replace(scored, metrics=own)

    def _checked(self, found: object, played: Played) -> Pay:
        what = f"the reward {self.name!r} must return rewards by agent id, or by segment and agent id"
        if not isinstance(found, Mapping) or not found:
            raise ValueError(f"{what}; got {found!r:.120}")
        pay = cast(Mapping[object, object], found)
        if all(isinstance(key, str) for key in pay):
            known = {segment.name for round_ in played.protocol.rounds for segment in round_.segments}
            for name, paid in pay.items():
                if name not in known:
                    raise ValueError(f"{what}; got segment {name!r}, allowed: {', '.join(sorted(known))}")
                if not isinstance(paid, Mapping):
                    raise ValueError(f"{what}; got {paid!r:.120} for segment {name!r}")
                _check_agents(cast(Mapping[object, object], paid), played, what, all_of_them=False)
        else:
            _check_agents(pay, played, what, all_of_them=True)
        return cast(Pay, pay)


def _check_agents(paid: Mapping[object, object], played: Played, what: str, *, all_of_them: bool) -> None:
    agents = set(range(played.conversation.num_agents))
    unknown = [key for key in paid if not isinstance(key, int) or key not in agents]
    missing = [agent_id for agent_id in played.agents if agent_id not in paid]
    if unknown or (all_of_them and missing):
        wrong = f"unknown agents {unknown}" if unknown else f"nothing for agents {missing}"
        raise ValueError(f"{what}; got {wrong}; agents that finished: {list(played.agents)}")
    for agent_id, value in paid.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{what}, as finite numbers; got {value!r} for agent {agent_id}")
