"""Attention of new tokens to their row's own keys: one per row, or several.

Of several, queries are columns and keys rows of a product, so that keys and values are read as they lie, and the
softmax of a query runs along its column. A block of keys is used and forgotten under a running softmax (Milakov and
Gimelshein 2018, arXiv 1805.02867).

Shapes: ``B`` rows of ``T`` new tokens, ``Q`` query heads, ``K`` key-value heads, ``G = Q / K``, ``D`` head size, ``R``
rows of a store and ``L`` tokens that each has room for; ``W`` columns of a tile; ``N`` rows of one new token.
"""

import numba
import numpy as np
import torch

from viva.engine.kernels.compiler import (
    MAX_LANES,
    Array,
    Kernel,
    as_array,
    exp,
    fetch,
    inner,
    largest,
    narrow,
    widen,
)
from viva.engine.kernels.tile import TILE_COLUMNS, add_rows

_EVERYTHING = 2**62


def attend_rows(
    query: torch.Tensor, store: torch.Tensor, lengths: Array, scale: float, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last tokens of rows to their row's own keys up to themselves.

    Args:
        query: ``[B, Q, T, D]``.
        store: ``[2, R, K, L, D]``, whose first ``B`` rows these are.
        lengths: Keys that each row has, ``[B]``.
        scale: Of the scores.
        window: Keys that are seen, counting back from the query's own.

    Returns:
        Averages of values, ``[B, Q, T, D]``, and logarithms of the sums of weights, ``[B, Q, T]`` float32.
    """
    seen, factor = _EVERYTHING if window is None else window, np.float32(scale)
    asked = query.transpose(1, 2).contiguous()
    output, sums = torch.empty_like(asked), torch.empty(query.shape[:3])
    num_new = query.shape[2]
    if num_new == 1:
        asked, found, logsums = asked[:, 0], output[:, 0], sums[:, :, 0]
        _attend_one(as_array(asked), as_array(store), lengths, seen, factor, as_array(found), logsums.numpy())
    else:
        past = lengths - num_new
        _attend_many(as_array(asked), as_array(store), past, seen, factor, as_array(output), sums.numpy())
    return output.transpose(1, 2), sums


_ONE_BLOCK = 64
"""Keys whose scores are held at once. Stores have room for a multiple of it."""


@inner
def _weigh_block(
    query: Array, keys: Array, values: Array, start: int, first: int, last: int, scores: Array, lanes: Array
) -> np.float32:
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
    return largest(scores, _ONE_BLOCK, lanes)


@inner
def _add_values(weights: Array, values: Array, start: int, last: int, keys: Array, average: Array) -> None:
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
    query: Array,
    keys: Array,
    values: Array,
    first: int,
    last: int,
    scale: np.float32,
    output: Array,
    sums: Array,
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
    lanes = np.empty(MAX_LANES, np.float32)
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
    query: Array,
    store: Array,
    lengths: Array,
    window: int,
    scale: np.float32,
    output: Array,
    sums: Array,
) -> None:
    """One new token per row: ``[N, Q, D]`` queries, ``[N]`` keys that each sees; `attend_rows` has the rest."""
    num_rows = len(query)
    num_keys = store.shape[2]
    groups = query.shape[1] // num_keys
    for unit in numba.prange(num_rows * num_keys):
        # head by head, so that every thread gets rows of all lengths
        n, h = unit % num_rows, unit // num_rows
        heads = slice(h * groups, (h + 1) * groups)
        keys, values = store[0, n, h], store[1, n, h]
        first = max(0, lengths[n] - window)
        _attend_head(
            query[n, heads], keys, values, first, lengths[n], scale, output[n, heads], sums[n, heads]
        )


_MANY_BLOCK = 384
"""Keys whose scores are held at once."""
_LOWEST = np.float32(-1e30)
"""Below every score that is a number."""


@inner
def _hide(scores: Array, first: int, count: int, places: Array, window: int) -> None:
    """Give keys behind a query, or beyond its window, a score of ``-inf``."""
    least, most = places.min(), places.max()
    for key in range(count):
        if first + key > least or first + key <= most - window:
            for column in range(TILE_COLUMNS):
                is_seen = places[column] - window < first + key <= places[column]
                scores[key, column] = scores[key, column] if is_seen else -np.inf


@inner
def _weigh_columns(scores: Array, count: int, tops: Array, totals: Array, average: Array) -> None:
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
    query: Array,
    store: Array,
    past: Array,
    window: int,
    scale: np.float32,
    output: Array,
    sums: Array,
) -> None:
    """Several: ``[B, T, Q, D]`` queries, ``[B]`` tokens that each row had before; `attend_rows` has the rest."""
    num_new, size, heads = query.shape[1], query.shape[3], store.shape[2]
    groups = query.shape[2] // heads
    blocks = -(-num_new * groups // TILE_COLUMNS)
    tile = 0, TILE_COLUMNS
    for unit in numba.prange(len(query) * heads * blocks):
        row, head, block = unit // (heads * blocks), unit // blocks % heads, unit % blocks
        keys, values = store[0, row, head].reshape(-1), store[1, row, head].reshape(-1)
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
            key_at, value_at = (first * size, size, 1), (first * size, 1, size)
            weights = scores.reshape(-1)
            add_rows(count, keys, key_at, asked.reshape(-1), tile, weights, tile, size, 0)
            _hide(scores, first, count, places, window)
            _weigh_columns(scores, count, tops, totals, average)
            add_rows(size, values, value_at, weights, tile, average.reshape(-1), tile, count, 1)
        for column in range(used):
            token, group = (begin + column) // groups, (begin + column) % groups
            sums[row, head * groups + group, token] = tops[column] + np.log(totals[column])
            found = output[row, token, head * groups + group]
            for i in range(size):
                found[i] = narrow(average[i, column] / totals[column], found[i])
