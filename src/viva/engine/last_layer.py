"""The last layer of a model that is trained, which computes no more than is read of it.

Every token's keys and values are attended to, but what the last layer makes of them is read at places with a target
alone. Queries of other places, their products behind the attention, and the gradients of all these are left out.

Shapes: ``B`` rows of ``T`` tokens, ``R`` places that are read, ``H`` hidden size.
"""

from typing import Any

import torch
from torch import nn

from viva.engine.fused import LAYER_KINDS, is_stock
from viva.engine.model import decoder_layers
from viva.engine.tree_attention import TreeStep

__all__ = ["LastLayer", "confine_last_layer"]


def confine_last_layer(module: Any) -> bool:
    """Replace the last layer of a structure copy if it is of a known kind, names of parameters kept.

    Returns:
        Whether it was: then the decoder takes ``read``, and its hidden states are those of `LastLayer`.
    """
    layers = decoder_layers(module)
    is_known = is_stock(layers[-1], LAYER_KINDS)
    if is_known:
        layers[-1] = LastLayer(layers[-1])
    return is_known


class LastLayer(nn.Module):
    """Takes the place of a layer of ``transformers``, with the arguments that its model hands it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.self_attn: Any
        self.mlp: Any
        self.input_layernorm: Any
        self.post_attention_layernorm: Any
        for name, part in layer.named_children():
            self.add_module(name, part)
        self._read = torch.empty(0)
        self.self_attn.o_proj.register_forward_pre_hook(self._pick_inputs)

    def forward(
        self, hidden: torch.Tensor, *, read: torch.Tensor, tree: TreeStep | None = None, **given: Any
    ) -> torch.Tensor:
        """Hidden states after the layer at the places that are read, ``[1, R, H]``.

        Args:
            hidden: What the layer reads, ``[B, T, H]``.
            read: Ascending places in the flattened ``B * T``.
            tree: Of which the one row consists, if it does.
            **given: What else the model hands its layers.
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
