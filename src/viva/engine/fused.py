"""Decoder layers of the Llama kind, computed in few calls.

A decode step takes a few rows through many small operations, and at a dozen rows their calls show beside the products
(docs/log.md). Here a layer's products of one input are one, both norms of a head and
both rotations are one operation each, and the residual is added within the product before it. The weights are packed
(`viva.engine.linear`), so this is for copies that only compute, on a CPU.

Shapes: ``B`` rows, ``T`` new tokens per row, ``H`` hidden size, ``Q`` query heads, ``K`` key-value heads, ``D`` head
size.
"""

from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import rms_norm

from viva.engine.attention import attend
from viva.engine.linear import is_packable, join_linears

__all__ = ["FusedLayer", "fuse_layers"]

_KINDS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Layers of ``transformers`` that consist of the same steps."""


def fuse_layers(module: Any) -> Any:
    """Replace the layers of a decode copy by fused ones where they are of a known kind; returns the module."""
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if _is_known(layer):
                setattr(parent, name, FusedLayer(layer))
    return module


def _is_known(layer: nn.Module) -> bool:
    kind = type(layer)
    if kind.__name__ not in _KINDS or not kind.__module__.startswith("transformers.models."):
        return False
    attention, mlp = cast(Any, layer).self_attn, cast(Any, layer).mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    has_others = sum(isinstance(part, nn.Linear) for part in layer.modules()) > len(linears)
    return not has_others and all(map(is_packable, linears))


class FusedLayer(nn.Module):
    """A layer that takes the place of one of ``transformers``, with the arguments that its model hands it."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._index = attention.layer_idx
        self._size = attention.head_dim
        self._heads = attention.q_proj.out_features // self._size, attention.k_proj.out_features // self._size
        self._scaling = attention.scaling
        self._window = _window(layer)
        self._first_norm, self._second_norm = layer.input_layernorm, layer.post_attention_layernorm
        self._head_norm = _head_norm(attention, *self._heads)
        self._in = join_linears([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out = join_linears([attention.o_proj])
        self._gate_up = join_linears([mlp.gate_proj, mlp.up_proj])
        self._down = join_linears([mlp.down_proj])
        self._act = mlp.act_fn

    def forward(
        self,
        hidden: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        past_key_values: Any,
        ragged: Any,
        **unused: Any,
    ) -> torch.Tensor:
        """``[B, T, H]`` hidden states to those after the layer.

        Args:
            hidden: What the layer reads.
            position_embeddings: Cosines and sines, ``[B, T, D]``.
            past_key_values: A `viva.engine.attention.RaggedCache`.
            ragged: Its step.
            **unused: What else the model hands its layers.
        """
        queries, keys = self._heads
        inner = self._in(_normed(hidden, self._first_norm)).view(*hidden.shape[:2], -1, self._size)
        rotated, value = inner.split([queries + keys, keys], dim=2)
        if self._head_norm is not None:
            weight, eps = self._head_norm
            rotated = rms_norm(rotated, (self._size,), None, eps) * weight
        cosines, sines = ragged.rotation(position_embeddings)
        rotated = torch.addcmul(rotated * cosines, rotated.roll(self._size // 2, -1), sines)
        query, key = rotated.transpose(1, 2).split([queries, keys], dim=1)
        key, value = past_key_values.update(key, value.transpose(1, 2), self._index)
        output = attend(query, key, value, ragged, self._scaling, self._window, None)
        hidden = self._out.added_to(hidden, output.view(*hidden.shape[:2], -1))
        gate, up = self._gate_up(_normed(hidden, self._second_norm)).chunk(2, dim=-1)
        return self._down.added_to(hidden, self._act(gate) * up)


def _normed(hidden: torch.Tensor, norm: Any) -> torch.Tensor:
    return rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _head_norm(attention: Any, queries: int, keys: int) -> tuple[torch.Tensor, float] | None:
    """Weights of the norms of all heads that have one, ``[Q + K, D]``, and their epsilon."""
    if not hasattr(attention, "q_norm"):
        return None
    norms = [attention.q_norm] * queries + [attention.k_norm] * keys
    return torch.stack([norm.weight.detach() for norm in norms]), attention.q_norm.variance_epsilon


def _window(layer: Any) -> int | None:
    """Keys that are seen, counting back from the query's own."""
    if type(layer).__name__ == "LlamaDecoderLayer":
        return None
    attention = layer.self_attn
    return (
        attention.sliding_window if hasattr(attention, "sliding_window") else attention.config.sliding_window
    )
