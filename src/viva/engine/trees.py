"""Sequences that begin alike, packed into one row in which every shared beginning stands once.

The row is a prefix tree in depth-first order: sequences enter in ascending order, and each adds only what it does not
share with the one before it. A token's *depth* is its position in its sequence, its *path* the packed places of
everything before it. Along a path places ascend, so neighbours share a beginning of their paths. That is what cells
use: neighbouring tokens attend together to the part of the path that lies before all of them and, under a mask,
to one another. Small cells waste few masked entries, large ones few calls; a price says which is cheaper.

Shapes: ``N`` tokens of a sequence, ``S`` packed tokens, ``n`` queries and ``L`` keys of a cell.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

__all__ = ["Cell", "PackedTree", "pack_tree", "shared_lengths"]

_PIECE = 64
"""Most tokens of one sequence in a cell before cells are joined."""
_MAX_ENTRIES = 2**20
"""Most queries times keys in a cell of several tokens: its scores must fit into memory."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cell:
    """Neighbouring tokens whose attention is one product."""

    queries: slice
    """Their packed places."""
    keys: tuple[slice, ...]
    """Packed places of the keys in ascending order, ``L`` in all; the queries are the last ``n``."""
    visible: np.ndarray
    """``[n, L]`` booleans: the keys on each query's path, and itself."""

    @property
    def num_entries(self) -> int:
        """Scores computed, masked ones included."""
        return self.visible.size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedTree:
    """Several sequences in one row."""

    tokens: np.ndarray
    """``[S]`` int64."""
    depths: np.ndarray
    """``[S]`` int64 positions of the tokens in their sequences."""
    paths: tuple[np.ndarray, ...]
    """Per sequence ``[N]`` packed places of its tokens, ascending."""
    cells: tuple[Cell, ...]
    """Cover every packed token once, in order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    """Tokens ``first .. stop`` of a sequence, which stand in the row for the first time."""

    path: np.ndarray
    first: int
    stop: int

    @property
    def start(self) -> int:
        """Packed place of the first token."""
        return int(self.path[self.first])

    @property
    def size(self) -> int:
        return self.stop - self.first


def shared_lengths(sequences: Sequence[np.ndarray]) -> list[int]:
    """How many leading tokens each sequence has in common with the one before it; 0 for the first."""
    shared = [0] * len(sequences)
    for index in range(1, len(sequences)):
        before, after = sequences[index - 1], sequences[index]
        size = min(len(before), len(after))
        differing = before[:size] != after[:size]
        shared[index] = int(differing.argmax()) if differing.any() else size
    return shared


def pack_tree(sequences: Sequence[np.ndarray], call_entries: float) -> PackedTree:
    """Pack sequences into one row.

    Args:
        sequences: ``[N]`` int64 each, in ascending (lexicographic) order.
        call_entries: What a cell costs beside its entries, in entries.
    """
    paths: list[np.ndarray] = []
    runs: list[np.ndarray] = []
    pieces: list[_Piece] = []
    size = 0
    for sequence, shared in zip(sequences, shared_lengths(sequences), strict=True):
        num_new = len(sequence) - shared
        beginning = paths[-1][:shared] if paths else np.empty(0, dtype=np.int64)
        path = np.concatenate([beginning, np.arange(size, size + num_new)])
        runs.append(sequence[shared:])
        pieces += _pieces(path, shared)
        paths.append(path)
        size += num_new
    depths = np.empty(size, dtype=np.int64)
    for path in paths:
        depths[path] = np.arange(len(path))
    return PackedTree(
        tokens=np.concatenate(runs),
        depths=depths,
        paths=tuple(paths),
        cells=tuple(_make_cell(group) for group in _joined(pieces, call_entries)),
    )


def _pieces(path: np.ndarray, first: int) -> list[_Piece]:
    found: list[_Piece] = []
    while first < len(path):
        length = min(_PIECE, max(1, _MAX_ENTRIES // (first + _PIECE)))
        stop = min(len(path), first + length)
        found.append(_Piece(path=path, first=first, stop=stop))
        first = stop
    return found


def _joined(pieces: Sequence[_Piece], call_entries: float) -> list[list[_Piece]]:
    """Neighbouring pieces put into one cell wherever that costs less."""
    groups: list[list[_Piece]] = []
    size = 0
    for piece in pieces:
        alone = piece.size * piece.stop
        if groups:
            before = groups[-1][0].first
            apart = size * (before + size) + alone + call_entries
            together = (size + piece.size) * (before + size + piece.size)
            if together <= min(apart, _MAX_ENTRIES):
                groups[-1].append(piece)
                size += piece.size
                continue
        groups.append([piece])
        size = piece.size
    return groups


def _make_cell(pieces: Sequence[_Piece]) -> Cell:
    start, stop = pieces[0].start, pieces[-1].start + pieces[-1].size
    outside = pieces[0].path[: pieces[0].first]
    visible = np.zeros((stop - start, len(outside) + stop - start), dtype=bool)
    for piece in pieces:
        rows = slice(piece.start - start, piece.start - start + piece.size)
        # what this piece sees outside the cell is a beginning of what the first one sees
        num_outside = int(np.searchsorted(piece.path, start))
        visible[rows, :num_outside] = True
        visible[rows, len(outside) + piece.path[num_outside : piece.first] - start] = True
        own = slice(len(outside) + rows.start, len(outside) + rows.stop)
        visible[rows, own] = np.tri(piece.size, dtype=bool)
    return Cell(
        queries=slice(start, stop),
        keys=_stretches(np.concatenate([outside, np.arange(start, stop)])),
        visible=visible,
    )


def _stretches(places: np.ndarray) -> tuple[slice, ...]:
    """Ascending places as slices."""
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    bounds = [0, *breaks.tolist(), len(places)]
    return tuple(slice(int(places[first]), int(places[stop - 1]) + 1) for first, stop in pairwise(bounds))
