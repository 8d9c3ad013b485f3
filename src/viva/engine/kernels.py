"""Tensors to the compiled kernels of a decode step and back; see `viva.engine.compiled`.

Shapes: ``B`` rows, ``T`` new tokens per row, ``H`` hidden size, ``Q`` query heads, ``K`` key-value heads, ``D`` head
size.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from typing import Any

import numba
import numpy as np
import torch

from viva.engine import compiled

__all__ = [
    "Norm",
    "as_array",
    "attend_many",
    "attend_one",
    "can_compile",
    "draw",
    "gate",
    "gate_back",
    "gate_pair",
    "normalise",
    "normalise_back",
    "num_threads",
    "place",
    "run",
    "use_threads",
]

_EVERYTHING = 2**62


def can_compile(tensor: torch.Tensor) -> bool:
    """Whether the kernels compute on such tensors."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.bfloat16)


def use_threads() -> None:
    """Let the kernels that this thread calls use as many threads as torch does."""
    if _has_threads():
        numba.set_num_threads(min(torch.get_num_threads(), _most_threads()))


@cache
def _most_threads() -> int:
    """Numba's own limit, which it starts with in every thread."""
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(numba.get_num_threads).result()


@cache
def _home() -> int | None:
    """The process that threads can be used in, at the first call: of numba's kinds, one does not bear two callers."""
    for kernel in compiled.KERNELS:
        kernel.keep_code()
    return os.getpid() if any(map(_is_there, ("tbbpool", "omppool"))) else None


def _is_there(pool: str) -> bool:
    try:
        import_module(f"numba.np.ufunc.{pool}")
    except ImportError:  # its library is missing
        return False
    return True


def _has_threads() -> bool:
    return os.getpid() == _home() and torch.get_num_threads() > 1


def num_threads() -> int:
    """Threads that a kernel called now is computed with."""
    return numba.get_num_threads() if _has_threads() else 1


def run(kernel: compiled.Kernel, *arguments: Any) -> None:
    """Call a kernel, in threads where that is possible."""
    compute = kernel.in_threads if _has_threads() else kernel.alone
    try:
        compute(*arguments)
    except OSError:  # a full disk: its code is compiled now, but could not be kept
        compute(*arguments)


def _rows(tensor: torch.Tensor) -> Any:
    return as_array(tensor.view(-1, tensor.shape[-1]))


def as_array(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous tensor, bfloat16 as int16."""
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


class Norm:
    """A root mean square norm over the last dimension, of a copy that only computes."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """``[H]`` weights."""
        self._weight = as_array(weight.detach().contiguous())
        self._eps = np.float32(eps)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., H]`` to as many."""
        output = torch.empty_like(hidden)
        run(compiled.normalise, _rows(hidden), self._weight, self._eps, _rows(output))
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
    given = _rows(hidden), as_array(weight.detach()), np.float32(eps), _rows(slopes)
    run(compiled.normalise_back, *given, _rows(output))
    return output


def gate_pair(gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``silu(g) u`` of two tensors ``[..., F]``, to be trained through."""
    use_threads()
    output = torch.empty_like(gates)
    run(compiled.gate_pair, _rows(gates), _rows(values), _rows(output))
    return output


def gate_back(
    gates: torch.Tensor, values: torch.Tensor, slopes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slopes by what `gate_pair` took from those by what it gave, all ``[..., F]``."""
    use_threads()
    to_gates, to_values = torch.empty_like(gates), torch.empty_like(values)
    run(compiled.gate_back, *map(_rows, (gates, values, slopes, to_gates, to_values)))
    return to_gates, to_values


def gate(both: torch.Tensor) -> torch.Tensor:
    """``silu(g) u`` of gates and values side by side, ``[..., 2 F]`` to ``[..., F]``."""
    output = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
    run(compiled.gate, _rows(both), _rows(output))
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
    run(compiled.place, flat[0], *norms, *rotation, *where, as_array(store), flat[1])
    return query.transpose(1, 2)


def attend_one(
    query: torch.Tensor,
    store: torch.Tensor,
    start: int,
    lengths: Any,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one new token per row to its row's own keys.

    Args:
        query: ``[B, Q, 1, D]``.
        store: ``[2, R, K, L, D]``.
        start: The first query's row of the store.
        lengths: Keys that each row has, ``[B]``.
        scale: Of the scores.
        window: Keys that are seen, counting back from the query's own.

    Returns:
        Averages of values, ``[B, Q, 1, D]``, and logarithms of the sums of weights, ``[B, Q, 1]`` float32.
    """
    rows, heads, _, size = query.shape
    asked = query.reshape(rows, heads, size).contiguous()
    output, sums = torch.empty_like(asked), asked.new_empty(rows, heads, dtype=torch.float32)
    arrays = as_array(asked), as_array(store), as_array(output), sums.numpy()
    seen = _EVERYTHING if window is None else window
    run(
        compiled.attend_one,
        arrays[0],
        arrays[1],
        start,
        lengths,
        seen,
        np.float32(scale),
        arrays[2],
        arrays[3],
    )
    return output[:, :, None], sums[:, :, None]


def attend_many(
    query: torch.Tensor,
    store: torch.Tensor,
    start: int,
    lengths: Any,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_one` of ``T`` new tokens per row, which are the last ones of its keys, and do not see later ones.

    Args:
        query: ``[B, Q, T, D]``.
        store: As with `attend_one`.
        start: As with `attend_one`.
        lengths: As with `attend_one`.
        scale: Of the scores.
        window: As with `attend_one`.

    Returns:
        Averages of values, ``[B, Q, T, D]``, and logarithms of the sums of weights, ``[B, Q, T]`` float32.
    """
    asked = query.transpose(1, 2).contiguous()
    output, sums = torch.empty_like(asked), torch.empty(query.shape[:3])
    past = lengths - query.shape[2]
    rows = as_array(asked), as_array(store), start, past, _EVERYTHING if window is None else window
    run(compiled.attend_many, *rows, np.float32(scale), as_array(output), sums.numpy())
    return output.transpose(1, 2), sums


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
    run(compiled.draw, as_array(logits.contiguous()), temperatures, np.array(uniforms), output.numpy())
    return output
