"""Attention of sequences of different lengths, and the store of their keys and values.

``transformers`` lets an attention function be registered by name; masks are then ours to make. Every row of a batch
has its own number of cached tokens, so a prefill that continues cached prefixes and a decode step of any mix of
rows are the same operation. It is computed by whichever operation is fastest for it.

Shapes: ``B`` rows, ``T`` new tokens per row, ``L`` keys, ``Q`` query heads, ``K`` key-value heads, ``G = Q / K``, ``D``
head size.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache

from viva.engine.kernels import attend_rows, can_compile, use_threads
from viva.engine.step import RaggedStep, SharedPrefix, two_part_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RAGGED_ATTENTION = "viva_ragged"

_ROUND_LENGTH = 64
"""Lengths grow in multiples of this."""


class UnsupportedAttentionError(RuntimeError):
    """The architecture does not attend through the function chosen for it."""


class RaggedCache(Cache):
    """Preallocated keys and values, ``[rows, K, length, D]`` per layer, growing as needed.

    A row may begin with a `SharedPrefix`, which is stored elsewhere; what is stored here are the tokens of its own
    behind it. The first ``B`` rows take part in a forward pass; the views handed to the attention are not copies. What
    is not stored yet is zero, never left over from other memory: even where a mask gives it no weight, 0 times NaN is
    NaN.
    """

    def __init__(self, rows: int) -> None:
        super().__init__(layers=[])
        self.rows = rows
        """Rows there is room for."""
        self._length = 0
        self._stores: list[torch.Tensor] = []
        self._step: RaggedStep | None = None
        self.memory = object()
        """Another one whenever the stores are: what was recorded of them has then no use."""

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(store.nbytes for store in self._stores)

    def reserve(self, rows: int, length: int) -> None:
        """Make room, keeping the first ``rows`` rows; what is behind them may be gone. Sizes grow by at least half."""
        if rows <= self.rows and length <= self._length:
            return
        if length > self._length:
            length = _rounded(max(length, self._length * 3 // 2))
            self.rows = min(rows, self.rows)
        if rows > self.rows:
            rows = max(rows, self.rows * 3 // 2)
        length = max(length, self._length)
        self.memory = object()
        for index, old in enumerate(self._stores):
            # where an earlier call ran out of memory, some layers are larger than others
            kept, size = min(old.shape[1], rows), max(length, old.shape[3])
            new = old.new_empty(2, rows, old.shape[2], size, old.shape[4])
            new[:, :kept, :, : old.shape[3]] = old[:, :kept]
            new[:, :kept, :, old.shape[3] :] = 0
            new[:, kept:] = 0
            self._stores[index] = new
        self.rows, self._length = rows, length

    def renew(self, rows: int, length: int) -> None:
        """Make room where there is too little, keeping no row, so that short rows are not as long as earlier ones."""
        if rows > self.rows or length > self._length:
            self._stores.clear()
            self.rows, self._length = rows, _rounded(length)
            self.memory = object()

    def forward(
        self,
        module: "PreTrainedModel",
        tokens: torch.Tensor,
        *,
        past: Sequence[int],
        prefixes: Sequence[SharedPrefix | None] = (),
        ends: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Run the decoder on new tokens of the first ``B`` rows, storing their keys and values.

        Args:
            module: A `BaseModel.decode_copy`.
            tokens: ``[B, T]``, padded on the right; what padding stores is overwritten by later tokens.
            past: Tokens of its own that each of the ``B`` rows has already.
            prefixes: The shared prefix of each row; none if left out.
            ends: Of each row the new token, counted from the first, whose hidden state is read; all if left out.

        Returns:
            Hidden states after the final norm, ``[B, T, H]``, or with ``ends`` ``[B, 1, H]``.

        Raises:
            UnsupportedAttentionError: The architecture does not use our attention.
        """
        num_new = tokens.shape[1]
        self.reserve(len(past), max(past) + num_new)
        step = RaggedStep(past, num_new, tokens.device, prefixes, ends=ends if num_new > 1 else None)
        hidden = self.run(module, tokens, step)
        return step.at_ends(hidden) if step.reads_ends and hidden.shape[1] > 1 else hidden

    def run(self, module: "PreTrainedModel", tokens: torch.Tensor, step: RaggedStep) -> torch.Tensor:
        """`forward` on rows that there is room for, as a step says."""
        step.begin()
        self._step = step
        use_threads()
        try:
            output = module.get_decoder()(
                input_ids=tokens,
                position_ids=step.positions,
                past_key_values=self,
                use_cache=True,
                ragged=step,
            )
        finally:
            self._step = None  # it holds the prefixes
        if not step.num_stored == step.num_attended > 0:
            raise UnsupportedAttentionError("its layers do not attend through the function chosen for them")
        return output.last_hidden_state

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store ``[B, K, T, D]`` keys and values; return views ``[B, K, L, D]`` of everything the rows have."""
        _, heads, _, size = key_states.shape
        store = self.open(layer_idx, key_states, heads, size)
        step = self._running()
        keys, values = self.stored()
        if step.uniform_past is not None:
            new = slice(step.uniform_past, step.uniform_past + step.num_new)
            keys[:, :, new].copy_(key_states)
            values[:, :, new].copy_(value_states)
        else:
            slots = step.slots(store.shape)
            for flat, new in zip(store.view(2, -1, size).unbind(), (key_states, value_states), strict=True):
                flat.index_copy_(0, slots, new.transpose(1, 2).reshape(-1, size))
        return keys, values

    def open(self, layer: int, like: torch.Tensor, heads: int, size: int) -> torch.Tensor:
        """The store of a layer, ``[2, rows, K, length, D]``, into which the new tokens' keys and values now go."""
        step = self._running()
        while len(self._stores) <= layer:
            self._stores.append(like.new_zeros(2, self.rows, heads, self._length, size))
        step.num_stored += 1
        step.layer, step.store = layer, self._stores[layer]
        return step.store

    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views ``[B, K, L, D]`` of the keys and values that the rows have in the layer opened last."""
        step = self._running()
        live = step.store[:, : step.num_rows, :, : step.length]
        return live[0], live[1]

    def _running(self) -> RaggedStep:
        if self._step is None:
            raise RuntimeError("RaggedCache is used outside RaggedCache.forward.")
        return self._step

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of one row to another."""
        for store in self._stores:
            store[:, target, :, :length] = store[:, source, :, :length]

    def cut_row(self, row: int, first: int, last: int) -> None:
        """Forget a row's tokens before ``first``: those up to ``last`` become its first ones."""
        for store in self._stores:
            store[:, row, :, : last - first] = store[:, row, :, first:last].clone()

    def clear_row(self, row: int) -> None:
        """Set a row to zero, in case it holds values that are not finite."""
        for store in self._stores:
            store[:, row] = 0

    def read_row(self, row: int, first: int, last: int) -> list[torch.Tensor]:
        """Views ``[2, K, last - first, D]`` of one row, one per layer."""
        return [store[:, row, :, first:last] for store in self._stores]

    def write_row(self, row: int, states: Sequence[torch.Tensor], first: int = 0) -> None:
        """Copy keys and values, ``[2, K, .., D]`` per layer, to a row's places from ``first`` on."""
        last = first + states[0].shape[2]
        self.reserve(row + 1, last)
        if not self._stores:
            shapes = [(2, self.rows, state.shape[1], self._length, state.shape[3]) for state in states]
            self._stores = [state.new_zeros(shape) for state, shape in zip(states, shapes, strict=True)]
        for store, state in zip(self._stores, states, strict=True):
            store[:, row, :, first:last] = state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens in the longest row before this pass; models ask for it only where no positions are given."""
        return 0 if self._step is None else self._step.length - self._step.num_new


def _rounded(length: int) -> int:
    return -(-length // _ROUND_LENGTH) * _ROUND_LENGTH


def ragged_attention(
    module: "PreTrainedModel",
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    ragged: RaggedStep | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention in the form ``transformers`` calls it: ``[B, Q, T, D]`` queries to ``[B, T, Q, D]`` output."""
    if ragged is None or attention_mask is not None or kwargs.get("s_aux") is not None:
        raise UnsupportedAttentionError(
            "this architecture calls its attention in a way the engine does not know"
        )
    return attend(query, key, value, ragged, scaling, sliding_window, softcap), None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: RaggedStep,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of the rows that take part in a forward pass: ``[B, Q, T, D]`` queries to contiguous ``[B, T, Q, D]``.

    Keys and values are what `RaggedCache.update` returned. Scores are scaled by the inverse root of ``D`` where
    `scaling` is left out, and bounded by `softcap`; a query sees `window` keys, counting back from its own.
    """
    step.num_attended += 1
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is None and can_compile(query):
        given = query, step.store, step.lengths, scale, window
        output = attend_rows(*given, step.shared_keys(groups), step.layer)[0]
    elif step.parts:
        folded = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
        output = two_part_attention(folded, key, value, step, scale, window, softcap).reshape(query.shape)
    elif softcap is not None:
        output = _softcapped(query, key, value, step.mask(window), scale, softcap)
    elif step.num_new == 1:
        output = _attend_one_token(query, key, value, step, scale, window)
    else:
        causal = step.causal(window)
        output = scaled_dot_product_attention(
            query,
            key.repeat_interleave(groups, 1),
            value.repeat_interleave(groups, 1),
            attn_mask=None if causal else step.bias(window, query.dtype),
            is_causal=causal,
            scale=scale,
        )
    return output.transpose(1, 2).contiguous()


def _attend_one_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: RaggedStep,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attention of one new token per row, ``[B, Q, 1, D]``, without copying keys, where kernels are not for it.

    The query heads that share keys become queries of one head.
    """
    rows, heads, _, size = query.shape
    folded = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    bias = step.bias(window, query.dtype)
    parts = [
        scaled_dot_product_attention(
            folded[part],
            key[part, :, :length],
            value[part, :, :length],
            attn_mask=None if bias is None else bias[part, :, :, :length],
            scale=scale,
        )
        for part, length in step.groups
    ]
    output = parts[0] if len(parts) == 1 else torch.cat(parts)
    return output.reshape(rows, heads, 1, value.shape[-1])


def _softcapped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    """Attention whose scores are bounded by ``softcap * tanh(score / softcap)`` (Gemma 2)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value)
