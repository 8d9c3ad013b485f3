"""Figures of a set of problems: unbiased estimates at k, and intervals by the bootstrap (Efron 1979).

A figure is a ratio of two sums over problems, both made of the same draw of problems with replacement. Intervals are
thus clustered by problem. Two policies are compared on the same draws. Where all draws agree (every answer is right, or
there is one problem only), there is no interval.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from math import comb
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from viva.eval.records import Difference, Figure

Vote: TypeAlias = tuple[str | None, bool]
"""The content of an answer, and whether it is right. ``None`` casts no vote, but counts in n and k."""


def ladder(num_answers: int) -> list[int]:
    """The values of k that are shown for n answers: powers of two from 2 on, and n itself."""
    ks = [2**power for power in range(1, num_answers.bit_length()) if 2**power < num_answers]
    return [*ks, num_answers] if num_answers > 1 else []


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """Chance that at least one of k answers is right, k being chosen from n without replacement.

    Raises:
        ValueError: Unless 1 <= k <= n and 0 <= c <= n.
    """
    _check(num_answers, k)
    if not 0 <= num_right <= num_answers:
        raise ValueError(f"the number of right answers must be from 0 to {num_answers}; got {num_right}")
    return float(1 - Fraction(comb(num_answers - num_right, k), comb(num_answers, k)))


def majority_at_k(votes: Sequence[Vote], k: int) -> float:
    """Chance that the most frequent of k answers is right, k being chosen from n without replacement.

    Ties share equally. A vote whose answers are graded differently, as by a grader that reads more than the final
    answer, counts by its share of right ones. Without votes the result is wrong.

    Raises:
        ValueError: Unless 1 <= k <= n.
    """
    _check(len(votes), k)
    counts = Counter(vote for vote, _ in votes if vote is not None)
    right = Counter(vote for vote, is_right in votes if vote is not None and is_right)
    silent = len(votes) - counts.total()
    total = Fraction(0)
    chances: dict[int, Fraction] = {}  # answers given equally often are equally likely to win
    for vote, num_right in right.items():
        count = counts[vote]
        if count not in chances:
            others = (counts - Counter({vote: count})).values()
            chances[count] = _chance_to_win(count, list(others), silent, k)
        total += chances[count] * Fraction(num_right, count)
    return float(total)


def plurality(votes: Sequence[Vote]) -> float:
    """`majority_at_k` of all answers: whether the most frequent one is right, ties sharing; 0 without a vote."""
    counts = Counter(vote for vote, _ in votes if vote is not None)
    most = max(counts.values(), default=0)
    winners = [vote for vote, count in counts.items() if count == most]
    right = Counter(vote for vote, is_right in votes if vote is not None and is_right)
    return float(sum(Fraction(right[vote], most) for vote in winners) / len(winners)) if winners else 0.0


def _chance_to_win(count: int, others: list[int], silent: int, k: int) -> Fraction:
    """The chance of an answer given `count` times to be the most frequent of k; a tie of t + 1 counts 1 / (t + 1)."""
    num_answers = count + sum(others) + silent
    wins = Fraction(0)
    for drawn in range(1, min(count, k) + 1):
        for ties, choices in enumerate(_choices(others, silent, drawn, k - drawn)):
            wins += Fraction(comb(count, drawn) * choices, ties + 1)
    return wins / comb(num_answers, k)


def _choices(others: list[int], silent: int, most: int, size: int) -> list[int]:
    """Ways to choose `size` answers of which none is given more than `most` times, by how many are given so often."""
    able = [count for count in others if count >= most]  # the others cannot get there: they are chosen freely
    free = silent + sum(others) - sum(able)
    ways: Counter[tuple[int, int]] = Counter(
        {(0, 0): 1}
    )  # by how many are chosen, and how many are at the limit
    for count in able:
        longer: Counter[tuple[int, int]] = Counter()
        for (chosen, tied), number in ways.items():
            for drawn in range(min(most, size - chosen) + 1):
                longer[chosen + drawn, tied + (drawn == most)] += number * comb(count, drawn)
        ways = longer
    by_ties = [0] * (len(able) + 1)
    for (chosen, tied), number in ways.items():
        by_ties[tied] += number * comb(free, size - chosen)
    return by_ties


def _check(num_answers: int, k: int) -> None:
    if not 1 <= k <= num_answers:
        raise ValueError(f"k must be from 1 to the number of answers, {num_answers}; got {k}")


Terms: TypeAlias = Sequence[tuple[float, float]]
"""Numerator and denominator of a figure by problem; (0, 0) for a problem that does not contribute."""

_Floats: TypeAlias = npt.NDArray[np.float64]

_QUANTILES = (0.025, 0.975)
_CHUNK = 500
"""Draws at a time, to bound memory."""
_MOST_UNDEFINED = 0.05
"""Share of draws in which a figure may have nothing to compute it from."""


def summarise(figures: Mapping[str, Terms], *, resamples: int, seed: int) -> dict[str, Figure]:
    """Values and 95 % intervals of one policy's figures; those of as many problems are taken to be of the same ones."""
    found: dict[str, Figure] = {}
    for names in _by_size(figures):
        sums = _sums([figures[name] for name in names])
        drawn = _ratios(_draws([figures[name] for name in names], resamples, seed))
        for column, name in enumerate(names):
            low, high = interval_of(drawn[:, column])
            found[name] = Figure(
                value=_ratio(sums[column]),
                low=low,
                high=high,
                num_problems=sum(below > 0 for _, below in figures[name]),
            )
    return {name: found[name] for name in figures}


def compare(
    figures: Mapping[str, Terms], against: Mapping[str, Terms], *, resamples: int, seed: int
) -> dict[str, Difference]:
    """Differences of the figures that two policies have in common, with 95 % intervals, paired by problem.

    Raises:
        ValueError: If a figure is of different numbers of problems.
    """
    common = {name: terms for name, terms in figures.items() if name in against}
    for name, terms in common.items():
        if len(terms) != len(against[name]):
            raise ValueError(
                f"{name} is of {len(terms)} problems here and {len(against[name])} there; the problems must be the same"
            )
    found: dict[str, Difference] = {}
    for names in _by_size(common):
        pairs = [terms for name in names for terms in (figures[name], against[name])]
        sums, drawn = _sums(pairs), _ratios(_draws(pairs, resamples, seed))
        for column, name in enumerate(names):
            value, other = _ratio(sums[2 * column]), _ratio(sums[2 * column + 1])
            low, high = interval_of(drawn[:, 2 * column] - drawn[:, 2 * column + 1])
            found[name] = Difference(
                value=value,
                against=other,
                difference=None if value is None or other is None else value - other,
                low=low,
                high=high,
            )
    return {name: found[name] for name in common}


def _by_size(figures: Mapping[str, Terms]) -> list[list[str]]:
    """Names of figures with the same number of problems, which share their draws; none without problems."""
    groups: dict[int, list[str]] = {}
    for name, terms in figures.items():
        if not terms:
            raise ValueError(f"{name} needs at least one problem")
        groups.setdefault(len(terms), []).append(name)
    return list(groups.values())


def _sums(figures: Sequence[Terms]) -> list[tuple[float, float]]:
    arrays = [np.asarray(terms, dtype=np.float64) for terms in figures]
    return [(float(array[:, 0].sum()), float(array[:, 1].sum())) for array in arrays]


def _ratio(sums: tuple[float, float]) -> float | None:
    above, below = sums
    return above / below if below else None


def _draws(figures: Sequence[Terms], resamples: int, seed: int) -> _Floats:
    """Sums of every draw, ``[draw, figure, above or below]``."""
    num_problems = len(figures[0])
    terms = np.stack([np.asarray(each, dtype=np.float64) for each in figures], axis=1)
    flat = terms.reshape(num_problems, -1)
    parts = [counts @ flat for counts in draw_counts(num_problems, resamples, seed)]
    return np.concatenate(parts).reshape(resamples, len(figures), 2)


def draw_counts(num_problems: int, resamples: int, seed: int) -> Iterator[_Floats]:
    """How often every problem is in every draw, ``[draw, problem]``, some draws at a time."""
    rng = np.random.default_rng(seed)
    for start in range(0, resamples, _CHUNK):
        size = min(_CHUNK, resamples - start)
        yield rng.multinomial(num_problems, [1 / num_problems] * num_problems, size=size).astype(np.float64)


def _ratios(sums: _Floats) -> _Floats:
    """``[draw, figure]``; not a number where a draw has nothing below the line."""
    above, below = sums[:, :, 0], sums[:, :, 1]
    ratios = np.full(above.shape, np.nan)
    np.divide(above, below, out=ratios, where=below != 0)
    return ratios


def interval_of(values: npt.NDArray[np.float64]) -> tuple[float, float] | tuple[None, None]:
    """The 95 % interval of resampled values; none where all agree, or where more than 5 % are undefined."""
    defined = values[~np.isnan(values)]
    if len(defined) < (1 - _MOST_UNDEFINED) * len(values):
        return None, None
    low, high = cast(tuple[float, float], tuple(np.quantile(defined, _QUANTILES).tolist()))
    # sums of thirds differ in the last digit by their order; that is no spread
    return (low, high) if float(np.ptp(defined)) > 1e-9 * max(1.0, abs(low)) else (None, None)
