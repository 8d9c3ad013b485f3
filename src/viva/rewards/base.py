"""One interface for all rewards of a conversation."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, Self, TypeAlias

from tinker_cookbook.renderers.base import Renderer
from tinker_cookbook.rl.types import Metrics, Trajectory

from viva.conversation.protocol import Protocol
from viva.conversation.records import Conversation, ReplyStatus, Solution, Turn
from viva.judging.ballots import Outcome
from viva.judging.bradley_terry import BradleyTerryError
from viva.judging.comparison import (
    Comparison,
    Judge,
    JudgeError,
    NoValidComparisonsError,
    reward_truth_gap,
)
from viva.judging.judge import JudgeOptions
from viva.judging.records import ComparisonRecord, ConversationRecord
from viva.judging.scorer import Scorer, ScorerError, ScorerOptions
from viva.rewards.credit import GroupCredit, SpanCredit

Grader = Callable[[str, str], bool]
"""Whether a solution (first) gives the answer (second)."""

Match: TypeAlias = tuple[tuple[int, int], tuple[int, int]]
"""Solutions that a judge is shown first and second: (agent, round) of each."""

JudgeTask = Literal["compare", "answer", "score"]
"""Task of a reward's judge: it compares solutions in pairs, answers the question itself, or scores each solution."""

JUDGE_REMEDY = "viva rescore RUN judge=... asks a judge anew: base, current, a model, a run or an endpoint"
SCORER_REMEDY = "viva rescore RUN scorer_model=NAME, or scorer_policy=initial, asks a scorer anew"

UNPAID = (ValueError, BradleyTerryError, JudgeError, NoValidComparisonsError, ScorerError)
"""Errors of a reward that cannot be computed, see `Reward.stored_pay`."""


class Models(NamedTuple):
    """The models that a reward may ask, where it declares that it needs one."""

    judge: Judge | None = None
    scorer: Scorer | None = None
    system_prompt: str | None = None
    """The system message before plain samples."""


NO_MODELS = Models()


@dataclass(frozen=True, kw_only=True)
class Played:
    """A finished conversation with all that a reward may look at."""

    conversation: Conversation
    protocol: Protocol
    trajectories_G: Sequence[Trajectory]
    """The sampled tokens by seat."""
    renderer: Renderer
    judge: Judge | None
    """The judge that the reward asks for, see `Reward.judge`."""
    scorer: Scorer | None = None
    """The scorer that it asks for, see `Reward.scorer`."""
    answer: str | None
    """The known answer; a reward that claims to need none does not look at it."""
    grader: Grader | None
    """For metrics about the truth."""
    seed: int
    record: dict[str, object]
    """Fields of the transcript; rewards add what they find out, also before they raise."""

    @property
    def agents(self) -> tuple[int, ...]:
        """Ids of the agents that finished."""
        return self.conversation.finished

    def graded(self, solutions: Mapping[int, str]) -> dict[int, bool] | None:
        """Whether each solution is right, by agent id; ``None`` where no answer is known or nobody can tell."""
        if self.answer is None or self.grader is None:
            return None
        return {agent_id: self.grader(solution, self.answer) for agent_id, solution in solutions.items()}

    @cached_property
    def correctness(self) -> tuple[dict[int, bool] | None, dict[int, bool] | None]:
        """Whether first and final solutions are right, see `graded`."""
        talk = self.conversation
        return self.graded(talk.first_solutions), self.graded(talk.final_solutions)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The pay of one conversation."""

    rewards: Mapping[tuple[int, int], float]
    """By agent and lane; a seat that is missing has no reward: its agent failed, or is paid in another lane."""
    metrics: Mapping[int, Metrics] = field(default_factory=dict[int, Metrics])
    """By agent."""
    credit: GroupCredit | None = None
    """The tokens that earned it; ``None``: every token of a seat earns the seat's reward."""


class Reward(ABC):
    """A rule that pays the agents of a conversation; one that wraps another needs what that one needs."""

    name: str

    @property
    def inner(self) -> "Reward":
        """The reward that it wraps, if it wraps one; else itself."""
        return self

    def around(self, reward: "Reward") -> "Reward":
        """Another reward in the place of the one that it wraps, or in its own."""
        return reward

    @property
    def judge(self) -> JudgeOptions | None:
        """The judge it needs, if it needs one."""
        return None if self.inner is self else self.inner.judge

    def judged_by(self, judge: JudgeOptions) -> "Reward":
        """The same reward with another judge; itself, if it needs none."""
        return self if self.inner is self else self.around(self.inner.judged_by(judge))

    @property
    def judge_task(self) -> JudgeTask:
        """The task of its judge, if it needs one; by default it compares."""
        return "compare" if self.inner is self else self.inner.judge_task

    @property
    def scorer(self) -> ScorerOptions | None:
        """The scorer it needs, if it needs one."""
        return None if self.inner is self else self.inner.scorer

    def scored_by(self, scorer: ScorerOptions) -> "Reward":
        """The same reward with another scorer; itself, if it needs none."""
        return self if self.inner is self else self.around(self.inner.scored_by(scorer))

    def matches(self, protocol: Protocol, num_agents: int) -> list[Match]:
        """The comparisons that its judge makes of a conversation in which all solutions differ."""
        return [] if self.inner is self else self.inner.matches(protocol, num_agents)

    @property
    def needs_answers(self) -> bool:
        """Whether it looks at the known answer; by default not."""
        return self.inner is not self and self.inner.needs_answers

    @property
    def agents_compare(self) -> bool:
        """Whether agents compare revised with first solutions, in a round of critique self-play that is for it."""
        return self.inner is not self and self.inner.agents_compare

    def earning(self, protocol: Protocol, turns: Sequence[Turn]) -> list[bool]:
        """Whether the tokens of each reply can earn anything; by default, where their segment has a stream."""
        if self.inner is not self:
            return self.inner.earning(protocol, turns)
        return [stream_of(protocol, turn) is not None for turn in turns]

    def check(self, protocol: Protocol, num_agents: int) -> None:
        """Refuse a protocol whose conversations it cannot pay, with a `ValueError` that says what to change."""
        del protocol, num_agents

    def check_played(self, conversation: Conversation) -> None:
        """Refuse a protocol by how scripted agents play it, with a `ValueError` that says what to change."""
        del conversation

    def new_record(self, protocol: Protocol, judge: Judge | None) -> dict[str, object]:
        """Fields of the transcript that are there even if nothing can be scored."""
        if self.inner is not self:
            return self.inner.new_record(protocol, judge)
        return {} if judge is None else {"judge": judge.described()}

    @property
    def needs_logprobs(self) -> bool:
        """Whether it looks at sampling logprobs, stored only of conversations whose tokens are; by default not."""
        return self.inner is not self and self.inner.needs_logprobs

    async def stored_pay(
        self, record: ConversationRecord, seed: int, models: Models = NO_MODELS
    ) -> dict[int, float]:
        """Rewards by agent of a stored conversation, by its own rules where it has any; some agents may have none.

        A judge or scorer that it needs is asked anew where `models` has one; else what was stored of it counts.

        Raises:
            ValueError: If the transcript does not suffice, with what is missing; by default it never does.
            JudgeError: If a judge's reply cannot be read. Other errors of engines pass through.
            ScorerError: If an engine cannot tell how probable a text is.
            NoValidComparisonsError: If a judge said nothing readable about an agent.
            BradleyTerryError: If a fit does not converge.
        """
        raise ValueError(
            f"the reward {self.name!r} needs more than a transcript holds, so stored conversations cannot be scored by "
            "it"
        )

    @abstractmethod
    async def score(self, played: Played) -> Scored:
        """Pay a conversation that the failure rule lets count.

        Raises:
            ValueError: If it cannot be paid; a failed reward never becomes a number.
            NoValidComparisonsError: If a judge said nothing readable about an agent.
            BradleyTerryError: If a fit does not converge.
        """


@dataclass(frozen=True, kw_only=True)
class JudgedReward(Reward):
    """A reward by a judge of its own."""

    judge_options: JudgeOptions = field(default_factory=JudgeOptions)

    @property
    def judge(self) -> JudgeOptions:
        """The judge."""
        return self.judge_options

    def judged_by(self, judge: JudgeOptions) -> Self:
        """The same reward by another judge."""
        return replace(self, judge_options=judge)

    def needed(self, judge: Judge | None) -> Judge:
        """The judge that it needs; a `ValueError` if none is given."""
        if judge is None:
            raise ValueError(f"the reward {self.name!r} needs a judge; got none")
        return judge


def stored_comparisons(record: ConversationRecord) -> dict[int | None, list[Comparison]]:
    """Stored comparisons: of an agent's initial (0) and revised (1) solution by agent, of agents under ``None``.

    Raises:
        ValueError: If an outcome is none that a comparison can have.
    """
    found: dict[int | None, list[Comparison]] = {}
    for item in record.comparisons:
        fields = item.model_dump(include=set(ComparisonRecord.model_fields) - {"agent_id", "outcome"})
        found.setdefault(item.agent_id, []).append(Comparison(outcome=Outcome(item.outcome), **fields))
    return found


def spoken(conversation: Conversation, agent_id: int) -> Metrics:
    """Replies of one agent that could not be read, and the length of the whole conversation in turns."""
    statuses = [turn.status for turn in conversation.turns if turn.agent_id == agent_id]
    return {
        "episode_length": len(conversation.turns),
        "parsing_failures": statuses.count(ReplyStatus.UNSTRUCTURED),
    }


def truth_metrics(first: Mapping[int, bool] | None, final: Mapping[int, bool] | None) -> dict[int, Metrics]:
    """Metrics by agent about whether its first and its final solution are right; none where nobody can tell."""
    if first is None or final is None:
        return {}
    changes = flips(first, final)
    return {
        agent_id: {
            "correct/first": float(first[agent_id]),
            "correct/final": float(is_right),
            f"agent_{agent_id}/correct": float(is_right),
            **changes[agent_id],
        }
        for agent_id, is_right in final.items()
    }


def flips(before: Mapping[int, bool], after: Mapping[int, bool]) -> dict[int, dict[str, float]]:
    """Per agent, what revising did to its solution.

    ``flip/right_to_wrong`` is given for agents that were right before and is 1 if they are wrong after, so its mean
    over agents is the share of right solutions that were lost; ``flip/wrong_to_right`` likewise.
    """
    return {
        agent_id: {
            "flip/right_to_wrong" if before[agent_id] else "flip/wrong_to_right": float(
                before[agent_id] != after[agent_id]
            )
        }
        for agent_id in sorted(before.keys() & after.keys())
    }


def check_compared(num_agents: int) -> None:
    """Refuse a lone agent, of whom nobody can say whether it was better than others."""
    if num_agents < 2:
        raise ValueError(f"num_agents must be at least 2, or there is nobody to compare; got {num_agents}")


def check_solutions(conversation: Conversation, what: str) -> None:
    """Refuse a conversation in which an agent that did not fail gave no final solution; the error opens with `what`."""
    without = set(conversation.finished) - set(conversation.final_solutions)
    if without:
        raise ValueError(
            f"{what} final solutions, which agents {sorted(without)} do not give: let the reader of one of their "
            "segments return a Solution"
        )


Earnings: TypeAlias = Iterable[tuple[int, int, float]]
"""Ranges ``[start, stop)`` of a reply's tokens, and the reward of each."""


def whole_reply(tokens_T: Sequence[int], reward: float | None) -> Earnings:
    """One reward for all tokens of a reply; ``None``: they earn nothing."""
    return [] if reward is None or not tokens_T else [(0, len(tokens_T), reward)]


def stream_of(protocol: Protocol, turn: Turn) -> str | None:
    """The reward stream that a reply's tokens earn, see `viva.conversation.protocol.Segment`."""
    return protocol.rounds[turn.round_index].segments[turn.lane].stream


def segment_credit(
    played: Played, earned: Callable[[Turn, Sequence[int]], Earnings], weights: Mapping[str, float]
) -> GroupCredit:
    """Credit on the replies of agents that finished, in segments that have a stream.

    Raises:
        ValueError: If a seat does not have one transition for each reply that was written.
    """
    spans: list[SpanCredit] = []
    for seat, (agent_id, lane) in enumerate(played.protocol.seats(played.conversation.num_agents)):
        if agent_id not in played.agents:
            continue
        turns = played.conversation.sampled_turns(agent_id, lane)
        transitions = played.trajectories_G[seat].transitions
        if len(turns) != len(transitions):
            raise ValueError(
                f"agent {agent_id} wrote {len(turns)} replies in lane {lane}, but its trajectory has "
                f"{len(transitions)} transitions; give the trajectories of this conversation in seat order"
            )
        for index, (turn, transition) in enumerate(zip(turns, transitions, strict=True)):
            stream = stream_of(played.protocol, turn)
            if stream is None:
                continue
            spans += [
                SpanCredit(
                    seat=seat,
                    transition=index,
                    start=start,
                    stop=stop,
                    stream=stream,
                    round_index=turn.round_index,
                    reward=reward,
                )
                for start, stop, reward in earned(turn, transition.ac.tokens)
            ]
    return GroupCredit(spans=tuple(spans), weights=weights)


def reply_credit(played: Played, pay: Callable[[Turn], float | None]) -> GroupCredit:
    """Credit on whole replies, streams of weight 1; replies that are paid ``None`` earn nothing."""
    weights = dict.fromkeys(played.protocol.streams, 1.0)
    return segment_credit(played, lambda turn, tokens_T: whole_reply(tokens_T, pay(turn)), weights)


def agent_pay(played: Played, rewards: Mapping[int, float]) -> Scored:
    """One reward for every agent, on all tokens of the segments that earn."""
    segments = [segment for round_ in played.protocol.rounds for segment in round_.segments]
    earns_all = played.protocol.num_lanes == 1 and all(segment.stream for segment in segments)
    return Scored(
        rewards={(agent_id, 0): rewards[agent_id] for agent_id in played.agents},
        credit=None if earns_all else reply_credit(played, lambda turn: rewards[turn.agent_id]),
    )


def paid(played: Played, scored: Scored, figures: Metrics | None = None) -> Scored:
    """The pay with the metrics that every reward can give, and the reward's own of all, and told to the transcript."""
    first, correct = played.correctness
    truth = truth_metrics(first, correct)
    totals = {agent_id: scored.rewards[agent_id, 0] for agent_id in played.agents}
    played.record.update(rewards=totals, correct=correct)
    solutions = [turn for turn in played.conversation.turns if isinstance(turn.response, Solution)]
    if first and len(solutions) > len(first):
        played.record["correct_initial"] = first
    solvers = {agent_id: totals[agent_id] for agent_id in correct or {}}  # an agent may give no solution
    gap = reward_truth_gap(solvers, correct or {})
    shared: Metrics = ({} if gap is None else {"reward_truth_gap": gap}) | (figures or {})
    metrics = {
        agent_id: spoken(played.conversation, agent_id)
        | {f"agent_{agent_id}/reward": total}
        | truth.get(agent_id, {})
        | shared
        for agent_id, total in totals.items()
    }
    return replace(scored, metrics=metrics)
