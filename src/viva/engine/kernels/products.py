"""Products of tokens with weights, and with low-rank adapters, which are added to them.

The outputs of a weight are divided into tiles, whose numbers are stored in the order in which they are read. A few
tokens cost what reading them once from memory costs. An output's sum has the same order however many tokens there are.

One call adds the adapters of all rows of a batch, wherever the rows of an adapter lie. It reads an adapter's numbers
once for up to 32 tokens.

Shapes: ``n`` tokens of ``I`` inputs and ``O`` outputs; ``P`` layers side by side that read the same input; an adapter
has rank ``r`` in each of them, ``R`` in all; ``N`` adapters.
"""

from collections.abc import Sequence

import numba
import numpy as np
import torch
from torch.nn.functional import pad

from viva.engine.kernels.compiler import Array, Kernel, as_array, as_rows, inner, narrow, numbers_at, widen
from viva.engine.kernels.tile import HAS_PAIRS, LANES, TILE_COLUMNS, add_rows, add_tile

_CHUNK = 32
"""Tokens of an adapter that are computed together."""
_DOTS = 4
"""Sums over the inputs that are computed together of one token."""
_RUN = 8
"""Neighbouring tiles of outputs that are computed together of one token."""
_ROWS = 48
"""Tokens whose sums of a tile are computed together."""
_INPUTS = 256
"""Inputs whose products are summed before that sum is added to those before: a sum of thousands loses digits."""
_BYTES = 4


class LowRank:
    """An adapter's factors for layers side by side, in the order in which they are read.

    Args:
        factors: ``[r, I]`` and ``[O, r]`` of each layer, ``None`` where it is not adapted.
        scale: Of the products.
    """

    def __init__(self, factors: Sequence[tuple[torch.Tensor, torch.Tensor] | None], scale: float) -> None:
        pairs = [pair for pair in factors if pair is not None]
        down = torch.cat([pair[0].float() for pair in pairs])
        parts = [pad(down, (0, 0, 0, -len(down) % _DOTS)).flatten()]
        parts += [tiled(pair[1].float() * scale) for pair in pairs]
        self._numbers = torch.cat(parts)
        ends = np.cumsum([len(part) for part in parts])
        begins = iter(self._numbers.data_ptr() + _BYTES * ends)
        self.record = [self._numbers.data_ptr(), len(down)]
        """Address of ``[R, I]``, and ``R``; for each layer the address of its tiles, its first rank, and its ``r``."""
        first = 0
        for pair in factors:
            rank = 0 if pair is None else len(pair[0])
            self.record += [int(next(begins)) if rank else 0, first, rank]
            first += rank


def can_multiply(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether `multiply` takes such a weight with inputs of a type: both bfloat16 where the processor has pairs."""
    if dtype == torch.bfloat16:
        return weight.dtype == dtype and HAS_PAIRS and weight.shape[1] % 2 == 0
    return weight.dtype in (torch.float32, torch.bfloat16)


def tiled(weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``[O, I]`` as a matrix for each tile of outputs, the last one filled up with zeros, flat, for inputs of a type.

    The matrix has a row for each input. Of bfloat16 a word holds two numbers: for inputs of bfloat16 those of a pair of
    inputs, for float32 those of two outputs, which become two vectors by one operation each.
    """
    missing = -len(weight) % TILE_COLUMNS
    filled = pad(weight, (0, 0, 0, missing)) if missing else weight
    if weight.dtype != dtype:
        halves = filled.reshape(-1, 2, LANES, weight.shape[1]).transpose(1, 2)
        filled = halves.reshape(len(filled), -1)
    words = filled.view(torch.int32) if dtype == torch.bfloat16 else filled
    rows = words.reshape(-1, TILE_COLUMNS, words.shape[1])
    return rows.transpose(1, 2).flatten().view(weight.dtype)


def multiply(inputs: torch.Tensor, tiles: torch.Tensor, outputs: torch.Tensor, *, keep: bool) -> None:
    """Products of tokens with a weight.

    Args:
        inputs: ``[..., I]`` float32 or bfloat16, contiguous.
        tiles: The weight, by `tiled` for such inputs.
        outputs: ``[..., O]``, as the inputs; written to.
        keep: Whether products are added to what the outputs hold.
    """
    pair = 1 if inputs.dtype == torch.float32 else 2
    _multiply(as_rows(inputs), as_array(tiles), as_rows(outputs), pair, int(keep))


@Kernel
def _multiply(inputs: Array, tiles: Array, outputs: Array, pair: int, keep: int) -> None:
    """`multiply` of matrices; sums are float32 until all products are added, those of `_INPUTS` inputs first."""
    num_rows, size = inputs.shape
    width = outputs.shape[1]
    flat = inputs.reshape(-1)
    for tile in numba.prange(-(-width // TILE_COLUMNS)):
        first = tile * TILE_COLUMNS
        columns = min(TILE_COLUMNS, width - first)
        sums = np.empty((min(_ROWS, num_rows), TILE_COLUMNS), np.float32)
        part = np.empty(sums.size, np.float32)
        for begin in range(0, num_rows, _ROWS):
            count = min(_ROWS, num_rows - begin)
            total = sums[:count].reshape(-1)
            total[:] = 0
            for start in range(0, size, _INPUTS):
                left = (begin * size + start, size, pair)
                right = (first * size + start * TILE_COLUMNS, pair * TILE_COLUMNS)
                number = min(_INPUTS, size - start) // pair
                add_rows(count, flat, left, tiles, right, part, (0, TILE_COLUMNS), number, 0)
                for i in range(len(total)):
                    total[i] += part[i]
            for row in range(count):
                found, there = sums[row], outputs[begin + row, first : first + columns]
                for column in range(columns):
                    before = widen(there[column]) if keep else np.float32(0)
                    there[column] = narrow(before + found[column], there[column])


def records_of(adapters: Sequence[LowRank | None], num_layers: int) -> Array:
    """The adapters as `add_low_rank` takes them, some of which do not adapt these layers: ``[N, 2 + 3 P]``.

    It tells where their numbers lie, so they must be kept.
    """
    nothing = [0] * (2 + 3 * num_layers)
    return np.array([nothing if each is None else each.record for each in adapters], dtype=np.int64)


def tiles_of(sizes: Sequence[int]) -> Array:
    """Layer of each tile of outputs, its number there, first column in all, and number of columns, ``[.., 4]``."""
    found: list[tuple[int, int, int, int]] = []
    begin = 0
    for layer, size in enumerate(sizes):
        for number, first in enumerate(range(0, size, TILE_COLUMNS)):
            found.append((layer, number, begin + first, min(TILE_COLUMNS, size - first)))
        begin += size
    return np.array(found, dtype=np.int64)


def chunks_of(counts: Sequence[int]) -> Array:
    """Adapter, first token and end of all that is computed together, ``[.., 3]``, by tokens of each adapter."""
    found: list[tuple[int, int, int]] = []
    begin = 0
    for adapter, count in enumerate(counts):
        end = begin + count
        found += [(adapter, first, min(first + _CHUNK, end)) for first in range(begin, end, _CHUNK)]
        begin = end
    return np.array(found, dtype=np.int64)


def add_low_rank(
    outputs: torch.Tensor, inputs: torch.Tensor, records: Array, tiles: Array, chunks: Array, order: Array
) -> None:
    """Add low-rank products to outputs of layers side by side.

    Args:
        outputs: ``[..., O]`` float32, contiguous; written to.
        inputs: ``[..., I]``, as the outputs.
        records: By `records_of`.
        tiles: By `tiles_of`.
        chunks: By `chunks_of`.
        order: The tokens, those of an adapter behind one another, ``[n]``.
    """
    _add_low_rank(as_rows(outputs), as_rows(inputs), records, tiles, chunks, order)


@inner
def _reduce(inputs: Array, order: Array, down: Array, sums: Array) -> None:
    """Sums over the inputs of some tokens, ``[n, _DOTS]``, by as many rows of the first factor, two by two."""
    for token in range(0, len(order), 2):
        other = min(token + 1, len(order) - 1)
        one, two = inputs[order[token]], inputs[order[other]]
        a0 = a1 = a2 = a3 = np.float32(0)
        b0 = b1 = b2 = b3 = np.float32(0)
        for i in range(inputs.shape[1]):
            a0 += one[i] * down[0, i]
            a1 += one[i] * down[1, i]
            a2 += one[i] * down[2, i]
            a3 += one[i] * down[3, i]
            b0 += two[i] * down[0, i]
            b1 += two[i] * down[1, i]
            b2 += two[i] * down[2, i]
            b3 += two[i] * down[3, i]
        sums[token, 0], sums[token, 1], sums[token, 2], sums[token, 3] = a0, a1, a2, a3
        sums[other, 0], sums[other, 1], sums[other, 2], sums[other, 3] = b0, b1, b2, b3


@inner
def _add_tile(sums: Array, first: int, up: Array, outputs: Array, place: int, columns: int) -> None:
    """Add a tile's numbers, ``[r, TILE_COLUMNS]`` weighed by ``r`` sums, to outputs from a place on."""
    ranks = len(up) // TILE_COLUMNS
    if columns == TILE_COLUMNS:
        add_tile(1, sums, (first, 0, 1), up, (0, TILE_COLUMNS), outputs, (place, 0), ranks, 1)
    else:
        for rank in range(ranks):
            for column in range(columns):
                outputs[place + column] += sums[first + rank] * up[rank * TILE_COLUMNS + column]


@Kernel
def _add_low_rank(
    outputs: Array, inputs: Array, records: Array, tiles: Array, chunks: Array, order: Array
) -> None:
    """`add_low_rank` of matrices."""
    size = inputs.shape[1]
    blocks = -(-records[:, 1].max() // _DOTS)
    sums = np.empty((len(order), blocks * _DOTS), np.float32)
    for unit in numba.prange(len(chunks) * blocks):
        adapter, begin, end = chunks[unit // blocks]
        rank = unit % blocks * _DOTS
        if rank < records[adapter, 1]:
            down = numbers_at(records[adapter, 0] + _BYTES * rank * size, _DOTS * size, sums)
            _reduce(inputs, order[begin:end], down.reshape(_DOTS, size), sums[begin:end, rank : rank + _DOTS])
    flat, result, width = sums.reshape(-1), outputs.reshape(-1), sums.shape[1]
    runs = -(-len(tiles) // _RUN)
    for unit in numba.prange(len(chunks) * runs):
        adapter, begin, end = chunks[unit // runs]
        run = unit % runs * _RUN
        for token in range(begin, end):
            for tile in range(run, min(run + _RUN, len(tiles))):
                layer, number, column, columns = tiles[tile]
                address, first, ranks = records[adapter, 2 + 3 * layer : 5 + 3 * layer]
                if ranks:
                    count = ranks * TILE_COLUMNS
                    up = numbers_at(address + _BYTES * number * count, count, sums)
                    _add_tile(
                        flat,
                        token * width + first,
                        up,
                        result,
                        order[token] * outputs.shape[1] + column,
                        columns,
                    )
