"""The steps between the products of a layer: norms, rotation and storing, gates; and drawing tokens.

Arrays are C-contiguous, of float32, or of bfloat16 seen as int16 (numpy has no such type); results are rounded once.

Shapes: ``B`` rows of ``T`` new tokens, ``N = B T``, ``H`` hidden size, ``F`` inner size, ``Q`` query heads, ``K``
key-value heads, ``D`` head size, ``R`` rows of a store and ``L`` tokens that each has room for, ``V`` vocabulary.
"""

from collections.abc import Sequence
from typing import Any, cast

import numba
import numpy as np
import torch
from torch.autograd.function import once_differentiable

from viva.engine.kernels.compiler import (
    MAX_LANES,
    Array,
    Kernel,
    as_array,
    as_rows,
    exp,
    inner,
    largest,
    narrow,
    use_threads,
    widen,
)


class Norm:
    """A root mean square norm over the last dimension, of a copy that only computes."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """``[H]`` weights."""
        self._weight = as_array(weight.detach().contiguous())
        self._eps = np.float32(eps)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., H]`` to as many."""
        output = torch.empty_like(hidden)
        _normalise(as_rows(hidden), self._weight, self._eps, as_rows(output))
        return output


def normalise(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The same norm, with frozen weights, to be trained through."""
    return cast(torch.Tensor, _Normalised.apply(hidden.contiguous(), weight, eps))


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        use_threads()
        ctx.save_for_backward(hidden, weight)
        ctx.eps = eps
        return Norm(weight, eps)(hidden)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        use_threads()
        hidden, weight = ctx.saved_tensors
        output = torch.empty_like(hidden)
        given = as_rows(hidden), as_array(weight.detach()), np.float32(ctx.eps)
        _normalise_back(*given, as_rows(grad_outputs[0].contiguous()), as_rows(output))
        return output, None, None


def gate_pair(gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``silu(g) u`` of two contiguous tensors ``[..., F]``, to be trained through."""
    return cast(torch.Tensor, _Gated.apply(gates, values))


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        use_threads()
        ctx.save_for_backward(gates, values)
        output = torch.empty_like(gates)
        _gate_pair(as_rows(gates), as_rows(values), as_rows(output))
        return output

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        use_threads()
        gates, values = ctx.saved_tensors
        to_gates, to_values = torch.empty_like(gates), torch.empty_like(values)
        _gate_back(*map(as_rows, (gates, values, grad_outputs[0].contiguous(), to_gates, to_values)))
        return to_gates, to_values


def gate(both: torch.Tensor) -> torch.Tensor:
    """``silu(g) u`` of gates and values side by side, ``[..., 2 F]`` to ``[..., F]``."""
    output = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
    _gate(as_rows(both), as_rows(output))
    return output


def place(
    inner: torch.Tensor,
    norms: tuple[Array, np.float32],
    rotation: tuple[Array, Array],
    where: tuple[Array, Array],
    store: torch.Tensor,
    num_queries: int,
) -> torch.Tensor:
    """Norm of heads where they have one, rotation, and storing of keys and values.

    Args:
        inner: Queries, keys and values, ``[B, T, (Q + 2 K) D]``.
        norms: Weights of the heads' norms, ``[Q + K, D]``, or ``[0, D]`` without norms, and their epsilon.
        rotation: Cosines and sines, ``[B T, D]``.
        where: Rows of the store, and places among each row's own tokens, ``[B T]``.
        store: Keys and values of all rows, ``[2, R, K, L, D]``; written to.
        num_queries: ``Q``.

    Returns:
        Queries, ``[B, Q, T, D]``, a view of ``[B, T, Q, D]``.

    Raises:
        ValueError: The rotation is of another size than the heads.
    """
    size = store.shape[-1]
    if any(each.shape[-1] != size for each in rotation):  # a kernel would read beyond their end
        raise ValueError(f"rotary embeddings of {rotation[0].shape[-1]} numbers do not fit heads of {size}")
    query = inner.new_empty(*inner.shape[:2], num_queries, size)
    heads, queries = inner.view(-1, inner.shape[-1] // size, size), query.view(-1, num_queries, size)
    _place(as_array(heads), *norms, *rotation, *where, as_array(store), as_array(queries))
    return query.transpose(1, 2)


_SERIAL = 2**15
"""Numbers up to which one thread is faster than waking the others."""


@inner
def _normalise_row(row: Array, weight: Array, eps: np.float32, output: Array) -> None:
    size = len(row)
    total = np.float32(0)
    for i in range(size):
        x = widen(row[i])
        total += x * x
    factor = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        output[i] = narrow(widen(row[i]) * factor * widen(weight[i]), output[i])


@Kernel
def _normalise(hidden: Array, weight: Array, eps: np.float32, output: Array) -> None:
    """Root mean square norm: ``[N, H]`` hidden states and ``[H]`` weights to ``[N, H]``."""
    if hidden.size <= _SERIAL:
        for n in range(len(hidden)):
            _normalise_row(hidden[n], weight, eps, output[n])
    else:
        for n in numba.prange(len(hidden)):
            _normalise_row(hidden[n], weight, eps, output[n])


@inner
def _normalise_row_back(row: Array, weight: Array, eps: np.float32, slope: Array, output: Array) -> None:
    size = len(row)
    total = np.float32(0)
    along = np.float32(0)
    for i in range(size):
        x = widen(row[i])
        total += x * x
        along += x * widen(weight[i]) * widen(slope[i])
    factor = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
    share = along * factor * factor / np.float32(size)
    for i in range(size):
        x = factor * (widen(weight[i]) * widen(slope[i]) - share * widen(row[i]))
        output[i] = narrow(x, output[i])


@Kernel
def _normalise_back(hidden: Array, weight: Array, eps: np.float32, slopes: Array, output: Array) -> None:
    """Slopes by what `_normalise` took, ``[N, H]``, from those by what it gave."""
    for n in numba.prange(len(hidden)):
        _normalise_row_back(hidden[n], weight, eps, slopes[n], output[n])


@inner
def _gate_row(gate: Array, up: Array, output: Array) -> None:
    for i in range(len(output)):
        x = widen(gate[i])
        output[i] = narrow(x * widen(up[i]) / (np.float32(1) + exp(-x)), output[i])


@Kernel
def _gate(both: Array, output: Array) -> None:
    """``silu(g) u`` of ``[N, 2 F]`` gates and values side by side, to ``[N, F]``."""
    size = output.shape[1]
    if output.size <= _SERIAL:
        for n in range(len(both)):
            _gate_row(both[n, :size], both[n, size:], output[n])
    else:
        for n in numba.prange(len(both)):
            _gate_row(both[n, :size], both[n, size:], output[n])


@Kernel
def _gate_pair(gates: Array, values: Array, output: Array) -> None:
    """``silu(g) u`` of two ``[N, F]``."""
    for n in numba.prange(len(gates)):
        _gate_row(gates[n], values[n], output[n])


@inner
def _gate_row_back(gate: Array, up: Array, slope: Array, to_gate: Array, to_up: Array) -> None:
    for i in range(len(gate)):
        x, y = widen(gate[i]), widen(slope[i])
        share = np.float32(1) / (np.float32(1) + exp(-x))
        to_up[i] = narrow(y * x * share, to_up[i])
        to_gate[i] = narrow(
            y * widen(up[i]) * share * (np.float32(1) + x * (np.float32(1) - share)), to_gate[i]
        )


@Kernel
def _gate_back(gates: Array, values: Array, slopes: Array, to_gates: Array, to_values: Array) -> None:
    """Slopes by what `_gate_pair` took, from those by what it gave, all ``[N, F]``."""
    for n in numba.prange(len(gates)):
        _gate_row_back(gates[n], values[n], slopes[n], to_gates[n], to_values[n])


@inner
def _rotate_head(
    head: Array, weight: Array, eps: np.float32, cosines: Array, sines: Array, wide: Array, output: Array
) -> None:
    size = len(head)
    for i in range(size):
        wide[i] = widen(head[i])
    if len(weight):
        total = np.float32(0)
        for i in range(size):
            total += wide[i] * wide[i]
        factor = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
        for i in range(size):
            wide[i] *= factor * widen(weight[i])
    half = size // 2
    for i in range(half):
        a, b = wide[i], wide[half + i]
        output[i] = narrow(a * widen(cosines[i]) - b * widen(sines[i]), output[i])
        output[half + i] = narrow(b * widen(cosines[half + i]) + a * widen(sines[half + i]), output[i])


@inner
def _place_token(
    inner: Array,
    weight: Array,
    eps: np.float32,
    cosines: Array,
    sines: Array,
    store: Array,
    row: int,
    place: int,
    query: Array,
) -> None:
    heads, size = query.shape
    num_keys = store.shape[2]
    wide = np.empty(size, np.float32)
    for h in range(heads + num_keys):
        scales = weight[h] if len(weight) else weight.ravel()
        target = query[h] if h < heads else store[0, row, h - heads, place]
        _rotate_head(inner[h], scales, eps, cosines, sines, wide, target)
    for h in range(num_keys):
        target = store[1, row, h, place]
        for i in range(size):
            target[i] = inner[heads + num_keys + h, i]


@Kernel
def _place(
    inner: Array,
    weight: Array,
    eps: np.float32,
    cosines: Array,
    sines: Array,
    rows: Array,
    places: Array,
    store: Array,
    query: Array,
) -> None:
    """`place` of ``[N, Q + 2 K, D]`` queries, keys and values; writes to ``store`` and ``query``, ``[N, Q, D]``."""
    if inner.size <= _SERIAL:
        for n in range(len(inner)):
            _place_token(inner[n], weight, eps, cosines[n], sines[n], store, rows[n], places[n], query[n])
    else:
        for n in numba.prange(len(inner)):
            _place_token(inner[n], weight, eps, cosines[n], sines[n], store, rows[n], places[n], query[n])


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
def _add_span(logits: Array, first: int, top: np.float32, temperature: np.float32) -> np.float32:
    total = np.float32(0)
    for i in range(first, min(first + _SPAN, len(logits))):
        total += exp((logits[i] - top) / temperature)
    return total


@inner
def _find_token(logits: Array, top: np.float32, temperature: np.float32, ends: Array, target: float) -> int:
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
def _draw_row(
    logits: Array, temperature: float, number: float
) -> tuple[int, float | np.float32, float | np.float32]:
    top = largest(logits, len(logits), np.empty(MAX_LANES, np.float32))
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
def _draw(logits: Array, temperatures: Array, numbers: Array, output: Array) -> None:
    """`draw` of ``[B, V]`` float32, ``[B]`` and ``[B]`` float64 (0 is greedy) to ``[3, B]`` float64."""
    for n in numba.prange(len(logits)):
        output[0, n], output[1, n], output[2, n] = _draw_row(logits[n], temperatures[n], numbers[n])
