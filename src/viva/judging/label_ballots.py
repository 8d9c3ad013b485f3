"""Ballots of label probabilities: of each pair of solutions, shown in both orders, a share of one vote.

An answer to a pair is a comparison by the probabilities of the labels A, B and Tie (`viva.judging.judge`): its score is
p(B) - p(A). Of items i and j, with the scores of both orders, i takes the share

    1/2 + (score(j shown first) - score(i shown first)) / 4

of one vote: the mean over the orders of its probability to be preferred, a tie counting half. A model that prefers
whatever it sees first, by as much whatever that is, so gives 1/2 to both. A pair of which an order cannot be read has
no vote, for one order alone would be that preference. The vote is a `SoftPreference`, and enters the Bradley-Terry fit
as a fraction. Nobody sampled it, so no token of a ballot earns anything.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict

from viva.conversation.records import ReplyStatus
from viva.judging.ballots import Item, Outcome, Vote, divided, pair_of
from viva.judging.ranking import RankingReply

if TYPE_CHECKING:
    from viva.judging.comparison import Comparison


class LabelAnswer(BaseModel):
    """The answer to one pair in one order: ``first`` was shown as A."""

    model_config = ConfigDict(frozen=True)

    first: Item
    second: Item
    outcome: Outcome
    score: float | None
    """p(B) - p(A); ``None`` if it cannot be read."""
    probabilities: tuple[float, float, float] | None = None
    """p(A), p(B), p(Tie), normalised over the three labels."""
    off_set_mass: float | None = None
    """Probability of anything but the three labels."""
    was_asked: bool = True
    """Whether the policy was asked; if not, both solutions have the same words."""

    @classmethod
    def of(cls, comparison: "Comparison", first: Item, second: Item) -> "LabelAnswer":
        """A judge's comparison of two items."""
        return cls(
            first=first,
            second=second,
            outcome=comparison.outcome,
            score=comparison.score,
            probabilities=comparison.probabilities,
            off_set_mass=comparison.off_set_mass,
            was_asked=comparison.was_asked,
        )


class LabelBallot(RankingReply):
    """A ballot that nobody wrote: one vote for every pair that could be read in both orders."""

    is_sampled: ClassVar[bool] = False

    answers: tuple[LabelAnswer, ...]
    """Both orders of every pair, from which the votes are made."""

    @property
    def status(self) -> ReplyStatus:
        """``ok`` if every pair has a vote, ``unstructured`` if none has, else ``repaired``."""
        if not self.preferences:
            return ReplyStatus.UNSTRUCTURED
        return ReplyStatus.REPAIRED if self.dropped else ReplyStatus.OK


def label_ballot(answers: Iterable[LabelAnswer]) -> LabelBallot:
    """The ballot of one voter's answers; ``dropped`` counts pairs without both orders under ``invalid``.

    Raises:
        ValueError: If an order of a pair is answered twice.
    """
    given = tuple(answers)
    by_order = {(answer.first, answer.second): answer for answer in given}
    if len(by_order) < len(given):
        raise ValueError(
            f"each order of a pair has one answer; got {len(given)} answers to {len(by_order)} orders. Give each once."
        )
    votes: list[Vote] = []
    pairs = dict.fromkeys(frozenset(order) for order in by_order)
    for one, other in (sorted(pair, key=str) for pair in pairs):
        there, back = by_order.get((one, other)), by_order.get((other, one))
        if there is not None and back is not None and there.score is not None and back.score is not None:
            votes.append(divided(one, other, 0.5 + (back.score - there.score) / 4.0))
    missing = len(pairs) - len({pair_of(vote) for vote in votes})
    return LabelBallot(
        preferences=tuple(votes), dropped={"invalid": missing} if missing else {}, answers=given
    )
