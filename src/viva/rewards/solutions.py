"""Rewards that need nothing but solutions of one problem: of plain samples, or of the agents of a conversation.

Legend: ``_G`` solutions of one problem, ``_T`` sampled tokens of the reply that gives one.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.types import Metrics

from viva.conversation.protocol import Protocol
from viva.conversation.records import Conversation, Solution
from viva.judging.comparison import Comparison
from viva.judging.records import ConversationRecord
from viva.judging.scorer import Gains
from viva.rewards.base import (
    JUDGE_REMEDY,
    NO_MODELS,
    SCORER_REMEDY,
    Models,
    Played,
    Reward,
    Scored,
    agent_pay,
    check_compared,
    check_solutions,
    paid,
    stored_comparisons,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Solutions:
    """Solutions of one problem, all lists in one order."""

    final_G: Sequence[str]
    """The solutions that are paid."""
    first_G: Sequence[str]
    """Before they were revised; those of plain samples are the same."""
    finished_G: Sequence[bool]
    """Whether the policy ended the reply itself."""
    logprobs_G_T: Sequence[Sequence[float]] | None
    """Sampling logprobs of the replies in nats, thinking and stop token included; ``None`` if they are not known."""
    graded_G: Sequence[float] | None
    """Rewards by the known answer; ``None`` if there is none."""
    seed: int
    first_finished_G: Sequence[bool] | None = None
    """The same of the first solutions; ``None``: as `finished_G`."""
    first_graded_G: Sequence[float] | None = None
    """The same of the first solutions; ``None``: as `graded_G`."""
    agents_G: Sequence[int] | None = None
    """Their agents; ``None``: they are counted from 0."""
    comparisons: Sequence[Comparison] | None = None
    """A judge's comparisons of pairs of them, by id, where it was asked."""
    gains: Gains | None = None
    """A scorer's gains, by id, where it was asked: see `viva.judging.scorer`."""
    judge_answer: str | None = None
    """A judge's own answer, where it was asked for one; empty if its reply was cut."""
    rubric: Mapping[int, Sequence[float | None]] | None = None
    """A judge's scores by id, in the order of the criteria, where it was asked for them; ``None``: unreadable."""

    def __len__(self) -> int:
        """Number of solutions."""
        return len(self.final_G)

    @property
    def ids(self) -> Sequence[int]:
        """Keys of the solutions: agent ids, or their places."""
        return range(len(self)) if self.agents_G is None else self.agents_G

    def by_id(self) -> dict[int, str]:
        """The final solutions."""
        return dict(zip(self.ids, self.final_G, strict=True))


class SolutionReward(Reward):
    """A reward of solutions, see the module; a conversation's final ones are paid on all tokens of their agents."""

    @property
    def pays_samples(self) -> bool:
        """Whether it pays plain samples, too; by default it does."""
        return True

    async def ask(self, group: Solutions, question: str, models: Models) -> Solutions:
        """The solutions with what judge and scorer say of them; by default nobody is asked.

        Raises:
            ValueError: If one that it needs is missing. What engines raise passes through.
        """
        return group

    def told(self, group: Solutions) -> dict[str, object]:
        """Fields of the transcript: what judge and scorer said, where they were asked."""
        comparisons = None if group.comparisons is None else [asdict(each) for each in group.comparisons]
        said = {
            "comparisons": comparisons,
            "gains": group.gains,
            "judge_answer": group.judge_answer,
            "rubric": group.rubric,
        }
        return {name: value for name, value in said.items() if value is not None}

    def known(self, said: T | None, what: str) -> T:
        """The judgement of a judge or scorer; a `ValueError` where it is not known."""
        if said is None:
            raise ValueError(
                f"the reward {self.name!r} needs {what}, which is not known here; only conversations and samples that "
                f"were paid by it have it stored. {SCORER_REMEDY if self.judge is None else JUDGE_REMEDY}"
            )
        return said

    @abstractmethod
    def pay(self, group: Solutions) -> list[float]:
        """Rewards of the final solutions, in order; a `ValueError` if something that it needs is not known."""

    def figures(self, group: Solutions) -> Metrics:
        """Metrics about the group, next to its rewards; by default none."""
        return {}

    def check(self, protocol: Protocol, num_agents: int) -> None:
        """Refuse a conversation of one agent."""
        check_compared(num_agents)

    def check_played(self, conversation: Conversation) -> None:
        """Refuse a conversation in which an agent gives no final solution."""
        check_solutions(conversation, f"the reward {self.name!r} pays")

    async def score(self, played: Played) -> Scored:
        """Pay the final solutions."""
        self.check_played(played.conversation)
        question = played.conversation.question
        group = await self.ask(_solutions_of(played), question, Models(played.judge, played.scorer))
        played.record.update(self.told(group))
        rewards = dict(zip(played.agents, self.pay(group), strict=True))
        return paid(played, self.credited(played, rewards), self.figures(group))

    async def stored_pay(
        self, record: ConversationRecord, seed: int, models: Models = NO_MODELS
    ) -> dict[int, float]:
        """The final solutions' rewards."""
        is_plain = record.protocol == "problem"
        if is_plain and not self.pays_samples:
            raise ValueError(f"the reward {self.name!r} pays conversations, and these are plain samples")
        group = _stored_solutions(record.conversation(), (record.correct_initial, record.correct), seed)
        logprobs = record.logprobs
        group = replace(
            group,
            comparisons=stored_comparisons(record).get(None),
            gains=record.gains,
            judge_answer=record.judge_answer,
            rubric=record.rubric,
            logprobs_G_T=None if logprobs is None else [logprobs[each] for each in group.ids],
        )
        asks_judge = self.judge is not None and models.judge is not None
        if asks_judge or (self.scorer is not None and models.scorer is not None):
            asked = models if is_plain else models._replace(system_prompt=None)
            group = await self.ask(group, record.question, asked)
        return dict(zip(group.ids, self.pay(group), strict=True))

    def credited(self, played: Played, rewards: Mapping[int, float]) -> Scored:
        """The agents' rewards, and the tokens that earn them: by default all of an agent's."""
        return agent_pay(played, rewards)


def _stored_solutions(
    conversation: Conversation, correctness: Sequence[Mapping[int, bool] | None], seed: int
) -> Solutions:
    """The solutions of a stored conversation, by agent id, without their logprobs; all count as finished.

    Correctness is that of the first and of the final ones.
    """
    check_solutions(conversation, "solutions are scored")
    final, first = conversation.final_solutions, conversation.first_solutions
    agents = sorted(final)
    first_graded_G, graded_G = (
        None if known is None else [float(known[agent_id]) for agent_id in agents] for known in correctness
    )
    return Solutions(
        final_G=[final[agent_id] for agent_id in agents],
        first_G=[first[agent_id] for agent_id in agents],
        finished_G=[True] * len(agents),
        logprobs_G_T=None,
        graded_G=graded_G,
        seed=seed,
        first_graded_G=first_graded_G,
        agents_G=agents,
    )


def _solutions_of(played: Played) -> Solutions:
    """Solutions of a conversation that was just played, by agent id; each with the reply that gave it."""
    stored = _stored_solutions(played.conversation, played.correctness, played.seed)
    replies: dict[tuple[int, int, int], TokensWithLogprobs] = {}
    for seat, place in enumerate(played.protocol.seats(played.conversation.num_agents)):
        turns = played.conversation.sampled_turns(*place)
        transitions = played.trajectories_G[seat].transitions
        for turn, transition in zip(turns, transitions, strict=place[0] in played.agents):
            if isinstance(turn.response, Solution):
                replies[turn.round_index, turn.lane, turn.agent_id] = transition.ac
    order = sorted(replies)
    last = {place[-1]: replies[place] for place in order}
    first = {place[-1]: replies[place] for place in reversed(order)}
    return replace(
        stored,
        finished_G=[last[agent_id].stop_reason == "stop" for agent_id in played.agents],
        logprobs_G_T=[last[agent_id].logprobs for agent_id in played.agents],
        first_finished_G=[first[agent_id].stop_reason == "stop" for agent_id in played.agents],
    )
