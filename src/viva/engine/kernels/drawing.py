"""Drawing tokens; see `viva.engine.sampling`.

Shapes: ``B`` rows, ``V`` vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch

from viva.engine.kernels.compiler import Kernel, as_array, exp, inner


def draw(
    logits: torch.Tensor, divisors: torch.Tensor, greedy: Sequence[int], uniforms: Sequence[float]
) -> torch.Tensor:
    """One token per row; see `viva.engine.sampling.draw_tokens`.

    Args:
        logits: ``[B, V]`` float32; minus infinity for tokens that cannot be drawn.
        divisors: Temperatures, ``[B]``; 1 for greedy rows.
        greedy: Rows that take their most likely token.
        uniforms: ``B`` numbers in ``[0, 1)``.

    Returns:
        Tokens, their logprobs and the sums of weights, the largest of which is 1, ``[3, B]`` float64.
    """
    output = torch.empty(3, len(logits), dtype=torch.float64)
    temperatures = divisors.numpy().copy()
    temperatures[list(greedy)] = 0
    _draw(as_array(logits.contiguous()), temperatures, np.array(uniforms), output.numpy())
    return output


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
def _draw(logits: Any, temperatures: Any, numbers: Any, output: Any) -> None:
    """One token per row; see `draw`.

    Args:
        logits: ``[B, V]`` float32.
        temperatures: ``[B]`` float64; 0 takes the most likely token.
        numbers: ``[B]`` float64 in ``[0, 1)``.
        output: Tokens, logprobs and sums of weights, ``[3, B]`` float64; written to.
    """
    for n in numba.prange(len(logits)):
        output[0, n], output[1, n], output[2, n] = _draw_row(logits[n], temperatures[n], numbers[n])
