"""Attention over a packed prefix tree, forward and backward.

Scores of a block of queries are made, used and forgotten while they are in the processor's cache (Dao et al. 2022,
arXiv 2205.14135). The queries that share keys, those of one token one after another, are rows of one matrix. All
numbers are float32 in flat arrays; heads are filled up with zeros to a whole number of tiles, and what lies behind the
last row or column of a matrix may be read.

Shapes: ``S`` packed tokens, ``K`` key-value heads, ``G`` query heads for each of them, ``N = S G`` queries of these,
``D`` head size, ``W`` and ``R`` columns and rows of a tile; ``C`` cells, ``P`` stretches of their keys, ``B`` blocks
of queries, ``L`` keys of a cell.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numba
import numpy as np
import torch
from torch.autograd.function import once_differentiable

from viva.engine.kernels.compiler import (
    MAX_LANES,
    Array,
    Kernel,
    as_array,
    exp,
    inner,
    largest,
    narrow,
    num_threads,
    use_threads,
)
from viva.engine.kernels.tile import TILE_COLUMNS, TILE_ROWS, add_rows, add_tile

if TYPE_CHECKING:
    from viva.engine.trees import Cell

_BLOCK_ROWS = 96
"""Queries of a block: a whole number of tiles."""


TreeArrays = tuple[Array, Array, Array, Array]
"""``plan`` of `_attend_tree`."""


class TreePlan:
    """A tree's cells as the kernels read them, under one window."""

    def __init__(self, cells: Sequence["Cell"], hidden: Sequence[tuple[int, torch.Tensor]]) -> None:
        """A plan.

        Args:
            cells: Of the tree.
            hidden: For each how many keys all of its queries see, and booleans of the rest, see `TreeStep.hidden`.
        """
        rows: list[tuple[int, ...]] = []
        stretches: list[tuple[int, int]] = []
        masks: list[Array] = []
        begin = 0
        for cell, (shown, mask) in zip(cells, hidden, strict=True):
            first = len(stretches)
            stretches += [(part.start, part.stop) for part in cell.keys]
            where = cell.queries.start, cell.queries.stop, first, len(stretches)
            rows.append((*where, shown, cell.visible.shape[1], begin))
            masks.append(mask.numpy().reshape(-1))
            begin += mask.numel()
        self._cells = np.array(rows, dtype=np.int64)
        self._stretches = np.array(stretches, dtype=np.int64)
        self._hidden = np.concatenate(masks)

    def arrays(self, indices: Sequence[int], groups: int) -> TreeArrays:
        """The ``plan`` of the kernels for some of the cells."""
        blocks = [
            (index, first)
            for index in indices
            for first in range(groups * self._cells[index, 0], groups * self._cells[index, 1], _BLOCK_ROWS)
        ]
        return np.array(blocks, dtype=np.int64).reshape(-1, 2), self._cells, self._stretches, self._hidden


def attend_tree(
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
    return cast(torch.Tensor, _CompiledAttention.apply(query, key, value, plan, cells, scale))


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
            _attend_tree(*given, blocks, groups, as_array(output), sums.numpy())
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
        width = _whole_tiles(size)
        by_query = torch.zeros(heads, tokens * groups * width)
        by_key, by_value = (torch.zeros(heads, -(-num_threads() // heads), tokens * width) for _ in range(2))
        _attend_tree_back(
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


def _queries(states: torch.Tensor, groups: int, scale: float) -> Array:
    """``[1, Q, S, D]`` as scaled rows of the key-value heads, ``[K, (N + R) D]``, those of a token together."""
    _, heads, tokens, size = states.shape
    rows = tokens * groups
    store = torch.zeros(heads // groups, rows + TILE_ROWS, _whole_tiles(size))
    wanted = store[:, :rows, :size].unflatten(1, (tokens, groups))
    torch.mul(states[0].unflatten(0, (-1, groups)).transpose(1, 2), scale, out=wanted)
    return store.flatten(1).numpy()


def _rows(states: torch.Tensor) -> Array:
    """``[1, K, S, D]`` as rows of whole tiles, ``[K, S D]``."""
    store = torch.zeros(*states.shape[1:3], _whole_tiles(states.shape[3]))
    store[..., : states.shape[3]] = states[0]
    return store.flatten(1).numpy()


def _columns(states: torch.Tensor) -> Array:
    """``[1, K, S, D]`` as columns, ``[K, D (S + W)]``, where ``D`` is of whole tiles."""
    _, heads, tokens, size = states.shape
    store = torch.zeros(heads, _whole_tiles(size), tokens + TILE_COLUMNS)
    store[:, :size, :tokens] = states[0].mT
    return store.flatten(1).numpy()


def _whole_tiles(size: int) -> int:
    """A size of heads filled up to a whole number of tiles."""
    return -(-size // TILE_COLUMNS) * TILE_COLUMNS


@inner
def _by_keys(
    rows: Array, first: int, count: int, keys: Array, stretches: Array, size: int, products: Array
) -> None:
    """Products of rows, ``[N, D]``, from the first on with the keys of a cell, ``[D, S + W]``: ``[count, L + W]``."""
    step, width = products.shape[1], len(keys) // size
    flat = products.reshape(-1)
    done = 0
    for stretch in range(len(stretches)):
        begin, stop = stretches[stretch, 0], stretches[stretch, 1]
        for key in range(begin, stop, TILE_COLUMNS):
            for row in range(0, count, TILE_ROWS):
                # what this writes behind the stretch is overwritten by the next
                at = ((first + row) * size, size, 1)
                place = (row * step + done + key - begin, step)
                add_tile(TILE_ROWS, rows, at, keys, (key, width), flat, place, size, 0)
        done += stop - begin


@inner
def _by_values(weights: Array, count: int, values: Array, stretches: Array, size: int, sums: Array) -> None:
    """Sums of the rows of a cell's keys, ``[S, D]``, by weights ``[count, L]``: ``[count, D]``."""
    step = weights.shape[1]
    flat, total = weights.reshape(-1), sums.reshape(-1)
    done = 0
    for stretch in range(len(stretches)):
        begin, stop = stretches[stretch, 0], stretches[stretch, 1]
        for column in range(0, size, TILE_COLUMNS):
            for row in range(0, count, TILE_ROWS):
                at, place = (row * step + done, step, 1), (row * size + column, size)
                keep = 1 if stretch else 0
                where = begin * size + column, size
                add_tile(TILE_ROWS, flat, at, values, where, total, place, stop - begin, keep)
        done += stop - begin


@inner
def _to_keys(
    weights: Array, count: int, rows: Array, first: int, stretches: Array, size: int, sums: Array
) -> None:
    """Add rows, ``[N, D]``, from the first on by weights ``[count, L]`` to what a cell's keys have, ``[S, D]``."""
    step = weights.shape[1]
    flat = weights.reshape(-1)
    done = 0
    for stretch in range(len(stretches)):
        begin, stop = stretches[stretch, 0], stretches[stretch, 1]
        for column in range(0, size, TILE_COLUMNS):
            where, place = (first * size + column, size), (begin * size + column, size)
            add_rows(stop - begin, flat, (done, 1, step), rows, where, sums, place, count, 1)
        done += stop - begin


@inner
def _score(
    query: Array,
    keys: Array,
    block: Array,
    cell: Array,
    stretches: Array,
    hidden: Array,
    groups: int,
    size: int,
    scores: Array,
) -> int:
    """Scores of a block with its cell's keys, ``-inf`` where one is not seen; returns how many queries it has."""
    first, shown, length = block[1], cell[4], cell[5]
    count = min(_BLOCK_ROWS, cell[1] * groups - first)
    _by_keys(query, first, count, keys, stretches[cell[2] : cell[3]], size, scores)
    for row in range(count):
        place = cell[6] + ((first + row) // groups - cell[0]) * (length - shown) - shown
        for key in range(shown, length):
            scores[row, key] = -np.inf if hidden[place + key] else scores[row, key]
    return count


@inner
def _weigh(scores: Array, length: int, lanes: Array) -> tuple[np.float32, np.float32]:
    """Turn a row of scores into weights, the largest of which is 1; returns the logarithm of the sum and the sum."""
    top = largest(scores, length, lanes)
    total = np.float32(0)
    for key in range(length):
        scores[key] = exp(scores[key] - top)
        total += scores[key]
    return top + np.log(total), total


@Kernel
def _attend_tree(
    query: Array, keys: Array, values: Array, plan: TreeArrays, groups: int, output: Array, sums: Array
) -> None:
    """Attention of packed tokens to those on their paths.

    Args:
        query: Scaled, ``[K, (N + R) D]``.
        keys: Columns, ``[K, D (S + W)]``.
        values: Rows, ``[K, S D]``.
        plan: Blocks (cell, first query), ``[B, 2]``; cells (first token, last and one more, first stretch, last and one
            more, keys that all of its queries see, ``L``, where its mask begins), ``[C, 7]``; stretches of keys (first,
            last and one more), ``[P, 2]``; masks of the other keys, true where a token does not see one.
        groups: ``G``.
        output: ``[S, K G, d]`` with the true head size; written to.
        sums: Logarithms of the sums of weights, ``[K, N]``; written to.
    """
    blocks, cells, stretches, hidden = plan
    size = values.shape[1] // len(output)
    longest = cells[:, 5].max() + TILE_COLUMNS
    for unit in numba.prange(len(query) * len(blocks)):
        head, block = unit // len(blocks), blocks[unit % len(blocks)]
        cell = cells[block[0]]
        scores = np.empty((_BLOCK_ROWS, longest), np.float32)
        average = np.empty((_BLOCK_ROWS, size), np.float32)
        totals = np.empty(_BLOCK_ROWS, np.float32)
        lanes = np.empty(MAX_LANES, np.float32)
        count = _score(query[head], keys[head], block, cell, stretches, hidden, groups, size, scores)
        for row in range(count):
            sums[head, block[1] + row], totals[row] = _weigh(scores[row], cell[5], lanes)
        _by_values(scores, count, values[head], stretches[cell[2] : cell[3]], size, average)
        for row in range(count):
            token, group = (block[1] + row) // groups, (block[1] + row) % groups
            found = output[token, head * groups + group]
            for i in range(len(found)):
                found[i] = narrow(average[row, i] / totals[row], found[i])


@inner
def _bend(weights: Array, slopes: Array, length: int, logsum: Array, mean: Array) -> None:
    """Scores to weights, and slopes of weights to slopes of scores."""
    for key in range(length):
        weights[key] = exp(weights[key] - logsum)
        slopes[key] = weights[key] * (slopes[key] - mean)


@Kernel
def _attend_tree_back(
    given: tuple[Array, ...],
    slopes: Array,
    kept: tuple[Array, Array],
    plan: TreeArrays,
    groups: int,
    found: tuple[Array, Array, Array],
) -> None:
    """Slopes by what `_attend_tree` took from those by what it gave.

    Args:
        given: Its queries, keys as rows ``[K, S D]`` and as columns, and values as columns.
        slopes: By the output, ``[K, (N + R) D]``.
        kept: Of every query the logarithm of the sum of weights, and the sum of slopes times output, ``[K, N]``.
        plan: See `_attend_tree`.
        groups: ``G``.
        found: Slopes by queries ``[K, N D]``, and shares of those by keys and values, ``[K, X, S D]`` each; the shares
            are added to.
    """
    query, rows, keys, values = given
    logsums, means = kept
    by_query, by_key, by_value = found
    blocks, cells, stretches, hidden = plan
    shares = by_key.shape[1]
    size = by_query.shape[1] // logsums.shape[1]
    longest = cells[:, 5].max() + TILE_COLUMNS
    for unit in numba.prange(len(query) * shares):
        head, share = unit // shares, unit % shares
        weights = np.empty((_BLOCK_ROWS, longest), np.float32)
        bent = np.empty((_BLOCK_ROWS, longest), np.float32)
        sums = np.empty((_BLOCK_ROWS, size), np.float32)
        for index in range(share, len(blocks), shares):
            block = blocks[index]
            first, cell = block[1], cells[block[0]]
            path = stretches[cell[2] : cell[3]]
            count = _score(query[head], keys[head], block, cell, stretches, hidden, groups, size, weights)
            _by_keys(slopes[head], first, count, values[head], path, size, bent)
            for row in range(count):
                _bend(weights[row], bent[row], cell[5], logsums[head, first + row], means[head, first + row])
            _by_values(bent, count, rows[head], path, size, sums)
            by_query[head, first * size : (first + count) * size] = sums[:count].reshape(-1)
            _to_keys(bent, count, query[head], first, path, size, by_key[head, share])
            _to_keys(weights, count, slopes[head], first, path, size, by_value[head, share])
