"""The win rate at equal length: what a judge that likes long answers would have said of answers of one length.

The verdicts are regressed on the lengths (after Dubois, Galambosi, Liang and Hashimoto 2024, arXiv 2404.04475, section
3, with the difference of log lengths in the place of their tanh term, and without their term for a prompt's
difficulty):

    logit p_i = alpha + beta * x_i,    x_i = log(length of the first answer / length of the second) / s

``p_i`` is the chance that the first policy wins pair i, ``s`` the root mean square of the log ratios. ``alpha`` and
``beta`` maximise ``sum_i w_i (y_i log p_i + (1 - y_i) log(1 - p_i)) - (alpha^2 + beta^2) / 200``, where ``w_i`` is the
number of readable verdicts on the pair and ``y_i`` the first policy's mean points in them (win 1, tie 1/2). The weak
normal prior (standard deviation 10) keeps the estimate finite where lengths and verdicts agree entirely. ``x = 0`` at
equal length, so the controlled win rate is ``1 / (1 + exp(-alpha))``. Where all first answers are longer, or all are
shorter, that would be extrapolated: there is none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from viva.eval.estimates import draw_counts, interval_of
from viva.eval.records import Figure

_Floats = npt.NDArray[np.float64]

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

    Raises:
        RuntimeError: If the fit does not converge.
    """
    num_contributing = len({term.prompt for term in terms})
    ratios = np.array([term.log_ratio for term in terms])
    scale = float(np.sqrt(np.mean(ratios**2))) if len(terms) else 0.0
    x = ratios / scale if scale else ratios
    points = np.array([term.points for term in terms])
    verdicts = np.array([float(term.num_verdicts) for term in terms])
    prompts = np.array([term.prompt for term in terms], dtype=np.int64)
    (value,) = _win_rates(x, points, verdicts[None, :]).tolist() if len(terms) else [float("nan")]
    if np.isnan(value):
        return Figure(value=None, low=None, high=None, num_problems=num_contributing)
    drawn = [
        _win_rates(x, points, counts[:, prompts] * verdicts)
        for counts in draw_counts(num_prompts, resamples, seed)
    ]
    low, high = interval_of(np.concatenate(drawn))
    return Figure(value=value, low=low, high=high, num_problems=num_contributing)


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
