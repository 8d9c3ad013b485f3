"""Layers of ``transformers`` replaced by faster ones of the same mathematics, for decoding and for training.

A decode step takes a few rows through many small operations, and at a dozen rows their calls show beside the products
(see the log). Fused, a layer's products of one input are one, what lies between two products is one call of a compiled
kernel (`viva.engine.kernels`), and the residual is added within the product before it. The weights are packed
(`viva.engine.linear`), so this is for copies that only compute, on a CPU.

In training, norms with frozen weights and gates are each one kernel forward and one backward, where torch takes several
passes over memory. And the last layer computes no more than is read of it: every token's keys and values are attended
to, but queries of places without a target, their products behind the attention, and the gradients of all these are left
out.

Shapes: ``B`` rows, ``T`` new tokens per row, ``H`` hidden size, ``F`` inner size, ``Q`` query heads, ``K`` key-value
heads, ``D`` head size, ``R`` places that are read.
"""

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from viva.engine.attention import RaggedCache, attend
from viva.engine.kernels import Norm, as_array, can_compile, gate, gate_pair, normalise, place
from viva.engine.linear import Join, is_packable, join_linears
from viva.engine.model import decoder_layers
from viva.engine.step import RaggedStep
from viva.engine.trees import TreeStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Models of ``transformers`` whose layers consist of the same steps, between an embedding and a norm."""


def fuse_layers(module: "PreTrainedModel", join: Join = join_linears) -> "PreTrainedModel":
    """Replace the layers of a decode copy by fused ones where they are of a known kind; returns the module.

    `join` makes the product of layers of one input.
    """
    # a list of all modules would keep every replaced layer's weights until the last one is replaced
    for parent in [each for each in module.modules() if any(map(_is_known, each.children()))]:
        for name in [name for name, layer in parent.named_children() if _is_known(layer)]:
            setattr(parent, name, FusedLayer(getattr(parent, name), join))
    for parent in list(module.modules()):
        for name, decoder in list(parent.named_children()):
            if _is_stock(decoder, "Model") and all(
                isinstance(each, FusedLayer) for each in cast(Any, decoder).layers
            ):
                setattr(parent, name, FusedDecoder(decoder))
    return module


def _is_stock(module: nn.Module, part: str) -> bool:
    """Whether a module is ``transformers``' own class for a part of these models, not somebody's changed one."""
    kind = type(module)
    is_named = kind.__name__ in [f"{family}{part}" for family in _FAMILIES]
    return is_named and kind.__module__.startswith("transformers.models.")


def _uses_silu(mlp: Any) -> bool:
    """Whether a gated layer's activation is the one that kernels compute."""
    return type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")


def _is_known(layer: nn.Module) -> bool:
    if not _is_stock(layer, "DecoderLayer"):
        return False
    attention, mlp = cast(Any, layer).self_attn, cast(Any, layer).mlp
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    has_others = sum(isinstance(part, nn.Linear) for part in layer.modules()) > len(linears)
    fits = all(map(is_packable, linears)) and can_compile(attention.q_proj.weight)
    return not has_others and _uses_silu(mlp) and fits


class FusedDecoder(nn.Module):
    """Takes the place of a decoder all of whose layers are fused: it makes no mask, which they do not read."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.embed_tokens = decoder.embed_tokens
        self.layers = decoder.layers
        self.rotary_emb = decoder.rotary_emb
        self._norm = _norm(decoder.norm)

    def get_decoder(self) -> nn.Module:
        """Itself, as ``transformers`` asks."""
        return self

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: RaggedCache,
        ragged: RaggedStep,
        **unused: object,
    ) -> BaseModelOutputWithPast:
        """``[B, T]`` tokens at positions ``[B, T]`` to hidden states after the final norm.

        They are ``[B, T, H]``, or ``[B, 1, H]`` of the rows' ends if the step says that nothing else is read.
        """
        hidden = self.embed_tokens(input_ids)
        rotation = self.rotary_emb(hidden, position_ids)
        for number, layer in enumerate(self.layers, start=1):
            hidden = layer(
                hidden,
                position_embeddings=rotation,
                past_key_values=past_key_values,
                ragged=ragged,
                is_last=number == len(self.layers),
            )
        return BaseModelOutputWithPast(last_hidden_state=cast(torch.FloatTensor, self._norm(hidden)))


class FusedLayer(nn.Module):
    """A layer that takes the place of one of ``transformers``, with the arguments that its model hands it."""

    def __init__(self, layer: Any, join: Join) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._index = attention.layer_idx
        self._size = attention.head_dim
        self._heads = attention.q_proj.out_features // self._size, attention.k_proj.out_features // self._size
        self._scaling = attention.scaling
        self._window = _window(layer)
        self._first_norm = _norm(layer.input_layernorm)
        self._second_norm = _norm(layer.post_attention_layernorm)
        self._head_norms = _head_norms(attention, *self._heads)
        self._in = join([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out = join([attention.o_proj])
        self._gate_up = join([mlp.gate_proj, mlp.up_proj])
        self._down = join([mlp.down_proj])

    def forward(
        self,
        hidden: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        past_key_values: RaggedCache,
        ragged: RaggedStep,
        is_last: bool = False,
        **unused: object,
    ) -> torch.Tensor:
        """``[B, T, H]`` hidden states to those after the layer; cosines and sines are ``[B, T, D]``.

        If nothing attends to the result (`is_last`) it is ``[B, 1, H]`` where the step reads ends alone.
        """
        inner = self._in(self._first_norm(hidden))
        store = past_key_values.open(self._index, inner, self._heads[1], self._size)
        where = ragged.rows_and_places()
        query = place(
            inner, self._head_norms, ragged.rotation(position_embeddings), where, store, self._heads[0]
        )
        key, value = past_key_values.stored()
        if is_last and ragged.reads_ends:
            hidden, query = ragged.at_ends(hidden), ragged.at_ends(query.transpose(1, 2)).transpose(1, 2)
            ragged = ragged.step_of_ends()
        output = attend(query, key, value, ragged, self._scaling, self._window, None)
        hidden = self._out.added_to(hidden, output.view(*hidden.shape[:2], -1))
        return self._down.added_to(hidden, gate(self._gate_up(self._second_norm(hidden))))


def _norm(norm: Any) -> Norm:
    return Norm(norm.weight, norm.variance_epsilon)


def _head_norms(attention: Any, queries: int, keys: int) -> tuple[np.ndarray, np.float32]:
    """Weights of the norms of all heads, ``[Q + K, D]``, or ``[0, D]`` where they have none, and their epsilon."""
    if not hasattr(attention, "q_norm"):
        return as_array(attention.q_proj.weight.new_empty(0, attention.head_dim)), np.float32(0)
    norms = [attention.q_norm] * queries + [attention.k_norm] * keys
    weights = torch.stack([norm.weight.detach() for norm in norms])
    return as_array(weights), np.float32(attention.q_norm.variance_epsilon)


def _window(layer: Any) -> int | None:
    """Keys that are seen, counting back from the query's own."""
    if type(layer).__name__ == "LlamaDecoderLayer":
        return None
    attention = layer.self_attn
    return (
        attention.sliding_window if hasattr(attention, "sliding_window") else attention.config.sliding_window
    )


def replace_parts(module: "PreTrainedModel") -> "PreTrainedModel":
    """Replace norms and gated layers of known kinds, names of parameters kept; returns the module."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            part: Any = child
            if _is_stock(child, "RMSNorm") and can_compile(part.weight) and not part.weight.requires_grad:
                setattr(parent, name, FrozenNorm(part.weight, part.variance_epsilon))
            elif _is_stock(child, "MLP") and _uses_silu(part):
                setattr(parent, name, GatedMLP(part))
    return module


class FrozenNorm(nn.Module):
    """A root mean square norm over the last dimension."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self._eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., H]`` to as many."""
        return normalise(hidden, self.weight, self._eps)


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) up(x))``."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., H]`` to as many."""
        gate, up = self.gate_proj(hidden), self.up_proj(hidden)
        inner = gate_pair(gate, up) if can_compile(gate) else nn.functional.silu(gate) * up
        return self.down_proj(inner)


def confine_last_layer(module: "PreTrainedModel") -> bool:
    """Replace the last layer of a structure copy if it is of a known kind, names of parameters kept.

    Returns:
        Whether it was: then the decoder takes ``read``, and its hidden states are those of `LastLayer`.
    """
    layers = decoder_layers(module)
    is_known = _is_stock(layers[-1], "DecoderLayer")
    if is_known:
        layers[-1] = LastLayer(layers[-1])
    return is_known


class LastLayer(nn.Module):
    """Takes the place of a layer of ``transformers``, with the arguments that its model hands it."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self._read = torch.empty(0)
        self.self_attn.o_proj.register_forward_pre_hook(self._pick_inputs)

    def forward(
        self, hidden: torch.Tensor, *, read: torch.Tensor, tree: TreeStep | None = None, **given: object
    ) -> torch.Tensor:
        """``[B, T, H]`` hidden states to those after the layer at the places that are read, ``[1, R, H]``.

        `read` has ascending places in the flattened ``B * T``; `tree` is what the one row consists of, if it does.
        """
        self._read = read
        if tree is not None:
            given |= {"tree": tree, "cells": tree.read_cells}
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden), **given)
        hidden = self._pick(hidden) + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def _pick_inputs(self, module: nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (self._pick(given[0]),)

    def _pick(self, states: torch.Tensor) -> torch.Tensor:
        return states.flatten(0, 1).index_select(0, self._read)[None]
