"""Attention of one new token per row.

Arrays are as in `viva.engine.compiled.layers`.

Shapes: ``N`` rows, ``Q`` query heads, ``K`` key-value heads, ``G = Q / K``, ``D`` head size, ``R`` rows of a store and
``L`` tokens that each has room for.
"""

from typing import Any

import numba
import numpy as np

from viva.engine.compiled.vectors import Kernel, exp, fetch, inner, narrow, widen

__all__ = ["attend_one"]

_BLOCK = 64
"""Keys whose scores are held at once. Stores have room for a multiple of it."""
_LANES = 16
"""Numbers that are compared at once."""


@inner
def _weigh_block(
    query: Any, keys: Any, values: Any, start: int, first: int, last: int, scores: Any, lanes: Any
) -> Any:
    """Scores of one query, ``[D]``, with a block of keys; returns the largest. Keys that are not seen get ``-inf``."""
    for j in range(_BLOCK):
        scores[j] = -np.inf
    for j in range(0, min(_BLOCK, last - start), 4):
        fetch(values, start + j, 4)
        s0 = s1 = s2 = s3 = np.float32(0)
        for i in range(len(query)):
            s0 += query[i] * widen(keys[start + j, i])
            s1 += query[i] * widen(keys[start + j + 1, i])
            s2 += query[i] * widen(keys[start + j + 2, i])
            s3 += query[i] * widen(keys[start + j + 3, i])
        scores[j], scores[j + 1], scores[j + 2], scores[j + 3] = s0, s1, s2, s3
    if start < first or start + _BLOCK > last:
        for j in range(_BLOCK):
            if start + j < first or start + j >= last:
                scores[j] = -np.inf
    lanes[:] = -np.inf
    for j in range(0, _BLOCK, _LANES):  # a maximum in one number would be one comparison after another
        for i in range(_LANES):
            lanes[i] = scores[j + i] if scores[j + i] > lanes[i] else lanes[i]
    return lanes.max()


@inner
def _add_values(weights: Any, values: Any, start: int, last: int, keys: Any, average: Any) -> None:
    """Add a block's values by their weights to ``[D]``."""
    for j in range(0, min(_BLOCK, last - start), 4):
        fetch(keys, start + _BLOCK + j, 4)
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
    scores = np.empty(_BLOCK, np.float32)
    lanes = np.empty(_LANES, np.float32)
    for start in range(first // _BLOCK * _BLOCK, last, _BLOCK):
        for g in range(groups):
            top = max(tops[g], _weigh_block(wide[g], keys, values, start, first, last, scores, lanes))
            shrunk = exp(tops[g] - top)
            tops[g] = top
            total = np.float32(0)
            for j in range(_BLOCK):
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
def attend_one(
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
