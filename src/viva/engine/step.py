"""One forward pass of rows of different lengths: where their tokens are, which masks follow, which prefixes they share.

Rows that share a stored prefix attend by one product with the one copy of it and one with their own tokens. Each gives
an average of values and the logarithm of its sum of weights, from which the average over both follows (Juravsky et al.
2024, arXiv 2402.05099). Nothing is approximated.

Shapes: ``B`` rows, ``T`` new tokens per row, ``L`` keys, ``Q`` query heads, ``K`` key-value heads, ``G = Q / K``, ``D``
head size; ``n`` rows that share a prefix of ``L`` tokens.
"""

from collections.abc import Collection, Sequence
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
    prefixes: list[tuple[slice | torch.Tensor, SharedPrefix]]
    """Shared ones, each with the rows that have it, counted from the part's first."""


def _by_prefix(prefixes: Sequence[SharedPrefix | None]) -> Collection[tuple[SharedPrefix, list[int]]]:
    """Each of the shared prefixes, and the rows that have it."""
    found: dict[int, tuple[SharedPrefix, list[int]]] = {}
    for row, prefix in enumerate(prefixes):
        if prefix is not None:
            found.setdefault(id(prefix), (prefix, []))[1].append(row)
    return found.values()


def two_part_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: "RaggedStep",
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of rows of which some share prefixes: as many averages as queries, ``[B, K, G T, D]``.

    Those that share keys are queries of one head. Keys and values are the rows' own, ``[B, K, L, D]``; see `attend` for
    the others.
    """
    groups = query.shape[2] // step.num_new
    bias = step.bias(window, query.dtype, groups)
    outputs: list[torch.Tensor] = []
    for part in step.parts:
        mine, positions = query[part.rows], step.positions[part.rows]
        own = key[part.rows, :, : part.length], value[part.rows, :, : part.length]
        mask = None if bias is None else bias[part.rows, :, :, : part.length]
        output, sums = average(mine, *own, mask, scaling, softcap)
        for picked, prefix in part.prefixes:
            keys, values = prefix.states[step.layer][:, None].unbind()
            asking = mine[picked].transpose(0, 1)
            unseen = prefix.bias(positions[picked], part.length, groups, window, query.dtype)
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


def places_of(rows: list[int], device: torch.device, each: int = 1) -> slice | torch.Tensor:
    """Places of rows that have so many each: a slice, which needs no copies, where the rows follow one another."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0] * each, (rows[-1] + 1) * each)
    begins = torch.tensor(rows, device=device)[:, None] * each
    return (begins + torch.arange(each, device=device)).flatten()


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
        ends: Sequence[int] | None = None,
        is_fixed: bool = False,
    ) -> None:
        """A pass of a store's first rows, which have `past` tokens of their own and get ``T`` new ones each.

        Without `prefixes` they share none. With `ends` nobody reads hidden states but those of one new token of each
        row, counted from its first. With `is_fixed` all that follows from the lengths is computed on the device, and
        stays right when the rows `move` on, as long as `attended_groups` stay the same.
        """
        self.num_rows = len(past)
        self.num_new = num_new
        self.groups = attended_groups(past, num_new, is_fixed=is_fixed)
        self.length = max(length for _, length in self.groups)
        self.uniform_past = past[0] if min(past) == max(past) and not is_fixed else None
        self.lengths = np.array(past) + num_new
        self._device = device
        self._prefixes = prefixes
        self.reads_ends = ends is not None
        """Whether the hidden states of one new token of each row are all that is read."""
        self._ends: Any = None if ends is None else torch.tensor(ends, device=device)
        self.layer = 0
        self.store = torch.empty(0)
        """Keys and values of the layer at work."""
        self.places = torch.tensor(past, device=device)[:, None] + torch.arange(num_new, device=device)
        """Places of the new tokens among their row's own."""
        self.positions = self.places
        self._parts: list[Part] = []
        self._depths, self._deepest = None, 0
        if any(prefix is not None for prefix in prefixes):
            depths = [0 if prefix is None else prefix.length for prefix in prefixes]
            self._deepest = max(depths)
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
    def parts(self) -> list[Part]:
        """The groups of rows, cut where they would need too much memory; none where rows share nothing."""
        if not self._parts and self._depths is not None:
            for rows, length in self.groups:
                size = max(1, _MOST_ENTRIES // (self.num_new * (self._deepest + length)))
                for first in range(rows.start, rows.stop, size):
                    last = min(first + size, rows.stop)
                    found = _by_prefix(self._prefixes[first:last])
                    picked = [(places_of(each, self._device), prefix) for prefix, each in found]
                    self._parts.append(Part(rows=slice(first, last), length=length, prefixes=picked))
        return self._parts

    def shared_keys(self, groups: int) -> SharedKeys | None:
        """The rows' prefixes for the kernels, of all layers that have ``G`` queries for each head of keys."""
        if self._depths is None:
            return None
        if groups not in self._shared:
            prefixes, rows = zip(*_by_prefix(self._prefixes), strict=True)
            states = [prefix.states for prefix in prefixes]
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
