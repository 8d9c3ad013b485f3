"""Attention of new tokens to their row's own keys: one per row, or several.

Of several, queries are columns and keys rows of a product, so that keys and values are read as they lie, and the
softmax of a query runs along its column. A block of keys is used and forgotten under a running softmax (Milakov and
Gimelshein 2018, arXiv 1805.02867).

Shapes: ``B`` rows of ``T`` new tokens, ``Q`` query heads, ``K`` key-value heads, ``G = Q / K``, ``D`` head size, ``R``
rows of a store and ``L`` tokens that each has room for; ``W`` columns of a tile; ``N`` rows of one new token.
"""

from typing import Any

import numba
import numpy as np
import torch

from viva.engine.kernels.compiler import (
    TILE_COLUMNS,
    TILE_ROWS,
    Kernel,
    add_rest,
    add_tile,
    as_array,
    exp,
    fetch,
    inner,
    narrow,
    widen,
)

_EVERYTHING = 2**62


def attend_one(
    query: torch.Tensor, store: torch.Tensor, start: int, lengths: Any, scale: float, window: int | None
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
    _attend_one(arrays[0], arrays[1], start, lengths, seen, np.float32(scale), arrays[2], arrays[3])
    return output[:, :, None], sums[:, :, None]


def attend_many(
    query: torch.Tensor, store: torch.Tensor, start: int, lengths: Any, scale: float, window: int | None
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
    _attend_many(*rows, np.float32(scale), as_array(output), sums.numpy())
    return output.transpose(1, 2), sums


_ONE_BLOCK = 64
"""Keys whose scores are held at once. Stores have room for a multiple of it."""
_LANES = 16
"""Numbers that are compared at once."""


@inner
def _weigh_block(
    query: Any, keys: Any, values: Any, start: int, first: int, last: int, scores: Any, lanes: Any
) -> Any:
    """Scores of one query, ``[D]``, with a block of keys; returns the largest. Keys that are not seen get ``-inf``."""
    for j in range(_ONE_BLOCK):
        scores[j] = -np.inf
    for j in range(0, min(_ONE_BLOCK, last - start), 4):
        fetch(values, start + j, 4)
        s0 = s1 = s2 = s3 = np.float32(0)
        for i in range(len(query)):
            s0 += query[i] * widen(keys[start + j, i])
            s1 += query[i] * widen(keys[start + j + 1, i])
            s2 += query[i] * widen(keys[start + j + 2, i])
            s3 += query[i] * widen(keys[start + j + 3, i])
        scores[j], scores[j + 1], scores[j + 2], scores[j + 3] = s0, s1, s2, s3
    if start < first or start + _ONE_BLOCK > last:
        for j in range(_ONE_BLOCK):
            if start + j < first or start + j >= last:
                scores[j] = -np.inf
    lanes[:] = -np.inf
    for j in range(0, _ONE_BLOCK, _LANES):  # a maximum in one number would be one comparison after another
        for i in range(_LANES):
            lanes[i] = scores[j + i] if scores[j + i] > lanes[i] else lanes[i]
    return lanes.max()


@inner
def _add_values(weights: Any, values: Any, start: int, last: int, keys: Any, average: Any) -> None:
    """Add a block's values by their weights to ``[D]``."""
    for j in range(0, min(_ONE_BLOCK, last - start), 4):
        fetch(keys, start + _ONE_BLOCK + j, 4)
        s0, s1, s2, s3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for i in range(len(average)):
            average[i] += (
                s0 * widen(values[start + j, i])
                + s1 * widen(values[start + j + 1, i])
                + s2 * widen(values[start + j + 2, i])
                + s3 * widen(values[start + j + 3, i])
            )


@inner
def _attend_head(
    query: Any, keys: Any, values: Any, first: int, last: int, scale: Any, output: Any, sums: Any
) -> None:
    """One row's query heads that share keys, ``[G, D]``: the average of values in blocks, under one softmax."""
    groups, size = query.shape
    wide = np.empty((groups, size), np.float32)
    for g in range(groups):
        for i in range(size):
            wide[g, i] = widen(query[g, i]) * scale
    average = np.zeros((groups, size), np.float32)
    tops = np.full(groups, -np.inf, np.float32)
    totals = np.zeros(groups, np.float32)
    scores = np.empty(_ONE_BLOCK, np.float32)
    lanes = np.empty(_LANES, np.float32)
    for start in range(first // _ONE_BLOCK * _ONE_BLOCK, last, _ONE_BLOCK):
        for g in range(groups):
            top = max(tops[g], _weigh_block(wide[g], keys, values, start, first, last, scores, lanes))
            shrunk = exp(tops[g] - top)
            tops[g] = top
            total = np.float32(0)
            for j in range(_ONE_BLOCK):
                scores[j] = exp(scores[j] - top)
                total += scores[j]
            totals[g] = totals[g] * shrunk + total
            for i in range(size):
                average[g, i] *= shrunk
            _add_values(scores, values, start, last, keys, average[g])
    for g in range(groups):
        sums[g] = tops[g] + np.log(totals[g])
        for i in range(size):
            output[g, i] = narrow(average[g, i] / totals[g], output[g, i])


@Kernel
def _attend_one(
    query: Any, store: Any, start: int, lengths: Any, window: int, scale: Any, output: Any, sums: Any
) -> None:
    """Attention of one new token per row to its row's own keys.

    Args:
        query: ``[N, Q, D]``.
        store: ``[2, R, K, L, D]``.
        start: The first query's row of the store.
        lengths: Keys that each row has, ``[N]``.
        window: Keys that are seen, counting back from the last.
        scale: Of the scores.
        output: ``[N, Q, D]``; written to.
        sums: Logarithms of the sums of weights, ``[N, Q]`` float32; written to.
    """
    num_rows = len(query)
    num_keys = store.shape[2]
    groups = query.shape[1] // num_keys
    for unit in numba.prange(num_rows * num_keys):
        # head by head, so that every thread gets rows of all lengths
        n, h = unit % num_rows, unit // num_rows
        heads = slice(h * groups, (h + 1) * groups)
        keys, values = store[0, start + n, h], store[1, start + n, h]
        first = max(0, lengths[n] - window)
        _attend_head(
            query[n, heads], keys, values, first, lengths[n], scale, output[n, heads], sums[n, heads]
        )


_MANY_BLOCK = 384
"""Keys whose scores are held at once."""
_LOWEST = np.float32(-1e30)
"""Below every score that is a number."""


@inner
def _multiply(left: Any, at: Any, rows: int, right: Any, sums: Any, count: int, keep: int) -> None:
    """`add_tile` for any number of rows; factors and sums have the columns of a tile."""
    begin, row_step, step = at
    whole = rows // TILE_ROWS * TILE_ROWS
    for row in range(0, whole, TILE_ROWS):
        place = (row * TILE_COLUMNS, TILE_COLUMNS)
        add_tile(
            left, (begin + row * row_step, row_step, step), right, (0, TILE_COLUMNS), sums, place, count, keep
        )
    place = (whole * TILE_COLUMNS, TILE_COLUMNS)
    rest = rows - whole
    add_rest(
        rest,
        left,
        (begin + whole * row_step, row_step, step),
        right,
        (0, TILE_COLUMNS),
        sums,
        place,
        count,
        keep,
    )


@inner
def _hide(scores: Any, first: int, count: int, places: Any, window: int) -> None:
    """Give keys behind a query, or beyond its window, a score of ``-inf``."""
    least, most = places.min(), places.max()
    for key in range(count):
        if first + key > least or first + key <= most - window:
            for column in range(TILE_COLUMNS):
                is_seen = places[column] - window < first + key <= places[column]
                scores[key, column] = scores[key, column] if is_seen else -np.inf


@inner
def _weigh_columns(scores: Any, count: int, tops: Any, totals: Any, average: Any) -> None:
    """Turn scores into weights, and let what was found before be relative to the same largest score."""
    shrunk = np.empty(TILE_COLUMNS, np.float32)
    for column in range(TILE_COLUMNS):
        shrunk[column] = tops[column]
    for key in range(count):
        for column in range(TILE_COLUMNS):
            tops[column] = scores[key, column] if scores[key, column] > tops[column] else tops[column]
    for column in range(TILE_COLUMNS):
        shrunk[column] = exp(shrunk[column] - tops[column])
        totals[column] *= shrunk[column]
    for i in range(len(average)):
        for column in range(TILE_COLUMNS):
            average[i, column] *= shrunk[column]
    for key in range(count):
        for column in range(TILE_COLUMNS):
            weight = exp(scores[key, column] - tops[column])
            scores[key, column] = weight
            totals[column] += weight


@Kernel
def _attend_many(
    query: Any, store: Any, start: int, past: Any, window: int, scale: Any, output: Any, sums: Any
) -> None:
    """Attention of new tokens to their row's own keys up to themselves.

    Args:
        query: ``[B, T, Q, D]``.
        store: ``[2, R, K, L, D]``.
        start: The first row's row of the store.
        past: Tokens that each row had before, ``[B]``.
        window: Keys that are seen, counting back from the query's own.
        scale: Of the scores.
        output: ``[B, T, Q, D]``; written to.
        sums: Logarithms of the sums of weights, ``[B, Q, T]`` float32; written to.
    """
    num_new, size, heads = query.shape[1], query.shape[3], store.shape[2]
    groups = query.shape[2] // heads
    blocks = -(-num_new * groups // TILE_COLUMNS)
    for unit in numba.prange(len(query) * heads * blocks):
        row, head, block = unit // (heads * blocks), unit // blocks % heads, unit % blocks
        keys, values = store[0, start + row, head].reshape(-1), store[1, start + row, head].reshape(-1)
        begin = block * TILE_COLUMNS
        used = min(TILE_COLUMNS, num_new * groups - begin)
        asked = np.zeros((size, TILE_COLUMNS), np.float32)
        places = np.empty(TILE_COLUMNS, np.int64)
        for column in range(TILE_COLUMNS):
            token, group = (begin + min(column, used - 1)) // groups, (begin + min(column, used - 1)) % groups
            places[column] = past[row] + token
            asking = query[row, token, head * groups + group]
            for i in range(size):
                asked[i, column] = widen(asking[i]) * scale
        scores = np.empty((_MANY_BLOCK, TILE_COLUMNS), np.float32)
        average = np.zeros((size, TILE_COLUMNS), np.float32)
        tops = np.full(TILE_COLUMNS, _LOWEST, np.float32)
        totals = np.zeros(TILE_COLUMNS, np.float32)
        stop = places[TILE_COLUMNS - 1] + 1
        for first in range(max(0, places[0] + 1 - window), stop, _MANY_BLOCK):
            count = min(_MANY_BLOCK, stop - first)
            _multiply(keys, (first * size, size, 1), count, asked.reshape(-1), scores.reshape(-1), size, 0)
            _hide(scores, first, count, places, window)
            _weigh_columns(scores, count, tops, totals, average)
            _multiply(
                values, (first * size, 1, size), size, scores.reshape(-1), average.reshape(-1), count, 1
            )
        for column in range(used):
            token, group = (begin + column) // groups, (begin + column) % groups
            sums[row, head * groups + group, token] = tops[column] + np.log(totals[column])
            found = output[row, token, head * groups + group]
            for i in range(size):
                found[i] = narrow(average[i, column] / totals[column], found[i])
