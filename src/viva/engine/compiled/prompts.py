"""Attention of several new tokens per row to the row's own keys.

Queries are columns and keys rows of a product, so that keys and values are read as they lie, and the softmax of a query
runs along its column. A block of keys is used and forgotten under a running softmax (Milakov and Gimelshein 2018,
arXiv 1805.02867).

Shapes: ``B`` rows of ``T`` new tokens, ``Q`` query heads, ``K`` key-value heads, ``G = Q / K``, ``D`` head size, ``R``
rows of a store and ``L`` tokens that each has room for; ``W`` columns of a tile.
"""

from typing import Any

import numba
import numpy as np

from viva.engine.compiled.tiles import TILE_COLUMNS, TILE_ROWS, add_rest, add_tile
from viva.engine.compiled.vectors import Kernel, exp, inner, narrow, widen

__all__ = ["attend_many"]

_BLOCK = 384
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
def _weigh(scores: Any, count: int, tops: Any, totals: Any, average: Any) -> None:
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
def attend_many(
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
        scores = np.empty((_BLOCK, TILE_COLUMNS), np.float32)
        average = np.zeros((size, TILE_COLUMNS), np.float32)
        tops = np.full(TILE_COLUMNS, _LOWEST, np.float32)
        totals = np.zeros(TILE_COLUMNS, np.float32)
        stop = places[TILE_COLUMNS - 1] + 1
        for first in range(max(0, places[0] + 1 - window), stop, _BLOCK):
            count = min(_BLOCK, stop - first)
            _multiply(keys, (first * size, size, 1), count, asked.reshape(-1), scores.reshape(-1), size, 0)
            _hide(scores, first, count, places, window)
            _weigh(scores, count, tops, totals, average)
            _multiply(
                values, (first * size, 1, size), size, scores.reshape(-1), average.reshape(-1), count, 1
            )
        for column in range(used):
            token, group = (begin + column) // groups, (begin + column) % groups
            sums[row, head * groups + group, token] = tops[column] + np.log(totals[column])
            found = output[row, token, head * groups + group]
            for i in range(size):
                found[i] = narrow(average[i, column] / totals[column], found[i])
