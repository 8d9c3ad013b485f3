"""Sequences that begin alike, packed into one row in which every shared prefix stands once, and attention over it.

The row is a prefix tree in depth-first order: sequences enter in ascending order, and each adds only what it does not
share with the one before it. A token's *depth* is its position in its sequence, its *path* the packed places of
everything before it. Along a path places ascend, so the paths of neighbours start alike. That is what cells
use: neighbouring tokens attend together to the part of the path that lies before all of them and, under a mask,
to one another. Small cells waste few masked entries, large ones few calls; a price says which is cheaper.

Every cell is one dense product with the keys on its path. Scores are not kept for the backward pass but computed again
there (as in Dao et al. 2022, arXiv 2205.14135), so memory grows with tokens, not with entries. All sums have a fixed
order: same inputs, same bits.

Shapes: ``N`` tokens of a sequence, ``S`` packed tokens, ``Q`` query heads, ``K`` key-value heads, ``G = Q / K``, ``D``
head size; of a cell ``n`` queries and ``L`` keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from viva.engine.attention import UnsupportedAttentionError
from viva.engine.kernels import TreePlan, attend_tree, can_compile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    """Number of leading tokens each sequence has in common with the one before it; 0 for the first."""
    shared = [0] * len(sequences)
    for index in range(1, len(sequences)):
        before, after = sequences[index - 1], sequences[index]
        size = min(len(before), len(after))
        differing = before[:size] != after[:size]
        shared[index] = int(differing.argmax()) if differing.any() else size
    return shared


def pack_tree(sequences: Sequence[np.ndarray], call_entries: float) -> PackedTree:
    """Pack sequences in ascending (lexicographic) order, ``[N]`` int64 each, into one row.

    A cell costs `call_entries` beside its entries, in entries.
    """
    paths: list[np.ndarray] = []
    runs: list[np.ndarray] = []
    pieces: list[_Piece] = []
    size = 0
    for sequence, shared in zip(sequences, shared_lengths(sequences), strict=True):
        num_new = len(sequence) - shared
        known = paths[-1][:shared] if paths else np.empty(0, dtype=np.int64)
        path = np.concatenate([known, np.arange(size, size + num_new)])
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
        # outside the cell this piece sees the first tokens of what the first one sees
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


TREE_ATTENTION = "viva_tree"


class TreeStep:
    """A packed tree during one forward pass: its tensors, and the masks that follow from it."""

    def __init__(self, tree: PackedTree, device: torch.device, read: np.ndarray | None = None) -> None:
        """A pass over a tree, whose hidden states are read at ascending places; at all if left out."""
        self.cells = tree.cells
        self.read_cells = range(len(tree.cells)) if read is None else _cells_at(tree, read)
        """Cells with queries at these places."""
        self.num_attended = 0
        self._device = device
        self._depths = torch.from_numpy(tree.depths).to(device)
        self._tokens = torch.from_numpy(tree.tokens).to(device)
        self._hidden: dict[tuple[int, int | None], tuple[int, torch.Tensor]] = {}
        self._plans: dict[int | None, TreePlan] = {}

    def forward(self, module: "PreTrainedModel", **given: object) -> torch.Tensor:
        """Hidden states after the final norm, ``[1, S, H]``, of a model whose attention is `TREE_ATTENTION`.

        Raises:
            UnsupportedAttentionError: The architecture does not use our attention.
        """
        output = module.get_decoder()(
            input_ids=self._tokens[None], position_ids=self._depths[None], use_cache=False, tree=self, **given
        )
        if not self.num_attended:
            raise UnsupportedAttentionError("its layers do not attend through the function chosen for them")
        return output.last_hidden_state

    def hidden(self, index: int, window: int | None) -> tuple[int, torch.Tensor]:
        """Keys that queries of cell ``index`` do not see: how many keys all of them see, and booleans of the rest.

        Returns:
            ``first`` and ``[n, L - first]``.
        """
        if (index, window) not in self._hidden:
            cell = self.cells[index]
            mask = ~torch.from_numpy(cell.visible).to(self._device)
            if window is not None:
                mask |= _gathered(self._depths, cell, 0) <= self._depths[cell.queries, None] - window
            columns = mask.any(dim=0)
            first = int(columns.int().argmax()) if columns.any() else len(columns)
            self._hidden[index, window] = first, mask[:, first:]
        return self._hidden[index, window]

    def plan(self, window: int | None) -> TreePlan:
        """The cells as the compiled kernels read them."""
        if window not in self._plans:
            hidden = [self.hidden(index, window) for index in range(len(self.cells))]
            self._plans[window] = TreePlan(self.cells, hidden)
        return self._plans[window]


def _cells_at(tree: PackedTree, places: np.ndarray) -> list[int]:
    """Cells that have a query among ascending places."""
    bounds = np.searchsorted(places, [(cell.queries.start, cell.queries.stop) for cell in tree.cells])
    return np.flatnonzero(bounds[:, 0] < bounds[:, 1]).tolist()


def tree_attention(
    module: "PreTrainedModel",
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    tree: TreeStep | None = None,
    cells: Sequence[int] | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention in the form ``transformers`` calls it: ``[1, Q, S, D]`` queries to ``[1, S, Q, D]`` output.

    Of some ``cells`` alone, if they are named: the others' output is 0.
    """
    if tree is None or attention_mask is not None or kwargs.get("s_aux") is not None:
        raise UnsupportedAttentionError(
            "this architecture calls its attention in a way the engine does not know"
        )
    tree.num_attended += 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    named = range(len(tree.cells)) if cells is None else cells
    if softcap is None and can_compile(query) and query.shape[-1] == value.shape[-1]:
        return attend_tree(query, key, value, tree.plan(sliding_window), named, scale), None
    groups = query.shape[1] // key.shape[1]
    output = _TreeAttention.apply(
        query[0].unflatten(0, (-1, groups)) * scale, key[0], value[0], tree, named, sliding_window, softcap
    )
    return output.flatten(0, 1).transpose(0, 1)[None].contiguous(), None  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


class _TreeAttention(torch.autograd.Function):
    """``[K, G, S, D]`` scaled queries and ``[K, S, D]`` keys and values to ``[K, G, S, D]`` output."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: TreeStep,
        cells: Sequence[int],
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        output = query.new_zeros(*query.shape[:-1], value.shape[-1])
        for index in cells:
            cell = step.cells[index]
            weights, _ = _weights(query, key, step, index, window, softcap)
            part = weights.to(value.dtype) @ _gathered(value, cell, 1)
            output[:, :, cell.queries] = part.view(*output.shape[:2], -1, output.shape[-1])
        ctx.save_for_backward(query, key, value, output)
        ctx.step, ctx.cells, ctx.window, ctx.softcap = step, cells, window, softcap
        return output

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output = ctx.saved_tensors
        grad = grad_outputs[0].contiguous()
        # the softmax's backward pass needs sum(weight * slope) of every query, which is output * gradient
        means = (grad * output).sum(dim=-1, dtype=torch.float32)
        grad_query = torch.zeros_like(query)
        grad_key = torch.zeros_like(key, dtype=torch.float32)
        grad_value = torch.zeros_like(value, dtype=torch.float32)
        for index in ctx.cells:
            cell = ctx.step.cells[index]
            weights, bend = _weights(query, key, ctx.step, index, ctx.window, ctx.softcap)
            keys, queries = _gathered(key, cell, 1), _folded(query, cell)
            slopes = _folded(grad, cell)
            scores = (slopes @ _gathered(value, cell, 1).mT).float()
            scores = scores.sub_(means[:, :, cell.queries].flatten(1)[..., None]).mul_(weights)
            if bend is not None:
                scores.mul_(bend)
            scores = scores.to(query.dtype)
            grad_query[:, :, cell.queries] = (scores @ keys).view(*query.shape[:2], -1, query.shape[-1])
            _scatter(grad_key, cell, scores.mT @ queries)
            _scatter(grad_value, cell, weights.to(value.dtype).mT @ slopes)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None, None


def _weights(
    query: torch.Tensor,
    key: torch.Tensor,
    step: TreeStep,
    index: int,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention weights of a cell, ``[K, G n, L]`` float32, and the slope of the soft cap where there is one."""
    cell = step.cells[index]
    scores = (_folded(query, cell) @ _gathered(key, cell, 1).mT).float()
    bend = None
    if softcap is not None:
        bounded = torch.tanh(scores / softcap)
        scores, bend = bounded * softcap, 1 - bounded**2
    first, hidden = step.hidden(index, window)
    by_group = scores.view(len(key), -1, len(hidden), scores.shape[-1])
    by_group[..., first:].masked_fill_(hidden, float("-inf"))
    return torch.softmax(scores, dim=-1), bend


def _folded(query: torch.Tensor, cell: Cell) -> torch.Tensor:
    """Queries of a cell as ``[K, G n, D]``: heads that share keys become queries of one head."""
    return query[:, :, cell.queries].flatten(1, 2)


def _gathered(tensor: torch.Tensor, cell: Cell, dim: int) -> torch.Tensor:
    """Slices of a tensor at a cell's keys, in their order, along ``dim``."""
    parts = [tensor.narrow(dim, part.start, part.stop - part.start) for part in cell.keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _scatter(total: torch.Tensor, cell: Cell, values: torch.Tensor) -> None:
    """Add ``[K, L, D]`` values to a cell's keys."""
    done = 0
    for part in cell.keys:
        size = part.stop - part.start
        total[:, part] += values[:, done : done + size]
        done += size
