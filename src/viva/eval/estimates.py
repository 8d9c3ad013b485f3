"""Figures of a set of problems: unbiased estimates at k, intervals by the bootstrap (Efron 1979), and win rates.

A figure is a ratio of two sums over problems, both made of the same draw of problems with replacement. Intervals are
thus clustered by problem. Two policies are compared on the same draws. Where all draws agree (every answer is right, or
there is one problem only), there is no interval.

The win rate at equal length is what a judge that likes long answers would have said of answers of one length (after
Dubois, Galambosi, Liang and Hashimoto 2024, arXiv 2404.04475, section 3, with the difference of log lengths in the
place of their tanh term, and without their term for a prompt's difficulty):

    logit p_i = alpha + beta * x_i,    x_i = log(length of the first answer / length of the second) / s

``p_i`` is the chance that the first policy wins pair i, ``s`` the root mean square of the log ratios. ``alpha`` and
``beta`` maximise ``sum_i w_i (y_i log p_i + (1 - y_i) log(1 - p_i)) - (alpha^2 + beta^2) / 200``, where ``w_i`` is the
number of readable verdicts on the pair and ``y_i`` the first policy's mean points in them (win 1, tie 1/2). The win
rate is ``1 / (1 + exp(-alpha))``; where all first answers are longer, or all are shorter, there is none.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    """Chance that at least one of k answers is right, k being chosen from n without replacement."""
    _check(num_answers, k)
    if not 0 <= num_right <= num_answers:
        raise ValueError(f"the number of right answers must be from 0 to {num_answers}; got {num_right}")
    return float(1 - Fraction(comb(num_answers - num_right, k), comb(num_answers, k)))


def majority_at_k(votes: Sequence[Vote], k: int) -> float:
    """Chance that the most frequent of k answers is right, k being chosen from n without replacement.

    Ties share equally. A vote whose answers are graded differently, as by a grader that reads more than the final
    answer, counts by its share of right ones. Without votes the result is wrong.
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
    ways = Counter({(0, 0): 1})  # by how many are chosen, and how many are at the limit
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


Term: TypeAlias = tuple[float, float]
"""Numerator and denominator of a figure, of one problem."""
Terms: TypeAlias = Sequence[Term]
"""By problem; (0, 0) for one that does not contribute."""

NOTHING = (0.0, 0.0)
"""The term of a problem that does not contribute."""


def term_of(values: Iterable[float | None]) -> Term:
    """Sum and number of the values that are known."""
    known = [value for value in values if value is not None]
    return math.fsum(known), float(len(known))


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
        values, drawn = _resampled([figures[name] for name in names], resamples, seed)
        for column, (name, value) in enumerate(zip(names, values, strict=True)):
            count = sum(below > 0 for _, below in figures[name])
            found[name] = figure_of(value, drawn[:, column], num_problems=count)
    return {name: found[name] for name in figures}


def compare(
    figures: Mapping[str, Terms], against: Mapping[str, Terms], *, resamples: int, seed: int
) -> dict[str, Difference]:
    """Differences of the figures that two policies have in common, with 95 % intervals, paired by problem."""
    common = {name: terms for name, terms in figures.items() if name in against}
    for name, terms in common.items():
        if len(terms) != len(against[name]):
            raise ValueError(
                f"{name} is of {len(terms)} problems here and {len(against[name])} there; the problems must be the same"
            )
    found: dict[str, Difference] = {}
    for names in _by_size(common):
        pairs = [terms for name in names for terms in (figures[name], against[name])]
        values, drawn = _resampled(pairs, resamples, seed)
        for column, name in enumerate(names):
            value, other = values[2 * column : 2 * column + 2]
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


def _resampled(figures: Sequence[Terms], resamples: int, seed: int) -> tuple[list[float | None], _Floats]:
    """Values of figures of the same problems, and those of every draw, ``[draw, figure]``.

    A value is ``None``, and in a draw not a number, where nothing is below the line.
    """
    arrays = [np.asarray(each, dtype=np.float64) for each in figures]
    sums = [(float(array[:, 0].sum()), float(array[:, 1].sum())) for array in arrays]
    flat = np.hstack(arrays)
    drawn = np.concatenate([counts @ flat for counts in draw_counts(len(flat), resamples, seed)])
    above, below = drawn[:, ::2], drawn[:, 1::2]
    ratios = np.full(above.shape, np.nan)
    np.divide(above, below, out=ratios, where=below != 0)
    return [top / bottom if bottom else None for top, bottom in sums], ratios


def draw_counts(num_problems: int, resamples: int, seed: int) -> Iterator[_Floats]:
    """Counts of every problem in every draw, ``[draw, problem]``, some draws at a time."""
    rng = np.random.default_rng(seed)
    for start in range(0, resamples, _CHUNK):
        size = min(_CHUNK, resamples - start)
        yield rng.multinomial(num_problems, [1 / num_problems] * num_problems, size=size).astype(np.float64)


def figure_of(value: float | None, drawn: _Floats, *, num_problems: int) -> Figure:
    """A figure with the interval of its resampled values; one that is not a number has no value."""
    low, high = interval_of(drawn)
    known = None if value is None or math.isnan(value) else value
    return Figure(value=known, low=low, high=high, num_problems=num_problems)


def interval_of(values: npt.NDArray[np.float64]) -> tuple[float, float] | tuple[None, None]:
    """The 95 % interval of resampled values; none where all agree, or where more than 5 % are undefined."""
    defined = values[~np.isnan(values)]
    if len(defined) < (1 - _MOST_UNDEFINED) * len(values):
        return None, None
    low, high = cast(tuple[float, float], tuple(np.quantile(defined, _QUANTILES).tolist()))
    # sums of thirds differ in the last digit by their order; that is no spread
    return (low, high) if float(np.ptp(defined)) > 1e-9 * max(1.0, abs(low)) else (None, None)


_PRECISION = 0.01
"""Precision of the normal prior of alpha and beta."""
_LONGEST_STEP = 2.0
_MOST_STEPS = 200
_CLOSE = 1e-8
"""Largest gradient at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthTerm:
    """One judged pair of answers."""

    prompt: int
    """Place of its prompt, from 0."""
    log_ratio: float
    """Log of the first answer's length over the second's."""
    points: float
    """Mean points of the first policy in the readable verdicts, from 0 to 1."""
    num_verdicts: int


def length_controlled_win_rate(
    terms: Sequence[LengthTerm], num_prompts: int, *, resamples: int, seed: int
) -> Figure:
    """The first policy's win rate at equal length, with a 95 % interval from resampled prompts.

    Args:
        terms: Pairs with at least one readable verdict.
        num_prompts: Prompts that are drawn from, those without such a pair included.
        resamples: Draws.
        seed: Of the draws; the same as for other figures of the same prompts.
    """
    count = len({term.prompt for term in terms})
    ratios = np.array([term.log_ratio for term in terms])
    scale = float(np.sqrt(np.mean(ratios**2))) if len(terms) else 0.0
    x = ratios / scale if scale else ratios
    points = np.array([term.points for term in terms])
    verdicts = np.array([float(term.num_verdicts) for term in terms])
    prompts = np.array([term.prompt for term in terms], dtype=np.int64)
    (value,) = _win_rates(x, points, verdicts[None, :]).tolist()
    drawn = [
        _win_rates(x, points, counts[:, prompts] * verdicts)
        for counts in draw_counts(num_prompts, resamples, seed)
    ]
    return figure_of(value, np.concatenate(drawn), num_problems=count)


def _win_rates(x: _Floats, points: _Floats, weights: _Floats) -> _Floats:
    """The win rate at equal length for every row of weights, ``[row, pair]``; not a number where it is extrapolated."""
    present = weights > 0
    is_between = (present & (x <= 0)).any(axis=1) & (present & (x >= 0)).any(axis=1)
    rates = np.full(len(weights), np.nan)
    if is_between.any():
        alpha = _fit(x, points, weights[is_between])[:, 0]
        rates[is_between] = _sigmoid(alpha)
    return rates


def _fit(x: _Floats, points: _Floats, weights: _Floats) -> _Floats:
    """Alpha and beta of every row, by Newton's method with steps of bounded length."""
    found = np.zeros((len(weights), 2))
    for _ in range(_MOST_STEPS):
        p = _sigmoid(found[:, :1] + found[:, 1:] * x)
        errors = weights * (points - p)
        gradient = np.stack([errors.sum(axis=1), errors @ x], axis=1) - _PRECISION * found
        if float(np.abs(gradient).max()) < _CLOSE * max(1.0, float(weights.sum(axis=1).max())):
            return found
        spread = weights * p * (1 - p)
        a, b, c = spread.sum(axis=1) + _PRECISION, spread @ x, spread @ x**2 + _PRECISION
        steps = (
            np.stack(
                [c * gradient[:, 0] - b * gradient[:, 1], a * gradient[:, 1] - b * gradient[:, 0]], axis=1
            )
            / (a * c - b * b)[:, None]
        )
        lengths = np.linalg.norm(steps, axis=1, keepdims=True)
        found += steps * np.minimum(1.0, _LONGEST_STEP / np.maximum(lengths, _LONGEST_STEP))
    raise RuntimeError(f"the regression on lengths did not converge in {_MOST_STEPS} steps")


def _sigmoid(values: _Floats) -> _Floats:
    return 0.5 * (1.0 + np.tanh(0.5 * values))
