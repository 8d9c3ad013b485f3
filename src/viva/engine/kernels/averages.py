"""Averages of values by the softmax of queries with many keys, from which attention to prompts and prefixes is made.

Queries are columns of a product and keys its rows, so that the softmax of a query runs along its column. There are two
forms: by tiles of float32, and for bfloat16 on processors with AMX by its matrices. These keep float32 sums, too;
weights are rounded to bfloat16 before they meet the values.

Shapes: ``W`` queries, ``D`` head size, ``L`` keys.
"""

from collections.abc import Callable
from typing import TypeAlias

import numba
import numpy as np
import torch
from numba import types

from viva.engine.kernels.compiler import (
    LOG2_E,
    Array,
    Kernel,
    as_array,
    choose,
    exp,
    inner,
    numbers_at,
    power_of_two,
    widen,
)
from viva.engine.kernels.matrices import (
    HALF,
    MATRIX,
    add_matrix,
    begin_matrices,
    end_matrices,
    has_matrices,
    turn_pairs,
    turn_words,
)
from viva.engine.kernels.tile import TILE_COLUMNS, add_narrow_rows, add_rows

Turned: TypeAlias = tuple[Array, Array]
"""See `turned_values`."""
_MANY_BLOCK = 384
"""Keys whose scores are held at once."""
_MATRIX_BLOCK = 128
"""The same by AMX."""
_LOWEST = np.float32(-1e30)
"""Below every score that is a number."""


@inner
def _hide(scores: Array, first: int, count: int, seen: Array) -> None:
    """Give keys that a query does not see a score of ``-inf``."""
    most_first, least_last = seen[0].max(), seen[1].min()
    for key in range(count):
        if first + key > least_last or first + key < most_first:
            for column in range(scores.shape[1]):
                is_seen = seen[0, column] <= first + key <= seen[1, column]
                scores[key, column] = scores[key, column] if is_seen else -np.inf


@inner
def _raise_tops(scores: Array, count: int, tops: Array) -> Array:
    """Let the largest scores be those of a block, too; returns how much lower they were before, ``[W]``."""
    width = scores.shape[1]
    fallen = np.empty(width, np.float32)
    for column in range(width):
        fallen[column] = tops[column]
    for key in range(count):
        for column in range(width):
            tops[column] = scores[key, column] if scores[key, column] > tops[column] else tops[column]
    for column in range(width):
        fallen[column] -= tops[column]
    return fallen


@inner
def _shrink(shares: Array, totals: Array, average: Array) -> None:
    """Let sums be relative to another largest score."""
    for column in range(len(shares)):
        totals[column] *= shares[column]
    for i in range(len(average)):
        for column in range(len(shares)):
            average[i, column] *= shares[column]


@inner
def _weigh_columns(scores: Array, count: int, tops: Array, totals: Array, average: Array) -> None:
    """Turn scores into weights, and let what was found before be relative to the same largest score."""
    shares = _raise_tops(scores, count, tops)
    for column in range(len(shares)):
        shares[column] = exp(shares[column])
    _shrink(shares, totals, average)
    for key in range(count):
        for column in range(len(shares)):
            weight = exp(scores[key, column] - tops[column])
            scores[key, column] = weight
            totals[column] += weight


def average(
    turned: Turned | None,
    index: int,
    keys: Array,
    values: Array,
    asked: Array,
    seen: Array,
    scale: np.float32,
    sums: Array,
    averages: Array,
) -> None:
    """Averages of values, ``[W, D]``, by queries, ``[W, D]``: by tiles, or in kernels by AMX where values are turned.

    Args:
        turned: `turned_values`, of which those of a place are used; or none.
        index: Of the place.
        keys: ``[L, D]``, flat.
        values: As `keys`.
        asked: The queries.
        seen: First and last key that each query sees, ``[2, W]``; it sees none if they are the other way round.
        scale: Of the scores.
        sums: Each query's largest score, and its sum of weights relative to that one, ``[2, W]``; written to.
        averages: Written to; no numbers where a query sees no key.
    """
    width, size = asked.shape
    average, columns = np.empty((size, width), np.float32), np.empty((size, width), np.float32)
    for column in range(width):
        for i in range(size):
            columns[i, column] = widen(asked[column, i]) * scale
    queries = columns.reshape(-1)
    scores = np.empty((_MANY_BLOCK, width), np.float32)
    weights, tile = scores.reshape(-1), (0, width)
    tops, totals = sums
    average[:], tops[:], totals[:] = 0, _LOWEST, 0
    stop = seen[1].max() + 1
    for first in range(seen[0].min(), stop, _MANY_BLOCK):
        count = min(_MANY_BLOCK, stop - first)
        key_at, value_at = (first * size, size, 1), (first * size, 1, size)
        if width == TILE_COLUMNS:
            add_rows(count, keys, key_at, queries, tile, weights, tile, size, 0)
        else:
            add_narrow_rows(count, keys, key_at, queries, tile, weights, tile, size, 0)
        _hide(scores, first, count, seen)
        _weigh_columns(scores, count, tops, totals, average)
        if width == TILE_COLUMNS:
            add_rows(size, values, value_at, weights, tile, average.reshape(-1), tile, count, 1)
        else:
            add_narrow_rows(size, values, value_at, weights, tile, average.reshape(-1), tile, count, 1)
    for column in range(width):
        for i in range(size):
            averages[column, i] = average[i, column] / totals[column]


def uses_matrices(query: torch.Tensor, scale: float) -> bool:
    """Whether averages for such queries are made by AMX, from `turned_values`: largest products are largest scores."""
    return query.dtype == torch.bfloat16 and query.shape[-1] % MATRIX == 0 and scale > 0 and has_matrices()


def turned_values(places: Array, like: torch.Tensor) -> Turned:
    """Values as the matrices read them: blocks of keys, ``[.., D, MATRIX / 2]``, two of a column in a word.

    Args:
        places: Address and number of each place's values, ``[L, D]``, and the first key that is seen, ``[.., 3]``.
        like: A tensor of their type and ``D``.

    Returns:
        The blocks of all places, of each from the one with the first key that is seen to the last, and the number of
        each place's block with key 0, which is not there where that is not seen.
    """
    begins = places[:, 2] // MATRIX
    counts = np.maximum(0, -(-places[:, 1] // MATRIX) - begins)
    starts = np.cumsum(counts) - counts - begins
    blocks = np.empty((counts.sum(), like.shape[-1], HALF), np.uint32)
    _turn_values(places, as_array(like), np.repeat(np.arange(len(places)), counts), starts, blocks)
    return blocks, starts


@Kernel
def _turn_values(places: Array, like: Array, owners: Array, starts: Array, blocks: Array) -> None:
    size = blocks.shape[1]
    for unit in numba.prange(len(owners)):
        address, length = places[owners[unit], 0], places[owners[unit], 1]
        first = (unit - starts[owners[unit]]) * MATRIX
        values, begin = numbers_at(address, length * size, like), first * size
        block = blocks[unit].reshape(-1)
        if length - first >= MATRIX:
            for i in range(0, size, HALF):
                turn_pairs(values, (begin + i, size), block, (i * HALF, HALF))
        else:
            last = (length - first) * size
            rest = np.empty(MATRIX * size, values.dtype)
            rest[:last], rest[last:] = values[begin : begin + last], 0
            for i in range(0, size, HALF):
                turn_pairs(rest, (i, size), block, (i * HALF, HALF))


@inner
def _paired(first: np.float32, second: np.float32) -> np.uint32:
    """Two weights as bfloat16 in one word, rounded to nearest; of two that are equally near, up."""
    low = np.float32(first).view(np.uint32) + np.uint32(0x8000)
    high = np.float32(second).view(np.uint32) + np.uint32(0x8000)
    return np.uint32((high & np.uint32(0xFFFF0000)) | (low >> np.uint32(16)))


@inner
def _pair_columns(
    scores: Array, count: int, factor: np.float32, tops: Array, totals: Array, average: Array, pairs: Array
) -> int:
    """`_weigh_columns` of scores in powers of two by ``factor``, whose weights are written in pairs.

    Returns how many keys these are; behind the last one there are zeros.
    """
    width, filled = scores.shape[1], -(-count // MATRIX) * MATRIX
    scores[count:filled] = -np.inf
    shares = _raise_tops(scores, count, tops)
    for column in range(width):
        shares[column] = power_of_two(shares[column] * factor)
    _shrink(shares, totals, average)
    for pair in range(filled // 2):
        for column in range(width):
            first = power_of_two((scores[2 * pair, column] - tops[column]) * factor)
            second = power_of_two((scores[2 * pair + 1, column] - tops[column]) * factor)
            totals[column] += first + second
            pairs[pair, column] = _paired(first, second)
    return filled


@inner
def _turn_words(matrix: Array, turned: Array) -> None:
    """Write the columns of a matrix of words as rows; it has a multiple of `MATRIX` / 2 of either."""
    rows, columns = matrix.shape
    for row in range(0, rows, HALF):
        for column in range(0, columns, HALF):
            source = matrix.reshape(-1), (row * columns + column, columns)
            turn_words(*source, turned.reshape(-1), (column * rows + row, rows))


@inner
def _score_block(keys: Array, first: int, count: int, queries: Array, scores: Array, rest: Array) -> None:
    """Scores of some keys, ``[.., W]``, with queries in pairs, ``[D / 2, W]``."""
    width, size = scores.shape[1], len(rest) // MATRIX
    for key in range(0, count, MATRIX):
        source, begin = keys, (first + key) * size
        if count - key < MATRIX:  # what is behind the last one may be no memory of ours
            last = (count - key) * size
            rest[:last] = keys[begin : begin + last]
            source, begin = rest, 0
        for column in range(0, width, MATRIX):
            left, right = (begin, size, HALF * size, MATRIX), (column, width, HALF * width)
            found = scores.reshape(-1), (key * width + column, width)
            add_matrix(source, left, queries.reshape(-1), right, *found, size // MATRIX, 0)


@inner
def _add_block(blocks: Array, first: int, count: int, pairs: Array, average: Array) -> None:
    """Add values of some keys by their weights in pairs, ``[.. / 2, W]``, to ``[D, W]``."""
    size, width = average.shape
    values, weights, sums = blocks.reshape(-1), pairs.reshape(-1), average.reshape(-1)
    for i in range(0, size, MATRIX):
        for column in range(0, width, MATRIX):
            left = first // 2 * size + i * HALF, HALF, HALF * HALF, HALF * size
            right, found = (column, width, HALF * width), (i * width + column, width)
            add_matrix(values, left, weights, right, sums, found, count // MATRIX, 1)


def _average_by_matrices(
    turned: Turned,
    index: int,
    keys: Array,
    values: Array,
    asked: Array,
    seen: Array,
    scale: np.float32,
    sums: Array,
    averages: Array,
) -> None:
    """`average` by AMX, of `turned_values`."""
    (blocks, starts), (width, size) = turned, asked.shape
    average, shares = np.empty((size, width), np.float32), np.empty(width, np.float32)
    scores = np.empty((_MATRIX_BLOCK, width), np.float32)
    pairs = np.empty((_MATRIX_BLOCK // 2, width), np.uint32)
    queries, rest = np.empty((size // 2, width), np.uint32), np.zeros(MATRIX * size, np.int16)
    _turn_words(asked.view(np.uint32), queries)
    tops, totals = sums
    average[:], tops[:], totals[:] = 0, _LOWEST, 0
    stop = seen[1].max() + 1
    begin_matrices()
    for first in range(seen[0].min() // MATRIX * MATRIX, stop, _MATRIX_BLOCK):
        count = min(_MATRIX_BLOCK, stop - first)
        _score_block(keys, first, count, queries, scores, rest)
        _hide(scores, first, count, seen)
        filled = _pair_columns(scores, count, scale * LOG2_E, tops, totals, average, pairs)
        _add_block(blocks, starts[index] * MATRIX + first, filled, pairs, average)
    end_matrices()
    for column in range(width):
        tops[column] *= scale
        shares[column] = np.float32(1) / totals[column]
    for i in range(size):
        for column in range(width):
            average[i, column] *= shares[column]
    _turn_words(average, averages)


def _form(turned: types.Type, *others: types.Type) -> Callable[..., None]:
    return average if isinstance(turned, types.NoneType) else _average_by_matrices


choose(average, _form)
