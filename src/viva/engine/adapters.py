"""Several adapters over one copy of the base weights: rows of all of them are decoded in one batch.

The products of the base's weights are taken for all rows at once. Each row's low-rank part, ``(alpha / rank) B A x``,
is added by the adapter of its own, for all rows that have the same one together (Chen et al. 2023, arXiv 2310.18547).
So an adapter takes the memory of its own numbers, not of a merged copy of the model, and what a row is given depends on
its adapter and its inputs alone, up to rounding.

Shapes: ``n`` tokens, those of a row behind one another, of ``I`` inputs and ``O`` outputs; rank ``r``.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from viva.engine.layers import fuse_layers
from viva.engine.linear import PackedLinear, join_linears, pack_linears

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Factors = tuple[torch.Tensor, torch.Tensor]


class Adapter:
    """An adapter beside the weights of a decode copy; without tensors it is the base model itself.

    Args:
        tensors: ``<layer>.lora_A``, ``[r, I]``, and ``<layer>.lora_B``, ``[O, r]``, by layer name.
        scale: ``alpha / rank``.
        dtype: Of the decode copy.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], scale: float, dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._scale = scale
        self._dtype = dtype
        self._factors: dict[tuple[str, ...], _Factors | None] = {}

    def factors(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> _Factors | None:
        """``[I, R]`` and ``[R, O]`` for layers of one input side by side, ``R`` the sum of their ranks.

        ``None`` where no layer is adapted. `sizes` are the layers' outputs.
        """
        if names not in self._factors:
            self._factors[names] = self._joined(names, sizes)
        return self._factors[names]

    def _joined(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> _Factors | None:
        downs: list[torch.Tensor] = []
        ups: list[torch.Tensor] = []
        for name, size in zip(names, sizes, strict=True):
            down = self._tensors.get(f"{name}.lora_A")
            if down is None:
                ups.append(torch.zeros(0, size))
                continue
            downs.append(down.T)
            ups.append(self._tensors[f"{name}.lora_B"].T * self._scale)
        if not downs:
            return None
        up = torch.block_diag(*(each.to(downs[0].device) for each in ups))
        return torch.cat(downs, dim=1).to(self._dtype).contiguous(), up.to(self._dtype)


class AdapterRows:
    """The adapters of the rows at work, which all layers of one decode copy look up."""

    def __init__(self) -> None:
        self._adapters: Sequence[Adapter] = ()
        self._groups: dict[int, list[tuple[Adapter, slice | torch.Tensor]]] = {}

    def set(self, adapters: Sequence[Adapter]) -> None:
        """From now on, row ``i`` is computed by ``adapters[i]``."""
        self._adapters = adapters
        self._groups = {}

    def add(
        self, outputs: torch.Tensor, inputs: torch.Tensor, names: tuple[str, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """Add the low-rank part of layers side by side to their ``[..., O]`` outputs, in place, of ``[..., I]``."""
        flat, result = inputs.reshape(-1, inputs.shape[-1]), outputs.view(-1, outputs.shape[-1])
        for adapter, places in self._grouped(len(flat), inputs.device):
            factors = adapter.factors(names, sizes)
            if factors is None:
                continue
            down, up = factors
            if isinstance(places, slice):
                result[places].addmm_(flat[places] @ down, up)
            else:
                result.index_add_(0, places, (flat[places] @ down) @ up)
        return outputs

    def _grouped(self, num_tokens: int, device: torch.device) -> list[tuple[Adapter, slice | torch.Tensor]]:
        """Places of the tokens of each adapter; rows have equally many tokens."""
        if num_tokens not in self._groups:
            each = num_tokens // len(self._adapters)
            rows: dict[int, tuple[Adapter, list[int]]] = {}
            for row, adapter in enumerate(self._adapters):
                rows.setdefault(id(adapter), (adapter, []))[1].append(row)
            self._groups[num_tokens] = [
                (adapter, _places(found, each, device)) for adapter, found in rows.values()
            ]
        return self._groups[num_tokens]


def _places(rows: list[int], each: int, device: torch.device) -> slice | torch.Tensor:
    """Places of the tokens of rows: a slice, which needs no copies, where the rows follow one another."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0] * each, (rows[-1] + 1) * each)
    begins = torch.tensor(rows, device=device)[:, None] * each
    return (begins + torch.arange(each, device=device)).flatten()


class AdaptableLinear(nn.Module):
    """Layers of one input as one packed product of the base's weights, and each row's adapter."""

    def __init__(
        self, product: PackedLinear, names: tuple[str, ...], sizes: tuple[int, ...], rows: AdapterRows
    ) -> None:
        super().__init__()
        self.out_features = product.out_features
        self._product = product
        self._layers = names, sizes
        self._rows = rows

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., I]`` inputs to ``[..., O]`` outputs."""
        return self._rows.add(self._product(inputs), inputs, *self._layers)

    def added_to(self, others: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs plus as many others."""
        return self._rows.add(self._product.added_to(others, inputs), inputs, *self._layers)


def adaptable(module: "PreTrainedModel", rows: AdapterRows) -> "PreTrainedModel":
    """Make a decode copy of the base model compute every row by its adapter; returns the module."""
    named = {layer: name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}

    def join(layers: Sequence[nn.Linear]) -> AdaptableLinear:
        names = tuple(named[layer] for layer in layers)
        sizes = tuple(layer.out_features for layer in layers)
        return AdaptableLinear(join_linears(layers), names, sizes, rows)

    pack_linears(fuse_layers(module, join), join)
    for layer in module.modules():
        if isinstance(layer, nn.Linear):  # one that cannot be packed
            layer.register_forward_hook(_Adding(rows, named[layer]))
    return module


class _Adding:
    """A forward hook that adds the low-rank part behind a layer that stays as it is."""

    def __init__(self, rows: AdapterRows, name: str) -> None:
        self._rows = rows
        self._name = name

    def __call__(self, layer: nn.Linear, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return self._rows.add(output, inputs[0], (self._name,), (layer.out_features,))
