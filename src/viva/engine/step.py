"""One forward pass of rows of different lengths: where their tokens are, which masks follow, which prefixes they share.

Rows that share a stored prefix attend by one product with the one copy of it and one with their own tokens. Each gives
an average of values and the logarithm of its sum of weights, from which the average over both follows (Juravsky et al.
2024, arXiv 2402.05099). Nothing is approximated.

Shapes: ``B`` rows, ``T`` new tokens per row, ``L`` keys, ``Q`` query heads, ``K`` key-value heads, ``G = Q / K``, ``D``
head size; ``n`` rows that share a prefix of ``L`` tokens.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from viva.engine.kernels import SharedKeys, as_array

_MOST_ENTRIES = 2**20
"""Scores per head that are held at once."""
_HIDDEN = -1e30
"""Added to the scores of a shared prefix's keys that a query does not see. It is finite, so that a query that sees
none of them has numbers there, too; they weigh nothing beside those of its own tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedPrefix:
    """Keys and values of a prefix that running sequences share."""

    digest: bytes
    """Digest of the last block, see `block_digests`."""
    states: list[torch.Tensor]
    """Keys and values, ``[2, K, L, D]`` per layer."""
    length: int

    def bias(
        self, positions: torch.Tensor, most_own: int, groups: int, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """The bias that hides keys from queries at ``[n, T]``, ``[1, 1, n G T, L]``; ``None`` if they see all.

        Rows have at most ``most_own`` tokens of their own. This is known without asking the device.
        """
        if window is None or self.length + most_own <= window:
            return None
        first = positions - window + 1
        mask = torch.arange(self.length, device=positions.device) < first[..., None]
        hidden = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, _HIDDEN)
        return hidden[:, None].expand(-1, groups, -1, -1).reshape(1, 1, -1, self.length)


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Neighbouring rows that attend together."""

    rows: slice
    length: int
    """Number of the longest row's own tokens."""
    prefixes: list[tuple[slice | torch.Tensor, SharedPrefix | None]]
    """Beginnings, each with the rows that have it (or that have none), counted from the part's first."""


def make_parts(
    groups: Sequence[tuple[slice, int]],
    prefixes: Sequence[SharedPrefix | None],
    num_new: int,
    device: torch.device,
) -> list[Part]:
    """Cut groups of rows, each with its longest length, where they would need too much memory."""
    deepest = max(0 if prefix is None else prefix.length for prefix in prefixes)
    parts: list[Part] = []
    for rows, length in groups:
        size = max(1, _MOST_ENTRIES // (num_new * (deepest + length)))
        for first in range(rows.start, rows.stop, size):
            last = min(first + size, rows.stop)
            picked = [
                (_pick(indices, device), prefix) for prefix, indices in _by_prefix(prefixes[first:last])
            ]
            parts.append(Part(rows=slice(first, last), length=length, prefixes=picked))
    return parts


def _by_prefix(prefixes: Sequence[SharedPrefix | None]) -> Collection[tuple[SharedPrefix | None, list[int]]]:
    """Each of the prefixes, and the rows that have it."""
    found: dict[int, tuple[SharedPrefix | None, list[int]]] = {}
    for row, prefix in enumerate(prefixes):
        found.setdefault(id(prefix), (prefix, []))[1].append(row)
    return found.values()


def two_part_attention(
    query: torch.Tensor,
    own: Callable[[Part], tuple[torch.Tensor, torch.Tensor]],
    parts: Sequence[Part],
    layer: int,
    positions: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of rows of which some share prefixes: as many averages as queries, ``[B, K, G T, D]``.

    Those that share keys are queries of one head. `own` gives the averages over the tokens of a part's rows themselves,
    ``[n, K, G T, D]``, which are changed here, and logarithms of the sums of weights, ``[n, K, G T]``. `layer` is the
    index of the prefixes' states, the queries' positions are ``[B, T]``; see `attend` for the others.
    """
    groups = query.shape[2] // positions.shape[1]
    outputs: list[torch.Tensor] = []
    for part in parts:
        mine, queried = query[part.rows], positions[part.rows]
        output, sums = own(part)
        for picked, prefix in part.prefixes:
            if prefix is None:
                continue
            keys, values = prefix.states[layer][:, None].unbind()
            asking = mine[picked].transpose(0, 1)
            unseen = prefix.bias(queried[picked], part.length, groups, window, query.dtype)
            begun, begun_sums = average(asking.flatten(1, 2)[None], keys, values, unseen, scaling, softcap)
            begun = begun[0].unflatten(1, asking.shape[1:3]).transpose(0, 1)
            begun_sums = begun_sums[0].unflatten(1, asking.shape[1:3]).transpose(0, 1)
            share = torch.sigmoid(begun_sums - sums[picked])[..., None].to(output.dtype)
            mixed = output[picked].lerp_(begun, share)
            if not isinstance(picked, slice):  # a slice is a view, which was changed in its place
                output[picked] = mixed
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def average(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Averages of values and logarithms of the sums of weights, in float32.

    Queries are ``[R, K, N, D]``, keys and values ``[R, K, L, D]``. `bias`, ``[R, 1, N or 1, L]``, is added to the
    scores.
    """
    if softcap is None and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
        kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return kernel(query, key, value, attn_mask=bias, scale=scaling)
    scores = torch.matmul(query * scaling, key.mT).float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores += bias
    weights = torch.softmax(scores, dim=-1)
    # of any key, the logarithm of the sum of weights is its score less the logarithm of its share
    sums = scores.amax(dim=-1) - weights.amax(dim=-1).log()
    return torch.matmul(weights.to(value.dtype), value), sums


def _pick(indices: list[int], device: torch.device) -> slice | torch.Tensor:
    """A slice, which needs no copies, where the indices follow one another."""
    if indices[-1] - indices[0] == len(indices) - 1:
        return slice(indices[0], indices[-1] + 1)
    return torch.tensor(indices, device=device)


_GROUP_ROWS = 16
_GROUP_GAIN = 0.85
"""Rows attend in groups of this size if that saves this much of the work."""
_FIXED_LENGTH = 64
"""Lengths that are fixed are multiples of this."""


class RaggedStep:
    """The rows that a forward pass works on, and the masks that follow from it."""

    def __init__(
        self,
        past: Sequence[int],
        num_new: int,
        device: torch.device,
        prefixes: Sequence[SharedPrefix | None],
        *,
        is_fixed: bool = False,
    ) -> None:
        """A pass of a store's first rows, which have `past` tokens of their own and get ``T`` new ones each.

        Without `prefixes` they share none. With `is_fixed` all that follows from the lengths is computed on the device,
        and stays right when the rows `move` on, as long as `attended_groups` stay the same.
        """
        self.num_rows = len(past)
        self.num_new = num_new
        self.groups = attended_groups(past, num_new, is_fixed=is_fixed)
        self.length = max(length for _, length in self.groups)
        self.uniform_past = past[0] if min(past) == max(past) and not is_fixed else None
        self.lengths = np.array(past) + num_new
        self._device = device
        self._prefixes = prefixes
        self._ends: Any = None
        self.layer = 0
        self.store = torch.empty(0)
        """Keys and values of the layer at work."""
        self.places = torch.tensor(past, device=device)[:, None] + torch.arange(num_new, device=device)
        """Places of the new tokens among their row's own."""
        self.positions = self.places
        self._parts: list[Part] | None = None
        self._depths = None
        if any(prefix is not None for prefix in prefixes):
            depths = [0 if prefix is None else prefix.length for prefix in prefixes]
            self._depths = torch.tensor(depths, device=device)[:, None]
            self.positions = self.places + self._depths
        self.begin()

    def begin(self) -> None:
        """Start a pass: nothing is stored yet, and what follows from the places is computed when first asked for."""
        self.num_stored = 0
        self.num_attended = 0
        self._masks: dict[int | None, torch.Tensor | None] = {}
        self._biases: dict[tuple[int | None, int], torch.Tensor | None] = {}
        self._rotation: tuple[np.ndarray, np.ndarray] | None = None
        self._where: tuple[np.ndarray, np.ndarray] | None = None
        self._shared: dict[int, SharedKeys] = {}
        self._slots: dict[torch.Size, torch.Tensor] = {}

    def move(self, past: Sequence[int]) -> None:
        """Let the rows of a fixed step have this many tokens, in the same memory."""
        self.lengths = np.array(past) + self.num_new
        new = torch.arange(self.num_new)
        self.places.copy_(torch.tensor(past)[:, None] + new)
        if self._depths is not None:
            torch.add(self.places, self._depths, out=self.positions)

    def read_ends(self, ends: Sequence[int]) -> None:
        """Let nobody read hidden states but those of one new token of each row, counted from its first."""
        self._ends = torch.tensor(ends, device=self._device)

    @property
    def reads_ends(self) -> bool:
        """Whether the hidden states of one new token of each row are all that is read."""
        return self._ends is not None

    def at_ends(self, states: torch.Tensor) -> torch.Tensor:
        """``[B, T, ...]`` of all new tokens to ``[B, 1, ...]`` of those that are read."""
        return states[torch.arange(self.num_rows, device=self._device), self._ends][:, None]

    def step_of_ends(self) -> "RaggedStep":
        """The step that attends in place of this one where only ends do: one new token per row, the others known."""
        step = RaggedStep(self.places[:, 0].add(self._ends).tolist(), 1, self._device, self._prefixes)
        step.layer, step.store = self.layer, self.store
        self.num_attended += 1
        return step

    def causal(self, window: int | None) -> bool:
        """Whether this is plain causal attention of whole prompts, for which there are faster kernels."""
        return self.num_new > 1 and self.uniform_past == 0 and (window is None or self.length <= window)

    def mask(self, window: int | None) -> torch.Tensor | None:
        """The keys of its own row that each query sees, ``[B, 1, T, L]``, or ``None`` for all of them."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def bias(self, window: int | None, dtype: torch.dtype, heads: int = 1) -> torch.Tensor | None:
        """The mask as what is added to scores, since every call of torch's attention would make it anew.

        The queries of `heads`, one head after another, are those of one head: ``[B, 1, heads * T, L]``. One token's row
        serves any number.
        """
        if (window, heads) not in self._biases:
            bias = mask = self.mask(window)
            if mask is not None:
                bias = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))
                bias = bias.repeat(1, 1, 1 if self.num_new == 1 else heads, 1)
            self._biases[window, heads] = bias
        return self._biases[window, heads]

    def slots(self, shape: torch.Size) -> torch.Tensor:
        """Places of the new tokens' keys in a store of this shape, in order of (row, token, head): ``[B T K]``."""
        if shape not in self._slots:
            _, _, heads, length, _ = shape
            rows = torch.arange(self.num_rows, device=self._device)[:, None, None]
            each = torch.arange(heads, device=self._device)
            self._slots[shape] = ((rows * heads + each) * length + self.places[:, :, None]).flatten()
        return self._slots[shape]

    def rotation(self, embeddings: tuple[torch.Tensor, torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines for the kernels, ``[B T, D]``, the same for all layers."""
        if self._rotation is None:
            cosines, sines = (each.reshape(-1, each.shape[-1]) for each in embeddings)
            self._rotation = as_array(cosines), as_array(sines)
        return self._rotation

    def rows_and_places(self) -> tuple[np.ndarray, np.ndarray]:
        """For each new token, its row of the store and where it is among the row's own, ``[B T]``."""
        if self._where is None:
            rows = np.arange(self.num_rows).repeat(self.num_new)
            self._where = rows, self.places.flatten().numpy()
        return self._where

    @property
    def parts(self) -> list[Part] | None:
        """The rows as `two_part_attention` takes them; ``None`` where they share nothing."""
        if self._parts is None and self._depths is not None:
            self._parts = make_parts(self.groups, self._prefixes, self.num_new, self._device)
        return self._parts

    def shared_keys(self, groups: int) -> SharedKeys | None:
        """The rows' prefixes for the kernels, of all layers that have ``G`` queries for each head of keys."""
        if self._depths is None:
            return None
        if groups not in self._shared:
            found = [
                (prefix.states, rows) for prefix, rows in _by_prefix(self._prefixes) if prefix is not None
            ]
            states, rows = zip(*found, strict=True)
            self._shared[groups] = SharedKeys(states, rows, self.positions, groups)
        return self._shared[groups]

    def _make_mask(self, window: int | None) -> torch.Tensor | None:
        if self.num_new == 1 and self.uniform_past is not None and (window is None or self.length <= window):
            return None
        keys = torch.arange(self.length, device=self._device)
        queries = self.places[:, None, :, None]
        mask = keys <= queries
        return mask if window is None or self.length <= window else mask & (keys > queries - window)


def attended_groups(past: Sequence[int], num_new: int, *, is_fixed: bool = False) -> list[tuple[slice, int]]:
    """Neighbouring rows that attend together, each with its longest length, rounded up where it is fixed.

    Rows enter in order of length and grow alike, so neighbours stay similar. One group unless several save enough.
    """
    unit = _FIXED_LENGTH if is_fixed else 1
    lengths = [-(-(length + num_new) // unit) * unit for length in past]
    groups: list[tuple[slice, int]] = []
    for first in range(0, len(lengths), _GROUP_ROWS):
        part = lengths[first : first + _GROUP_ROWS]
        groups.append((slice(first, first + len(part)), max(part)))
    work = sum((rows.stop - rows.start) * length for rows, length in groups)
    longest = max(lengths)
    return groups if work < _GROUP_GAIN * len(lengths) * longest else [(slice(0, len(lengths)), longest)]
