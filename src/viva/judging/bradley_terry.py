"""Bradley-Terry strengths from pairwise votes, by penalised maximum likelihood, with standard errors.

The model (Bradley and Terry, 1952) is P(a beats b) = sigmoid(strength_a - strength_b). A plain maximum of its
likelihood does not exist where somebody won every comparison (Ford, 1957), which is the rule with few agents. So
every strength has a Gaussian prior with mean 0, and the fit minimises

    sum over duels of weight * cross-entropy(share, sigmoid(strength_first - strength_second + position * shown))
      + prior_precision / 2 * (sum of squared strengths + position squared)

which is strictly convex: Newton's method on an N x N system finds its one minimum. A tie is half a win for each. An
item that nobody voted on stays at the prior's mean. Standard errors come from the inverse of the Hessian (Laplace).

The penalty of ``choix.opt_pairwise`` is ``alpha`` times the sum of squares: its ``alpha`` is half the precision.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from viva.judging.ballots import Item, Preference, SoftPreference, Tie, Vote

_MAX_STEPS = 200
_TOLERANCE = 1e-8
"""Largest last step of a strength. Newton's steps shrink quadratically, so what is left after it is far less."""

_Array = NDArray[np.floating[Any]]


class BradleyTerryError(RuntimeError):
    """The fit did not converge, so there are no strengths."""


class Score(NamedTuple):
    """A score in [0, 1], or a difference of two, with its standard error."""

    value: float
    standard_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """A comparison that may be soft, weighted, and aware of the order in which the items were shown.

    Raises:
        ValueError: If a number is out of range, or both items are the same.
    """

    first: Item
    second: Item
    share: float
    """Outcome for the first item: 1 for a win, 1/2 for a tie, or a probability."""
    weight: float = 1.0
    """In units of one vote."""
    first_shown_first: bool | None = None
    """``None`` if it is not known or makes no difference."""

    def __post_init__(self) -> None:
        if self.first == self.second:
            raise ValueError(f"a duel is between two different items; got {self.first!r} twice")
        if not 0.0 <= self.share <= 1.0 or not 0.0 <= self.weight < math.inf:
            raise ValueError(
                "a duel needs a share from 0 to 1 and a finite weight of at least 0; "
                f"got {self.share} and {self.weight}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BradleyTerryFit:
    """Strengths of N items with their covariance."""

    items: tuple[Item, ...]
    strengths: dict[Item, float]
    """Log-odds scale; the prior pulls their mean to 0."""
    covariance: tuple[tuple[float, ...], ...]
    """Covariance of the strengths, N x N, in the order of ``items``."""
    position: float = 0.0
    """Log-odds that being shown first adds; 0 if it was not fitted."""

    @property
    def scores(self) -> dict[Item, float]:
        """Sigmoid of every strength, in [0, 1]: the probability to beat an item of strength 0."""
        return {item: _sigmoid(strength) for item, strength in self.strengths.items()}

    @property
    def standard_errors(self) -> dict[Item, float]:
        """Standard errors of the scores, by the delta method."""
        return {
            item: self._slope(item) * math.sqrt(self.covariance[i][i]) for i, item in enumerate(self.items)
        }

    def gain(self, before: Item, after: Item) -> Score:
        """Score of ``after`` minus score of ``before``, with the covariance of the two in its standard error."""
        for item in (before, after):
            if item not in self.strengths:
                raise ValueError(f"an item must be one of the fit's {list(self.items)}; got {item!r}")
        i, j = self.items.index(before), self.items.index(after)
        low, high = self._slope(before), self._slope(after)
        covariance = self.covariance
        variance = low**2 * covariance[i][i] + high**2 * covariance[j][j] - 2 * low * high * covariance[i][j]
        return Score(self.scores[after] - self.scores[before], math.sqrt(max(variance, 0.0)))

    def _slope(self, item: Item) -> float:
        score = _sigmoid(self.strengths[item])
        return score * (1.0 - score)


def fit_bradley_terry(
    votes: Iterable[Vote | Duel],
    items: Sequence[Item],
    *,
    prior_precision: float = 1.0,
    with_position: bool = False,
) -> BradleyTerryFit:
    """Fit strengths to votes.

    Args:
        votes: Of all voters, see `viva.judging.ballots.pooled`, in any order; a vote given twice counts twice.
        items: All items, also those without votes.
        prior_precision: Of the Gaussian prior, in units of one vote: with 1 and a single vote, the scores are
            .584 and .416; with four unanimous rankings of four items, .83, .62, .38 and .17.
        with_position: Also fit the advantage of being shown first, from the duels that know their order.

    Raises:
        ValueError: If an item is given twice, a vote is about an unknown item, or the precision is not a positive
            number.
        BradleyTerryError: If the fit does not converge.
    """
    if len(set(items)) < len(items):
        raise ValueError(f"items must differ from one another; got {list(items)}")
    if not 0.0 < prior_precision < math.inf:
        raise ValueError(
            f"prior_precision must be a positive number; got {prior_precision}. Without a prior, an item that won "
            "every comparison has no finite strength."
        )
    rows = _rows(votes, {item: place for place, item in enumerate(items)})
    solution, covariance = _minimise(rows, len(items), prior_precision, with_position)
    return BradleyTerryFit(
        items=tuple(items),
        strengths={item: float(solution[place]) for place, item in enumerate(items)},
        covariance=tuple(tuple(map(float, row[: len(items)])) for row in covariance[: len(items)]),
        position=float(solution[len(items)]) if with_position else 0.0,
    )


class _Row(NamedTuple):
    """All votes on one pair that was shown in one order."""

    first: int
    second: int
    shown: int
    """1 if the first was shown first, -1 if the second was, 0 if that is not known."""
    points: float
    """Points of the first."""
    weight: float


def _rows(votes: Iterable[Vote | Duel], places: dict[Item, int]) -> list[_Row]:
    """Votes added up by pair and order of show, exactly, so that the votes' order makes no difference."""
    duels_by_key: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
    for vote in votes:
        duel = _as_duel(vote)
        for item in (duel.first, duel.second):
            if item not in places:
                raise ValueError(f"a vote must be about two of the items {list(places)}; got {vote}")
        i, j = places[duel.first], places[duel.second]
        shown = 0 if duel.first_shown_first is None else 1 if duel.first_shown_first else -1
        key, share = ((i, j, shown), duel.share) if i < j else ((j, i, -shown), 1.0 - duel.share)
        duels_by_key.setdefault(key, []).append((share, duel.weight))
    return [
        _Row(
            *key,
            points=math.fsum(share * weight for share, weight in duels),
            weight=math.fsum(weight for _, weight in duels),
        )
        for key, duels in sorted(duels_by_key.items())
    ]


def _as_duel(vote: Vote | Duel) -> Duel:
    match vote:
        case SoftPreference():
            return Duel(first=vote.winner, second=vote.loser, share=vote.share)
        case Preference():
            return Duel(first=vote.winner, second=vote.loser, share=1.0)
        case Tie():
            return Duel(first=vote.first, second=vote.second, share=0.5)
        case Duel():
            return vote


def _minimise(
    rows: Sequence[_Row], num_items: int, precision: float, with_position: bool
) -> tuple[_Array, _Array]:
    """Strengths, then position if it is fitted, and the inverse of the Hessian there."""
    design = np.zeros((len(rows), num_items + with_position))
    for row, line in zip(rows, design, strict=True):
        line[row.first], line[row.second] = 1.0, -1.0
        if with_position:
            line[num_items] = row.shown
    points = np.array([row.points for row in rows])
    weights = np.array([row.weight for row in rows])

    def objective(x: _Array) -> float:
        margins = design @ x
        # both sums are of losses, so that none of them is drowned where weights are large
        losses = points * np.logaddexp(0.0, -margins) + (weights - points) * np.logaddexp(0.0, margins)
        return float(losses.sum() + 0.5 * precision * (x @ x))

    x = np.zeros(design.shape[1])
    for _ in range(_MAX_STEPS):
        chances = 0.5 * (1.0 + np.tanh(0.5 * (design @ x)))  # a sigmoid that cannot overflow
        gradient = design.T @ (weights * chances - points) + precision * x
        hessian = (design.T * (weights * chances * (1.0 - chances))) @ design + precision * np.eye(len(x))
        try:
            step = np.linalg.solve(hessian, gradient)
            if np.abs(step).max(initial=0.0) <= _TOLERANCE:
                return x - step, np.linalg.inv(hessian)
        except np.linalg.LinAlgError:
            break
        x = _descend(objective, x, step, float(gradient @ step))
    raise BradleyTerryError(
        f"the Bradley-Terry fit of {num_items} items did not converge in {_MAX_STEPS} steps with "
        f"prior_precision {precision}. Use a larger prior_precision."
    )


def _descend(objective: Callable[[_Array], float], x: _Array, step: _Array, decrease: float) -> _Array:
    """A Newton step, halved until the objective falls as it should, as far as rounding lets one tell."""
    start = objective(x)
    slack = 1e-14 * (1.0 + abs(start))
    scale = 1.0
    while objective(x - scale * step) > start - 1e-4 * scale * decrease + slack and scale > 1e-9:
        scale *= 0.5
    return x - scale * step


def _sigmoid(x: float) -> float:
    return 0.5 * (1.0 + math.tanh(0.5 * x))
