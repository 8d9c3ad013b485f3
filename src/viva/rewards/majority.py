"""Rewards of agreeing with the majority of the answers: ``majority`` and ``maca``.

``majority`` is test-time reinforcement learning (TTRL, Zuo et al., 2025, arXiv 2504.16084):

    label = argmax_a sum_j 1[v_j = a],    r_i = 1[s_i = label]

with ``v_j`` the voting solutions and ``s_i`` those that are paid. Where ``m`` answers have the most votes, each is the
label in the share 1/m. Answers are compared as by ``grader=math`` (`viva.judging.answers`): ``x/2`` is ``0.5x``. A
reply that was cut at the token limit, or that gives no answer, does not vote and earns 0.

``maca`` is multi-agent consensus alignment (Samanta et al., 2025, arXiv 2509.15172): with ``a_i`` the answer of agent
i's last solution and ``a*`` the one answer that most give, at least two of them,

    r_i = +1 if a_i = a*, else -1        on the tokens of agent i's last solution, and on no others

and all 0 where several answers have the most votes. A trace without an answer, or one that was cut, earns -1. This is
the reward of the paper's MV-GRPO (in the authors' code +2 and -1 beside a term for the format; under a mean baseline
only the difference counts, up to the learning rate); its losses MV-DPO, MV-KTO and MV-SFT are not here. The paper
trains the traces behind the bare question, here they are trained behind what the agent saw; ``math_efficiency
strategies=["conversation"]`` swaps the context.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tinker_cookbook.rl.types import Metrics

from viva.conversation.protocol import Protocol
from viva.conversation.records import Solution
from viva.judging.answers import answer_key, extract_answer, same_answer
from viva.rewards.base import Played, Scored, reply_credit
from viva.rewards.solutions import SolutionReward, Solutions


def answer_groups(solutions: Sequence[str]) -> list[int | None]:
    """A number for each solution, equal where their answers are; ``None`` for a solution without an answer."""
    leaders: list[str] = []
    number_of: dict[str, int] = {}
    keys = [answer_key(text) for text in solutions]
    for key, text in zip(keys, solutions, strict=True):
        if key is None or key in number_of:
            continue
        answer = extract_answer(text) or key
        known = [
            number
            for number, leader in enumerate(leaders)
            if same_answer(answer, leader) or same_answer(leader, answer)
        ]
        number_of[key] = known[0] if known else len(leaders)
        if not known:
            leaders.append(answer)
    return [None if key is None else number_of[key] for key in keys]


Voters = Literal["final", "first"]


def votes_of(group: Solutions, voters: Voters = "final") -> tuple[list[int | None], list[int], set[int]]:
    """Answers of the final solutions that are finished, all votes, and the answers with the most of them.

    Args:
        group: The solutions.
        voters: Which of them vote.
    """
    numbers = answer_groups([*group.final_G, *group.first_G])
    final_G, first_G = (
        [number if is_done else None for number, is_done in zip(own, group.finished_G, strict=True)]
        for own in (numbers[: len(group)], numbers[len(group) :])
    )
    votes = [vote for vote in (final_G if voters == "final" else first_G) if vote is not None]
    counts = Counter(votes)
    return final_G, votes, {answer for answer, n in counts.items() if n == max(counts.values())}


@dataclass(frozen=True, kw_only=True)
class Majority(SolutionReward):
    """Agreement of a final solution with the majority."""

    voters: Voters = "final"
    """The voters of a conversation: the final solutions, or the first ones (its proposals), which nobody has talked out
    of their opinion."""
    name: str = "majority"

    def __post_init__(self) -> None:
        """Check."""
        if self.voters not in ("final", "first"):
            raise ValueError(f"voters must be 'final' or 'first'; got {self.voters!r}")

    def pay(self, group: Solutions) -> list[float]:
        """Shares of the label, in [0, 1]."""
        final_G, _, labels = votes_of(group, self.voters)
        return [1 / len(labels) if answer in labels else 0.0 for answer in final_G]

    def figures(self, group: Solutions) -> Metrics:
        """The share of the votes that the label has, and where answers are known whether it is right."""
        final_G, voting, labels = votes_of(group, self.voters)
        metrics: Metrics = {}
        if voting:
            metrics["majority/share"] = sum(vote in labels for vote in voting) / len(voting) / len(labels)
        if group.graded_G is not None and labels:
            right = {answer for answer, grade in zip(final_G, group.graded_G, strict=True) if grade > 0}
            metrics["majority/correct"] = len(right & labels) / len(labels)
        return metrics


def majority(*, voters: Voters = "final") -> Majority:
    """Agreement with the majority of the answers as reward (TTRL); needs no known answers.

    Args:
        voters: ``final`` solutions of a conversation vote, or its ``first`` ones, the proposals.

    Raises:
        ValueError: If it is neither.
    """
    return Majority(voters=voters)


@dataclass(frozen=True, kw_only=True)
class Maca(SolutionReward):
    """+1 for final traces in the majority of a debate, -1 for the others; needs no known answers."""

    name: str = "maca"

    @property
    def pays_samples(self) -> bool:
        """No: where nobody talked, this is ``majority``."""
        return False

    def check(self, protocol: Protocol, num_agents: int) -> None:
        """Refuse what is no debate: fewer than two agents, or nobody sees anything of the others."""
        super().check(protocol, num_agents)
        if not any(sight.whose != "own" for round_ in protocol.rounds for sight in round_.sights):
            raise ValueError(
                f"the reward {self.name!r} pays the traces of a debate, and in protocol {protocol.name!r} nobody sees "
                "what another says; give a round sights of the others, or use the reward majority"
            )

    def pay(self, group: Solutions) -> list[float]:
        """+1 and -1; all 0 without a consensus."""
        final_G, votes, labels = votes_of(group)
        if len(labels) != 1 or votes.count(*labels) < 2:
            return [0.0] * len(group)
        return [1.0 if answer in labels else -1.0 for answer in final_G]

    def figures(self, group: Solutions) -> Metrics:
        """Whether there is a consensus, and how many of the agents share it."""
        rewards = self.pay(group)
        share = rewards.count(1.0) / len(rewards)
        return {"maca/consensus": float(any(rewards)), **({"maca/share": share} if any(rewards) else {})}

    def credited(self, played: Played, rewards: Mapping[int, float]) -> Scored:
        """Each agent's reward on its last solution."""
        last = {
            turn.agent_id: turn for turn in played.conversation.turns if isinstance(turn.response, Solution)
        }
        return Scored(
            rewards={(agent_id, 0): reward for agent_id, reward in rewards.items()},
            credit=reply_credit(
                played, lambda turn: rewards[turn.agent_id] if turn is last[turn.agent_id] else None
            ),
        )


def maca() -> Maca:
    """Majority against minority traces of a debate (MACA): +1 and -1 on the agents' last solutions."""
    return Maca()
