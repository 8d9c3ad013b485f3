"""Tensors to the compiled attention of a tree and back; see `viva.engine.compiled.trees`.

Shapes: ``S`` packed tokens, ``Q`` query heads, ``K`` key-value heads, ``G = Q / K``, ``N = S G``, ``D`` head size.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from viva.engine import compiled
from viva.engine.kernels import as_array, num_threads, run, use_threads
from viva.engine.trees import Cell

__all__ = ["TreePlan", "attend_compiled"]


class TreePlan:
    """What the kernels read of a tree's cells, under one window."""

    def __init__(self, cells: Sequence[Cell], hidden: Sequence[tuple[int, torch.Tensor]]) -> None:
        """A plan.

        Args:
            cells: Of the tree.
            hidden: For each how many keys all of its queries see, and booleans of the rest, see `TreeStep.hidden`.
        """
        stretches = [(part.start, part.stop) for cell in cells for part in cell.keys]
        masks = [mask.numpy().reshape(-1) for _, mask in hidden]
        ends = np.cumsum([0, *(len(cell.keys) for cell in cells)])
        begins = np.cumsum([0, *map(len, masks)])
        self._cells = np.array(
            [
                (
                    cell.queries.start,
                    cell.queries.stop,
                    *ends[index : index + 2],
                    shown,
                    cell.visible.shape[1],
                    begin,
                )
                for index, (cell, (shown, _), begin) in enumerate(
                    zip(cells, hidden, begins[:-1], strict=True)
                )
            ],
            dtype=np.int64,
        )
        self._stretches = np.array(stretches, dtype=np.int64)
        self._hidden = np.concatenate(masks)

    def arrays(self, indices: Sequence[int], groups: int) -> tuple[Any, ...]:
        """The ``plan`` of the kernels for some of the cells."""
        blocks = [
            (index, first)
            for index in indices
            for first in range(
                groups * int(self._cells[index, 0]), groups * int(self._cells[index, 1]), compiled.BLOCK_ROWS
            )
        ]
        return np.array(blocks, dtype=np.int64).reshape(-1, 2), self._cells, self._stretches, self._hidden


def attend_compiled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: TreePlan,
    cells: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """Attention of some cells, to be trained through.

    Args:
        query: ``[1, Q, S, D]``.
        key: ``[1, K, S, D]``.
        value: As `key`.
        plan: Of the tree.
        cells: Which; the others' output is 0.
        scale: Of the scores.

    Returns:
        ``[1, S, Q, D]``.
    """
    output: Any = _CompiledAttention.apply(query, key, value, plan, cells, scale)
    return output


class _CompiledAttention(torch.autograd.Function):
    """``[1, Q, S, D]`` queries and ``[1, K, S, D]`` keys and values to ``[1, S, Q, D]`` output."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: TreePlan,
        cells: Sequence[int],
        scale: float,
    ) -> torch.Tensor:
        use_threads()
        groups = query.shape[1] // key.shape[1]
        blocks = plan.arrays(cells, groups)
        output = query.new_zeros(query.shape[2], query.shape[1], query.shape[3])
        sums = query.new_zeros(key.shape[1], query.shape[2] * groups, dtype=torch.float32)
        given = _queries(query, groups, scale), _columns(key), _rows(value)
        if len(blocks[0]):
            run(compiled.attend_tree, *given, blocks, groups, as_array(output), sums.numpy())
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.blocks, ctx.groups, ctx.scale = blocks, groups, scale
        return output[None]

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        use_threads()
        query, key, value, output, sums = ctx.saved_tensors
        groups, heads, tokens, size = ctx.groups, *key.shape[1:]
        slopes = grad_outputs[0].transpose(1, 2)
        # the softmax's backward pass needs sum(weight * slope) of every query, which is output * gradient
        means = (grad_outputs[0][0] * output).sum(dim=-1, dtype=torch.float32)
        means = means.view(tokens, heads, groups).transpose(0, 1).contiguous()
        width = -(-size // compiled.TILE_COLUMNS) * compiled.TILE_COLUMNS
        by_query = torch.zeros(heads, tokens * groups * width)
        by_key, by_value = (torch.zeros(heads, -(-num_threads() // heads), tokens * width) for _ in range(2))
        run(
            compiled.attend_tree_back,
            (_queries(query, groups, ctx.scale), _rows(key), _columns(key), _columns(value)),
            _queries(slopes, groups, 1.0),
            (sums.numpy(), means.view(heads, -1).numpy()),
            ctx.blocks,
            groups,
            (by_query.numpy(), by_key.numpy(), by_value.numpy()),
        )
        by_query = by_query.view(heads, tokens, groups, width)[..., :size].mul_(ctx.scale).transpose(1, 2)
        by_keys = [
            each.sum(1).view(1, heads, tokens, width)[..., :size].to(key.dtype) for each in (by_key, by_value)
        ]
        return by_query.reshape(query.shape).to(query.dtype), *by_keys, None, None, None


def _queries(states: torch.Tensor, groups: int, scale: float) -> Any:
    """``[1, Q, S, D]`` as scaled rows of the key-value heads, ``[K, (N + R) D]``, those of a token together."""
    _, heads, tokens, size = states.shape
    rows = tokens * groups
    store = _zeros(heads // groups, rows + compiled.TILE_ROWS, size)
    wanted = store[:, :rows, :size].unflatten(1, (tokens, groups))
    torch.mul(states[0].unflatten(0, (-1, groups)).transpose(1, 2), scale, out=wanted)
    return store.flatten(1).numpy()


def _rows(states: torch.Tensor) -> Any:
    """``[1, K, S, D]`` as rows of whole tiles, ``[K, S D]``."""
    store = _zeros(*states.shape[1:])
    store[..., : states.shape[3]] = states[0]
    return store.flatten(1).numpy()


def _columns(states: torch.Tensor) -> Any:
    """``[1, K, S, D]`` as columns, ``[K, D (S + W)]``, where ``D`` is of whole tiles."""
    _, heads, tokens, size = states.shape
    width = -(-size // compiled.TILE_COLUMNS) * compiled.TILE_COLUMNS
    store = torch.zeros(heads, width, tokens + compiled.TILE_COLUMNS)
    store[:, :size, :tokens] = states[0].mT
    return store.flatten(1).numpy()


def _zeros(heads: int, rows: int, size: int) -> torch.Tensor:
    """``[heads, rows, D]`` with ``D`` of whole tiles."""
    return torch.zeros(heads, rows, -(-size // compiled.TILE_COLUMNS) * compiled.TILE_COLUMNS)
