"""The rewards ``majority`` and ``majority_first``: agreement with most answers (TTRL; Zuo, 2025; arXiv 2504.16084).

    label = argmax_a sum_j 1[v_j = a],    r_i = 1[s_i = label]

with ``v_j`` the voting solutions and ``s_i`` those that are paid. Where ``m`` answers have the most votes, each is the
label in the share 1/m. Answers are compared as by ``grader=math`` (`viva.judging.answers`): ``x/2`` is ``0.5x``. A
reply that was cut at the token limit, or that gives no answer, does not vote and earns 0. In a conversation the voters
of ``majority`` are the final solutions, those of ``majority_first`` the proposals.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from tinker_cookbook.rl.types import Metrics

from viva.judging.answers import answer_groups
from viva.rewards.solutions import SolutionReward, Solutions

Voters = Literal["final", "first"]


def votes_of(
    group: Solutions, voters: Voters = "final"
) -> tuple[list[int | None], list[int | None], set[int]]:
    """Answers of the final solutions and votes, ``None`` where there is none, and the answers with the most votes.

    Args:
        group: The solutions.
        voters: Which of them vote.
    """
    numbers = answer_groups([*group.final_G, *group.first_G])
    first_finished_G = group.finished_G if group.first_finished_G is None else group.first_finished_G
    finished = [*group.finished_G, *first_finished_G]
    answers = [number if is_done else None for number, is_done in zip(numbers, finished, strict=True)]
    final_G, first_G = answers[: len(group)], answers[len(group) :]
    votes_G = final_G if voters == "final" else first_G
    counts = Counter(vote for vote in votes_G if vote is not None)
    return final_G, votes_G, {answer for answer, n in counts.items() if n == max(counts.values())}


@dataclass(frozen=True, kw_only=True)
class Majority(SolutionReward):
    """Agreement of a final solution with the majority."""

    voters: Voters = "final"
    """The voters of a conversation: the final solutions, or the first ones (its proposals), which nobody has talked out
    of their opinion."""
    name: str = field(init=False, default="majority")

    def __post_init__(self) -> None:
        if self.voters not in ("final", "first"):
            raise ValueError(f"voters must be 'final' or 'first'; got {self.voters!r}")
        if self.voters == "first":
            object.__setattr__(self, "name", "majority_first")

    @property
    def pays_samples(self) -> bool:
        """Whether they vote themselves: plain samples have no proposals."""
        return self.voters == "final"

    def pay(self, group: Solutions) -> list[float]:
        """Shares of the label, in [0, 1]."""
        final_G, _, labels = votes_of(group, self.voters)
        return [1 / len(labels) if answer in labels else 0.0 for answer in final_G]

    def figures(self, group: Solutions) -> Metrics:
        """The share of the votes that the label has, and where answers are known whether it is right."""
        _, votes_G, labels = votes_of(group, self.voters)
        if not labels:
            return {}
        num_votes = len(votes_G) - votes_G.count(None)
        metrics: Metrics = {
            "majority/share": sum(vote in labels for vote in votes_G) / num_votes / len(labels)
        }
        has_own = self.voters == "first" and group.first_graded_G is not None
        graded_G = group.first_graded_G if has_own else group.graded_G
        if graded_G is not None:
            right = {vote for vote, grade in zip(votes_G, graded_G, strict=True) if grade > 0}
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


def majority_first() -> Majority:
    """Agreement of a final solution with the majority of the conversation's proposals; needs no known answers."""
    return majority(voters="first")
