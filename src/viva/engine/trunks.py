"""Attention of rows that share a stored beginning: one product with the one copy of it, one with their own tokens.

Only the products are apart (Juravsky et al. 2024, arXiv 2402.05099); the softmax is one over the scores of both, so
nothing is approximated.

Shapes: ``B`` rows, ``T`` new tokens per row, ``Q`` query heads, ``K`` key-value heads, ``G = Q / K``, ``D`` head size;
``n`` rows that share a beginning of ``L`` tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Part", "Trunk", "make_parts", "two_part_attention"]

_MOST_ENTRIES = 2**20
"""Scores per head that are held at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trunk:
    """A beginning that live rows share."""

    digest: bytes
    """Of its last block, see `block_digests`."""
    states: list[torch.Tensor]
    """Keys and values, ``[2, K, L, D]`` per layer."""
    length: int

    def hidden(self, positions: torch.Tensor, window: int | None) -> torch.Tensor | None:
        """Keys that queries at these positions ``[n, T]`` do not see, ``[n, 1, T, L]``; ``None`` if they see all."""
        if window is None:
            return None
        first = positions - window + 1
        if not bool((first > 0).any()):
            return None
        return (torch.arange(self.length, device=positions.device) < first[..., None])[:, None]


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
    key: torch.Tensor,
    value: torch.Tensor,
    parts: Sequence[Part],
    layer: int,
    positions: torch.Tensor,
    visible: torch.Tensor | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of rows of which some have trunks.

    Args:
        query: ``[B, Q, T, D]``, scaled.
        key: ``[B, K, L, D]``, the rows' own.
        value: As `key`.
        parts: Of the rows.
        layer: Which of the trunks' states.
        positions: Of the queries, ``[B, T]``.
        visible: Own keys that queries see, ``[B, 1, T, L]``; ``None`` if all.
        window: Keys that are seen, counting back from the query's own.
        softcap: Bound of the scores.

    Returns:
        ``[B, Q, T, D]``.
    """
    num_rows, _, num_new, size = query.shape
    folded = query.reshape(num_rows, key.shape[1], -1, size)
    output = folded.new_empty(*folded.shape[:-1], value.shape[-1])
    for part in parts:
        mine, queried = folded[part.rows], positions[part.rows]
        begun = mine.new_zeros(*mine.shape[:-1], value.shape[-1])
        hidden = None if visible is None else ~visible[part.rows, :, :, : part.length]
        scores = _scores(mine, key[part.rows, :, : part.length], hidden, softcap)
        weights = torch.empty_like(scores)
        for picked, trunk in part.trunks:
            if trunk is None:
                weights[picked] = torch.softmax(scores[picked], dim=-1)
                continue
            keys, values = trunk.states[layer].unbind()
            asking = mine[picked].transpose(0, 1)
            unseen = trunk.hidden(queried[picked], window)
            first = _scores(asking.flatten(1, 2), keys, unseen, softcap)
            both = torch.cat([first, scores[picked].transpose(0, 1).flatten(1, 2)], dim=-1)
            begin, rest = torch.softmax(both, dim=-1).split([trunk.length, part.length], dim=-1)
            average = torch.matmul(begin.to(value.dtype), values)
            begun[picked] = average.unflatten(1, asking.shape[1:3]).transpose(0, 1)
            weights[picked] = rest.unflatten(1, asking.shape[1:3]).transpose(0, 1)
        output[part.rows] = begun + torch.matmul(weights.to(value.dtype), value[part.rows, :, : part.length])
    return output.reshape(num_rows, -1, num_new, output.shape[-1])


def _scores(
    query: torch.Tensor, key: torch.Tensor, hidden: torch.Tensor | None, softcap: float | None
) -> torch.Tensor:
    """Scores in float32 of ``[..., K, G T, D]`` queries, or of ``[K, n G T, D]`` with one key per trunk's token.

    ``hidden`` is ``[n, 1, T, L]``.
    """
    scores = torch.matmul(query, key.mT).float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if hidden is not None:
        rows, _, num_new, length = hidden.shape
        by_row = scores.dim() == 4
        shape = (rows, key.shape[1], -1, num_new, length) if by_row else (len(key), rows, -1, num_new, length)
        scores.view(shape).masked_fill_(hidden[:, :, None] if by_row else hidden, float("-inf"))
    return scores


def _pick(indices: list[int], device: torch.device) -> slice | torch.Tensor:
    """A slice, which needs no copies, where the indices follow one another."""
    if indices[-1] - indices[0] == len(indices) - 1:
        return slice(indices[0], indices[-1] + 1)
    return torch.tensor(indices, device=device)
