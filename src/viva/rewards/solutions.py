"""Rewards that need nothing but solutions of one problem: of plain samples, or of the agents of a conversation.

``answers``, the ceiling of all others: the verifiable reward of Lambert et al., 2024 (arXiv 2411.15124),

    r_i = 1[solution i gives the known answer]

``log_probability``: over the T_i sampled tokens of the reply that gives solution i, in nats,

    r_i = 1/T_i sum_t log q(y_(i,t) | x, y_(i,<t))

In the mean over samples this is minus the entropy per token, so it pays for low entropy, as do Prabhudesai et al., 2025
(arXiv 2505.22660). Self-certainty (Zhao et al., 2025, arXiv 2505.19590) compares whole distributions, which samplers do
not tell. It can only sharpen.

``peer_prediction``: how much a reply helps to predict its peers (Qiu et al., 2026, arXiv 2601.20299). A scorer q reads
the question x and the replies y_1, ..., y_G, each alone:

    g_ij = 1/T_j ( log q(y_j | x, y_i) - log q(y_j | x) )        r_i = 1/(G-1) sum_{j != i} g_ij

Unlike the paper: means over the target's T_j tokens and not sums (a reward with a mean baseline needs a scale that does
not grow with length; the paper ranks replies, for DPO); no worked examples in the prompts; one expert, not a jury;
peers are samples of one policy. Its guarantee, that honesty is an equilibrium, needs peers who cannot see one another:
in a conversation, whoever repeats a neighbour is predicted by it. Replies that all say the same are paid alike.

Legend: ``_G`` solutions of one problem, ``_T`` sampled tokens of the reply that gives one.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from tinker_cookbook.rl.types import Metrics

from viva.conversation.protocol import Protocol
from viva.conversation.records import Conversation, Solution
from viva.judging.comparison import Comparison, Judge
from viva.judging.records import ConversationRecord
from viva.judging.scorer import Gains, Scorer, ScorerOptions
from viva.rewards.base import (
    Played,
    Reward,
    Scored,
    agent_pay,
    check_compared,
    check_solutions,
    graded,
    paid,
    stored_comparisons,
)


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
    agents_G: Sequence[int] | None = None
    """Their agents; ``None``: they are counted from 0."""
    comparisons: Sequence[Comparison] | None = None
    """A judge's comparisons of pairs of them, by id, where it was asked."""
    gains: Gains | None = None
    """A scorer's gains, by id, where it was asked: see `viva.judging.scorer`."""

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


class Models(NamedTuple):
    """The models that a reward may ask, where it declares that it needs one."""

    judge: Judge | None = None
    scorer: Scorer | None = None


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

    def told(self, group: Solutions) -> dict[str, Any]:
        """Fields of the transcript about what was asked; by default none."""
        return {}

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
        scored = paid(played, self.credited(played, rewards))
        shared = self.figures(group)
        return replace(scored, metrics={agent: own | shared for agent, own in scored.metrics.items()})

    def stored_pay(self, record: ConversationRecord, seed: int) -> dict[int, float]:
        """The final solutions' rewards."""
        if record.protocol == "problem" and not self.pays_samples:
            raise ValueError(f"the reward {self.name!r} pays conversations, and these are plain samples")
        group = replace(
            stored_solutions(record.conversation(), seed=seed, right=record.correct),
            comparisons=stored_comparisons(record).get(None),
            gains=record.gains,
        )
        return dict(zip(group.ids, self.pay(group), strict=True))

    def credited(self, played: Played, rewards: Mapping[int, float]) -> Scored:
        """The agents' rewards, and the tokens that earn them: by default all of an agent's."""
        return agent_pay(played, rewards)


def stored_solutions(conversation: Conversation, *, seed: int, right: dict[int, bool] | None) -> Solutions:
    """The solutions of a stored conversation, by agent id, without their logprobs; all count as finished."""
    check_solutions(conversation, "solutions are scored")
    final, first = conversation.final_solutions, conversation.first_solutions
    return Solutions(
        final_G=[final[agent_id] for agent_id in sorted(final)],
        first_G=[first[agent_id] for agent_id in sorted(final)],
        finished_G=[True] * len(final),
        logprobs_G_T=None,
        graded_G=None if right is None else [float(right[agent_id]) for agent_id in sorted(final)],
        seed=seed,
        agents_G=sorted(final),
    )


def _solutions_of(played: Played) -> Solutions:
    """Solutions of a conversation that was just played, by agent id; each with the reply that gave it."""
    right = graded(played.conversation.final_solutions, played.answer, played.grader)
    stored = stored_solutions(played.conversation, seed=played.seed, right=right)
    replies = {}
    for seat, place in enumerate(played.protocol.seats(played.conversation.num_agents)):
        turns = played.conversation.sampled_turns(*place)
        transitions = played.trajectories_G[seat].transitions
        for turn, transition in zip(turns, transitions, strict=place[0] in played.agents):
            if isinstance(turn.response, Solution):
                replies[turn.agent_id] = transition.ac
    actions_G = [replies[agent_id] for agent_id in played.agents]
    return replace(
        stored,
        finished_G=[action.stop_reason == "stop" for action in actions_G],
        logprobs_G_T=[action.logprobs for action in actions_G],
    )


@dataclass(frozen=True, kw_only=True)
class Answers(SolutionReward):
    """1 for a right final solution, else 0; needs known answers."""

    name: str = "answers"

    @property
    def needs_answers(self) -> bool:
        """Yes."""
        return True

    def pay(self, group: Solutions) -> list[float]:
        """Rewards by the known answer."""
        if group.graded_G is None:
            raise ValueError(
                f"the reward {self.name!r} needs a known answer for every problem; this one has none. Give it in the "
                "key answer, or use a reward that needs none: majority, log_probability"
            )
        return list(group.graded_G)


def answers() -> Answers:
    """The known answers as reward: 1 for an agent whose final solution is right, else 0."""
    return Answers()


@dataclass(frozen=True, kw_only=True)
class LogProbability(SolutionReward):
    """The mean sampling log-probability of a reply's tokens."""

    name: str = "log_probability"

    @property
    def pays_stored(self) -> bool:
        """No: transcripts hold no logprobs."""
        return False

    def pay(self, group: Solutions) -> list[float]:
        """Mean logprobs; every reply needs a token."""
        if group.logprobs_G_T is None:
            raise ValueError(
                f"the reward {self.name!r} needs the sampling logprobs of the replies, which are not known here "
                "(transcripts of a run do not hold them); use majority, answers or shuffled"
            )
        if not all(group.logprobs_G_T):
            raise ValueError(
                f"the reward {self.name!r} needs replies of at least one token; got an empty one"
            )
        return [math.fsum(logprobs_T) / len(logprobs_T) for logprobs_T in group.logprobs_G_T]


def log_probability() -> LogProbability:
    """The policy's own mean token log-probability as reward; needs no answers."""
    return LogProbability()


@dataclass(frozen=True, kw_only=True)
class PeerPrediction(SolutionReward):
    """Mutual predictability of replies, by a scorer; needs no known answers."""

    predicted_by: ScorerOptions = field(default_factory=ScorerOptions)
    name: str = "peer_prediction"

    @property
    def scorer(self) -> ScorerOptions:
        """The scorer of the replies."""
        return self.predicted_by

    def scored_by(self, scorer: ScorerOptions) -> "PeerPrediction":
        """The same reward with another scorer."""
        return replace(self, predicted_by=scorer)

    async def ask(self, group: Solutions, question: str, models: Models) -> Solutions:
        """The gains of every reply behind every other one; a `ScorerError` if the engine cannot tell."""
        if models.scorer is None:
            raise ValueError(f"the reward {self.name!r} needs a scorer; got none")
        return replace(group, gains=await models.scorer.gains(question, group.by_id()))

    def told(self, group: Solutions) -> dict[str, Any]:
        """The gains, by informant and target."""
        return {"gains": group.gains}

    def pay(self, group: Solutions) -> list[float]:
        """Mean gains over the others, in nats per token; 0 for a lone reply."""
        if group.gains is None:
            raise ValueError(
                f"the reward {self.name!r} needs what a scorer says of the replies, which is not known here; only "
                "conversations and samples that were paid by it have it stored"
            )
        return [
            math.fsum(own.values()) / max(len(own), 1) for own in (group.gains[each] for each in group.ids)
        ]


def peer_prediction(
    *, policy: Literal["current", "initial"] = "initial", model: str | None = None
) -> PeerPrediction:
    """Mutual predictability: a reply earns how much better a scorer predicts the others with it than without it.

    Args:
        policy: The scorer is the policy as it was at the start (``initial``), or the one being trained (``current``).
        model: Another model as scorer: a hub name, a folder, a GGUF file or ``tiny``.

    Raises:
        ValueError: If the policy is neither, or is ``current`` beside a model.
    """
    return PeerPrediction(predicted_by=ScorerOptions(policy=policy, model=model))
