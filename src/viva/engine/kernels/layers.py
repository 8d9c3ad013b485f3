"""The steps between the products of a layer: norms, rotation and storing, gates.

Arrays are C-contiguous, of float32, or of bfloat16 seen as int16 (numpy has no such type); results are rounded once.

Shapes: ``B`` rows of ``T`` new tokens, ``N = B T``, ``H`` hidden size, ``F`` inner size, ``Q`` query heads, ``K``
key-value heads, ``D`` head size, ``R`` rows of a store and ``L`` tokens that each has room for.
"""

from typing import Any

import numba
import numpy as np
import torch

from viva.engine.kernels.compiler import Kernel, as_array, as_rows, exp, inner, narrow, use_threads, widen


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
    """The same norm as a function of a contiguous tensor, to be trained through."""
    use_threads()
    return Norm(weight, eps)(hidden)


def normalise_back(
    hidden: torch.Tensor, weight: torch.Tensor, eps: float, slopes: torch.Tensor
) -> torch.Tensor:
    """Slopes by what `normalise` took, ``[..., H]``, from those by what it gave."""
    use_threads()
    output = torch.empty_like(hidden)
    given = as_rows(hidden), as_array(weight.detach()), np.float32(eps), as_rows(slopes)
    _normalise_back(*given, as_rows(output))
    return output


def gate_pair(gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``silu(g) u`` of two tensors ``[..., F]``, to be trained through."""
    use_threads()
    output = torch.empty_like(gates)
    _gate_pair(as_rows(gates), as_rows(values), as_rows(output))
    return output


def gate_back(
    gates: torch.Tensor, values: torch.Tensor, slopes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slopes by what `gate_pair` took from those by what it gave, all ``[..., F]``."""
    use_threads()
    to_gates, to_values = torch.empty_like(gates), torch.empty_like(values)
    _gate_back(*map(as_rows, (gates, values, slopes, to_gates, to_values)))
    return to_gates, to_values


def gate(both: torch.Tensor) -> torch.Tensor:
    """``silu(g) u`` of gates and values side by side, ``[..., 2 F]`` to ``[..., F]``."""
    output = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
    _gate(as_rows(both), as_rows(output))
    return output


def place(
    inner: torch.Tensor,
    norms: tuple[Any, np.float32],
    rotation: tuple[Any, Any],
    where: tuple[Any, Any],
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
    flat = (
        as_array(inner.view(-1, inner.shape[-1] // size, size)),
        as_array(query.view(-1, num_queries, size)),
    )
    _place(flat[0], *norms, *rotation, *where, as_array(store), flat[1])
    return query.transpose(1, 2)


_SERIAL = 2**15
"""Numbers up to which one thread is faster than waking the others."""


@inner
def _normalise_row(row: Any, weight: Any, eps: Any, output: Any) -> None:
    size = len(row)
    total = np.float32(0)
    for i in range(size):
        x = widen(row[i])
        total += x * x
    factor = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        output[i] = narrow(widen(row[i]) * factor * widen(weight[i]), output[i])


@Kernel
def _normalise(hidden: Any, weight: Any, eps: Any, output: Any) -> None:
    """Root mean square norm: ``[N, H]`` hidden states and ``[H]`` weights to ``[N, H]``."""
    if hidden.size <= _SERIAL:
        for n in range(len(hidden)):
            _normalise_row(hidden[n], weight, eps, output[n])
    else:
        for n in numba.prange(len(hidden)):
            _normalise_row(hidden[n], weight, eps, output[n])


@inner
def _normalise_row_back(row: Any, weight: Any, eps: Any, slope: Any, output: Any) -> None:
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
def _normalise_back(hidden: Any, weight: Any, eps: Any, slopes: Any, output: Any) -> None:
    """Slopes by what `normalise` took, ``[N, H]``, from those by what it gave."""
    for n in numba.prange(len(hidden)):
        _normalise_row_back(hidden[n], weight, eps, slopes[n], output[n])


@inner
def _gate_row(gate: Any, up: Any, output: Any) -> None:
    for i in range(len(output)):
        x = widen(gate[i])
        output[i] = narrow(x * widen(up[i]) / (np.float32(1) + exp(-x)), output[i])


@Kernel
def _gate(both: Any, output: Any) -> None:
    """``silu(g) u`` of ``[N, 2 F]`` gates and values side by side, to ``[N, F]``."""
    size = output.shape[1]
    if output.size <= _SERIAL:
        for n in range(len(both)):
            _gate_row(both[n, :size], both[n, size:], output[n])
    else:
        for n in numba.prange(len(both)):
            _gate_row(both[n, :size], both[n, size:], output[n])


@Kernel
def _gate_pair(gates: Any, values: Any, output: Any) -> None:
    """``silu(g) u`` of two ``[N, F]``."""
    for n in numba.prange(len(gates)):
        _gate_row(gates[n], values[n], output[n])


@inner
def _gate_row_back(gate: Any, up: Any, slope: Any, to_gate: Any, to_up: Any) -> None:
    for i in range(len(gate)):
        x, y = widen(gate[i]), widen(slope[i])
        share = np.float32(1) / (np.float32(1) + exp(-x))
        to_up[i] = narrow(y * x * share, to_up[i])
        to_gate[i] = narrow(
            y * widen(up[i]) * share * (np.float32(1) + x * (np.float32(1) - share)), to_gate[i]
        )


@Kernel
def _gate_back(gates: Any, values: Any, slopes: Any, to_gates: Any, to_values: Any) -> None:
    """Slopes by what `gate_pair` took, from those by what it gave, all ``[N, F]``."""
    for n in numba.prange(len(gates)):
        _gate_row_back(gates[n], values[n], slopes[n], to_gates[n], to_values[n])


@inner
def _rotate_head(head: Any, weight: Any, eps: Any, cosines: Any, sines: Any, wide: Any, output: Any) -> None:
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
    inner: Any, weight: Any, eps: Any, cosines: Any, sines: Any, store: Any, row: int, place: int, query: Any
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
    inner: Any,
    weight: Any,
    eps: Any,
    cosines: Any,
    sines: Any,
    rows: Any,
    places: Any,
    store: Any,
    query: Any,
) -> None:
    """Norm of heads where they have one, rotation, and storing of keys and values.

    Args:
        inner: ``[N, Q + 2 K, D]``: queries, keys and values.
        weight: Of the heads' norms, ``[Q + K, D]``, or ``[0, D]`` without norms.
        eps: Of the norms.
        cosines: ``[N, D]``.
        sines: As `cosines`.
        rows: Of the store, ``[N]``.
        places: Of the tokens among their row's own, ``[N]``.
        store: ``[2, R, K, L, D]``; written to.
        query: ``[N, Q, D]``; written to.
    """
    if inner.size <= _SERIAL:
        for n in range(len(inner)):
            _place_token(inner[n], weight, eps, cosines[n], sines[n], store, rows[n], places[n], query[n])
    else:
        for n in numba.prange(len(inner)):
            _place_token(inner[n], weight, eps, cosines[n], sines[n], store, rows[n], places[n], query[n])
