"""Drawing tokens; see `viva.engine.sampling`.

Shapes: ``N`` rows, ``V`` vocabulary.
"""

from typing import Any

import numba
import numpy as np

from viva.engine.compiled.vectors import Kernel, exp, inner

__all__ = ["draw"]

_SPAN = 128
"""Tokens whose weights are added up before a number is looked for."""


@inner
def _add_span(logits: Any, first: int, top: Any, temperature: Any) -> Any:
    total = np.float32(0)
    for i in range(first, min(first + _SPAN, len(logits))):
        total += exp((logits[i] - top) / temperature)
    return total


@inner
def _largest(numbers: Any) -> Any:
    """The largest; what is no number is passed over."""
    lanes = np.full(_SPAN, -np.inf, np.float32)
    for first in range(0, len(numbers), _SPAN):
        for i in range(min(_SPAN, len(numbers) - first)):
            lanes[i] = numbers[first + i] if numbers[first + i] > lanes[i] else lanes[i]
    return lanes.max()


@inner
def _find_token(logits: Any, top: Any, temperature: Any, ends: Any, target: float) -> int:
    """The first token, of a weight above zero, up to which the weights sum to more than the target."""
    span = 0
    while ends[span] <= target:
        span += 1
    total = ends[span - 1] if span else 0.0
    token = 0
    for i in range(span * _SPAN, min(span * _SPAN + _SPAN, len(logits))):
        weight = exp((logits[i] - top) / temperature)
        total += weight
        if weight > 0:
            token = i
        if total > target:
            break
    return token


@inner
def _draw_row(logits: Any, temperature: Any, number: Any) -> Any:
    top = _largest(logits)
    exact = temperature if temperature > 0 else 1.0
    divisor = np.float32(exact)
    ends = np.empty(-(-len(logits) // _SPAN), np.float64)
    total = 0.0
    for span in range(len(ends)):
        total += _add_span(logits, span * _SPAN, top, divisor)
        ends[span] = total
    token = 0
    if not np.isfinite(total):
        return token, total, total
    if temperature > 0:
        # strictly below the sum, so that the search ends on something above zero
        token = _find_token(logits, top, divisor, ends, min(number * total, np.nextafter(total, 0.0)))
    else:
        while logits[token] < top:
            token += 1
    return token, (np.float64(logits[token]) - top) / exact - np.log(total), total


@Kernel
def draw(logits: Any, temperatures: Any, numbers: Any, output: Any) -> None:
    """One token per row; see `viva.engine.kernels.draw`.

    Args:
        logits: ``[N, V]`` float32.
        temperatures: ``[N]`` float64; 0 takes the most likely token.
        numbers: ``[N]`` float64 in ``[0, 1)``.
        output: Tokens, logprobs and sums of weights, ``[3, N]`` float64; written to.
    """
    for n in numba.prange(len(logits)):
        output[0, n], output[1, n], output[2, n] = _draw_row(logits[n], temperatures[n], numbers[n])
