"""Attention of new tokens to their row's own keys, one per row or several, and to those of a prefix that rows share.

Of several tokens that see the same keys, queries are columns and keys rows of a product, so that keys and values are
read as they lie, and the softmax of a query runs along its column. A block of keys is used and forgotten under a
running softmax (Milakov and Gimelshein 2018, arXiv 1805.02867). The averages over a prefix and over a row's own keys
become one by their sums of weights (Juravsky et al. 2024, arXiv 2402.05099). On processors with AMX both products of
bfloat16 are made by its matrices, whose sums are float32; weights are rounded to bfloat16 before they meet the values.

Shapes: ``B`` rows of ``T`` new tokens, ``Q`` query heads, ``K`` key-value heads, ``G = Q / K``, ``D`` head size, ``R``
rows of a store and ``L`` tokens that each has room for; ``W`` columns of a tile; ``N`` rows of one new token; ``P``
prefixes.
"""

from collections.abc import Sequence

import numba
import numpy as np
import torch

from viva.engine.kernels.averages import Turned, average, turned_values, uses_matrices
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
    numbers_at,
    widen,
)
from viva.engine.kernels.tile import TILE_COLUMNS

_EVERYTHING = 2**62


class SharedKeys:
    """Prefixes that rows share, for the layers of one pass.

    Args:
        states: Keys and values of each prefix by layer, ``[2, K, L, D]``, of which ``[L, D]`` is contiguous. They must
            be kept.
        rows: The rows that begin with each prefix.
        positions: Of the rows' new tokens in their whole sequences, ``[B, T]``.
        groups: ``G``.
    """

    def __init__(
        self,
        states: Sequence[Sequence[torch.Tensor]],
        rows: Sequence[Sequence[int]],
        positions: torch.Tensor,
        groups: int,
    ) -> None:
        self.places = np.array(
            [
                [(each.data_ptr(), each.shape[2], *each.stride()[:2]) for each in layer]
                for layer in zip(*states, strict=True)
            ]
        )
        """Address, number of tokens, and the distances of values from keys and of heads, ``[layers, P, 4]``."""
        new = np.arange(positions.shape[1])
        tokens = [(np.array(each)[:, None] * len(new) + new).flatten() for each in rows]
        found, where = np.concatenate(tokens), positions.numpy().reshape(-1)
        self.tokens = np.stack([found, where[found]], axis=1)
        """Places of the tokens of each prefix in ``[B, T]``, and in their whole sequences, ``[.., 2]``."""
        self.least = np.array([where[each].min() for each in tokens])
        """The first of these in their sequences, by prefix."""
        ends = np.cumsum([len(each) * groups for each in tokens])
        self.tiles = np.array(
            [
                (prefix, first, min(first + TILE_COLUMNS, end))
                for prefix, (each, end) in enumerate(zip(tokens, ends.tolist(), strict=True))
                for first in range(end - len(each) * groups, end, TILE_COLUMNS)
            ]
        )
        """Prefix, first query and end of each tile, ``[.., 3]``; a token has ``G`` queries for each head of keys."""


def attend_rows(
    query: torch.Tensor,
    store: torch.Tensor,
    lengths: Array,
    scale: float,
    window: int | None,
    shared: SharedKeys | None = None,
    layer: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last tokens of rows to their row's own keys up to themselves, and to prefixes before these.

    Args:
        query: ``[B, Q, T, D]``.
        store: ``[2, R, K, L, D]``, whose first ``B`` rows these are.
        lengths: Keys that each row has, ``[B]``.
        scale: Of the scores.
        window: Keys that are seen, counting back from the query's own.
        shared: Prefixes of the rows, if there are any.
        layer: Whose states of the prefixes are read.

    Returns:
        Averages of values, ``[B, Q, T, D]``, and logarithms of the sums of weights of own keys, ``[B, Q, T]`` float32.
    """
    seen, factor = _EVERYTHING if window is None else window, np.float32(scale)
    asked = query.transpose(1, 2).contiguous()
    output, sums = torch.empty_like(asked), torch.empty(query.shape[:3])
    num_new, keys = query.shape[2], as_array(store)
    by_matrices = uses_matrices(query, scale)
    if num_new == 1:
        found, logsums = output[:, 0], sums[:, :, 0]
        _attend_one(as_array(asked[:, 0]), keys, lengths, seen, factor, as_array(found), logsums.numpy())
    else:
        past = lengths - num_new
        first = past + 1 - seen
        turned = turned_values(_own_values(store, lengths, first), query) if by_matrices else None
        given = as_array(asked), keys, turned, past
        _attend_many(*given, seen, factor, as_array(output), sums.numpy())
    if shared is not None:
        prefixes, heads = shared.places[layer], keys.shape[2]
        first = shared.least + 1 - seen
        turned = turned_values(_shared_values(prefixes, heads, first, query), query) if by_matrices else None
        given = as_array(asked), heads, prefixes, turned, shared.tiles, shared.tokens
        _add_shared(*given, seen, factor, as_array(output), sums.numpy())
    return output.transpose(1, 2), sums


def _own_values(store: torch.Tensor, lengths: Array, first: Array) -> Array:
    """Addresses of the values of rows by heads, how many they have, and the first that is seen, ``[B K, 3]``."""
    values, rows = store[1], np.arange(len(lengths))[:, None]
    away = rows * values.stride(0) + np.arange(values.shape[1]) * values.stride(1)
    return _places(values.data_ptr() + store.element_size() * away, lengths[:, None], first[:, None])


def _shared_values(prefixes: Array, heads: int, first: Array, like: torch.Tensor) -> Array:
    """The same of prefixes, ``[P K, 3]``."""
    address, length, values_at, heads_at = prefixes.T[:, :, None]
    addresses = address + like.element_size() * (values_at + np.arange(heads) * heads_at)
    return _places(addresses, length, first[:, None])


def _places(addresses: Array, lengths: Array, first: Array) -> Array:
    parts = np.broadcast_arrays(addresses, lengths, np.maximum(0, first))
    return np.stack(parts, axis=-1).reshape(-1, 3)


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


@Kernel
def _attend_many(
    query: Array,
    store: Array,
    turned: Turned | None,
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
    for unit in numba.prange(len(query) * heads * blocks):
        row, head, block = unit // (heads * blocks), unit // blocks % heads, unit % blocks
        keys, values = store[0, row, head].reshape(-1), store[1, row, head].reshape(-1)
        begin = block * TILE_COLUMNS
        used = min(TILE_COLUMNS, num_new * groups - begin)
        asked = np.empty((TILE_COLUMNS, size), query.dtype)
        seen = np.empty((2, TILE_COLUMNS), np.int64)
        for column in range(TILE_COLUMNS):
            token, group = (begin + min(column, used - 1)) // groups, (begin + min(column, used - 1)) % groups
            place = past[row] + token
            seen[0, column], seen[1, column] = max(0, place + 1 - window), place
            asked[column] = query[row, token, head * groups + group]
        averages = np.empty((TILE_COLUMNS, size), np.float32)
        tops, totals = weights = np.empty((2, TILE_COLUMNS), np.float32)
        average(turned, row * heads + head, keys, values, asked, seen, scale, weights, averages)
        for column in range(used):
            token, group = (begin + column) // groups, (begin + column) % groups
            sums[row, head * groups + group, token] = tops[column] + np.log(totals[column])
            found = output[row, token, head * groups + group]
            for i in range(size):
                found[i] = narrow(averages[column, i], found[i])


@Kernel
def _add_shared(
    query: Array,
    heads: int,
    prefixes: Array,
    turned: Turned | None,
    tiles: Array,
    tokens: Array,
    window: int,
    scale: np.float32,
    output: Array,
    sums: Array,
) -> None:
    """Turn averages over own keys, ``[B, T, Q, D]``, into those over a prefix's, too; `SharedKeys` has the rest."""
    num_new, size = query.shape[1], query.shape[3]
    groups = query.shape[2] // heads
    for unit in numba.prange(len(tiles) * heads):
        head = unit % heads
        prefix, begin, end = tiles[unit // heads]
        address, length, values_at, heads_at = prefixes[prefix]
        address += query.itemsize * head * heads_at
        keys = numbers_at(address, length * size, query)
        values = numbers_at(address + query.itemsize * values_at, length * size, query)
        width = TILE_COLUMNS if end - begin > TILE_COLUMNS // 2 else TILE_COLUMNS // 2
        asked = np.empty((width, size), query.dtype)
        seen = np.empty((2, width), np.int64)
        for column in range(width):
            number = min(begin + column, end - 1)
            (token, place), asker = tokens[number // groups], head * groups + number % groups
            seen[0, column], seen[1, column] = max(0, place + 1 - window), min(place, length - 1)
            asked[column] = query[token // num_new, token % num_new, asker]
        averages = np.empty((width, size), np.float32)
        tops, totals = weights = np.empty((2, width), np.float32)
        average(turned, prefix * heads + head, keys, values, asked, seen, scale, weights, averages)
        for column in range(end - begin):
            token, asker = tokens[(begin + column) // groups, 0], head * groups + (begin + column) % groups
            row, place = token // num_new, token % num_new
            if totals[column] != 0:  # it sees some of them
                own = sums[row, asker, place] - tops[column] - np.log(totals[column])
                share = np.float32(1) / (np.float32(1) + exp(own))
                found = output[row, place, asker]
                for i in range(size):
                    before = widen(found[i])
                    found[i] = narrow(before + share * (averages[column, i] - before), found[i])
