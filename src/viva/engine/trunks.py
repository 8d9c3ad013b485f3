"""Attention of rows that share a stored beginning: one product with the one copy of it, one with their own tokens.

Each gives an average of values and the logarithm of its sum of weights, from which the average over both follows
(Juravsky et al. 2024, arXiv 2402.05099). Nothing is approximated.

Shapes: ``B`` rows, ``T`` new tokens per row, ``Q`` query heads, ``K`` key-value heads, ``G = Q / K``, ``D`` head size;
``n`` rows that share a beginning of ``L`` tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Part", "Trunk", "average", "make_parts", "two_part_attention"]

_MOST_ENTRIES = 2**20
"""Scores per head that are held at once."""
_HIDDEN = -1e30
"""Added to the scores of a beginning's keys that a query does not see. It is finite, so that a query that sees none of
them has numbers there, too; they weigh nothing beside those of its own tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trunk:
    """A beginning that live rows share."""

    digest: bytes
    """Of its last block, see `block_digests`."""
    states: list[torch.Tensor]
    """Keys and values, ``[2, K, L, D]`` per layer."""
    length: int

    def bias(
        self, positions: torch.Tensor, most_own: int, groups: int, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """What hides keys from queries at positions ``[n, T]``, ``[1, 1, n G T, L]``; ``None`` if they see all.

        Rows have at most ``most_own`` tokens of their own. This is known without asking the device.
        """
        if window is None or self.length + most_own <= window:
            return None
        first = positions - window + 1
        mask = torch.arange(self.length, device=positions.device) < first[..., None]
        hidden = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, _HIDDEN)
        return hidden[:, None].expand(-1, groups, -1, -1).reshape(1, 1, -1, self.length)


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Neighbouring rows that attend together."""

    rows: slice
    length: int
    """Of the longest row's own tokens."""
    trunks: list[tuple[slice | torch.Tensor, Trunk | None]]
    """Beginnings, each with the rows that have it (or that have none), counted from the part's first."""


def make_parts(
    groups: Sequence[tuple[slice, int]], trunks: Sequence[Trunk | None], num_new: int, device: torch.device
) -> list[Part]:
    """Cut groups of rows, each with its longest length, where they would need too much memory."""
    deepest = max(0 if trunk is None else trunk.length for trunk in trunks)
    parts: list[Part] = []
    for rows, length in groups:
        size = max(1, _MOST_ENTRIES // (num_new * (deepest + length)))
        for first in range(rows.start, rows.stop, size):
            last = min(first + size, rows.stop)
            found: dict[int, tuple[Trunk | None, list[int]]] = {}
            for index, trunk in enumerate(trunks[first:last]):
                found.setdefault(id(trunk), (trunk, []))[1].append(index)
            picked = [(_pick(indices, device), trunk) for trunk, indices in found.values()]
            parts.append(Part(rows=slice(first, last), length=length, trunks=picked))
    return parts


def two_part_attention(
    query: torch.Tensor,
    own: Callable[[Part], tuple[torch.Tensor, torch.Tensor]],
    parts: Sequence[Part],
    layer: int,
    positions: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of rows of which some have trunks.

    Args:
        query: ``[B, K, G T, D]``: those that share keys are queries of one head.
        own: Averages over the tokens of a part's rows themselves, ``[n, K, G T, D]``, which are changed here, and
            logarithms of the sums of weights, ``[n, K, G T]``.
        parts: Of the rows.
        layer: Which of the trunks' states.
        positions: Of the queries, ``[B, T]``.
        scaling: Of the scores.
        window: Keys that are seen, counting back from the query's own.
        softcap: Bound of the scores.

    Returns:
        As many averages as queries.
    """
    groups = query.shape[2] // positions.shape[1]
    outputs: list[torch.Tensor] = []
    for part in parts:
        mine, queried = query[part.rows], positions[part.rows]
        output, sums = own(part)
        for picked, trunk in part.trunks:
            if trunk is None:
                continue
            keys, values = trunk.states[layer][:, None].unbind()
            asking = mine[picked].transpose(0, 1)
            unseen = trunk.bias(queried[picked], part.length, groups, window, query.dtype)
            begun, begun_sums = average(asking.flatten(1, 2)[None], keys, values, unseen, scaling, softcap)
            begun = begun[0].unflatten(1, asking.shape[1:3]).transpose(0, 1)
            begun_sums = begun_sums[0].unflatten(1, asking.shape[1:3]).transpose(0, 1)
            share = torch.sigmoid(begun_sums - sums[picked])[..., None].to(output.dtype)
            mixed = output[picked].lerp_(begun, share)
            if not isinstance(picked, slice):  # a slice is a view, which was changed in its place
                output[picked] = mixed
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def average(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Averages of values and logarithms of the sums of weights, in float32.

    Args:
        query: ``[R, K, N, D]``.
        key: ``[R, K, L, D]``.
        value: As `key`.
        bias: Added to the scores, ``[R, 1, N or 1, L]``.
        scaling: Of the scores.
        softcap: Bound of the scores.
    """
    if softcap is None and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
        kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return kernel(query, key, value, attn_mask=bias, scale=scaling)
    scores = torch.matmul(query * scaling, key.mT).float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores += bias
    weights = torch.softmax(scores, dim=-1)
    # of any key, the logarithm of the sum of weights is its score less the logarithm of its share
    sums = scores.amax(dim=-1) - weights.amax(dim=-1).log()
    return torch.matmul(weights.to(value.dtype), value), sums


def _pick(indices: list[int], device: torch.device) -> slice | torch.Tensor:
    """A slice, which needs no copies, where the indices follow one another."""
    if indices[-1] - indices[0] == len(indices) - 1:
        return slice(indices[0], indices[-1] + 1)
    return torch.tensor(indices, device=device)
