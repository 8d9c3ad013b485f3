"""Several adapters over one copy of the base weights: rows of all of them are decoded in one batch.

The products of the base's weights are taken for all rows at once. Each row's low-rank part, ``(alpha / rank) B A x``,
is added by the adapter of its own, for all rows that have the same one together (Chen et al. 2023, arXiv 2310.18547).
So an adapter takes the memory of its own numbers, not of a merged copy of the model, and what a row is given depends on
its adapter and its inputs alone, up to rounding. On a CPU in float32 a kernel of our own adds it in one call for all
adapters (`viva.engine.kernels`); elsewhere torch does, adapter by adapter.

Shapes: ``n`` tokens, those of a row behind one another, of ``I`` inputs and ``O`` outputs; rank ``r``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from viva.engine.kernels import LowRank, add_low_rank, can_compile, chunks_of, records_of, tiles_of
from viva.engine.layers import fuse_layers
from viva.engine.linear import Join, JointProduct, join_linears, pack_linears
from viva.engine.step import places_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Factors = tuple[torch.Tensor, torch.Tensor]
_Plan = Callable[[torch.Tensor, torch.Tensor], None]
"""Adds to outputs what belongs to inputs, both contiguous."""


class Adapter:
    """An adapter beside the weights of a decode copy; without tensors it is the base model itself.

    Args:
        tensors: ``<layer>.lora_A``, ``[r, I]``, and ``<layer>.lora_B``, ``[O, r]``, by layer name.
        scale: ``alpha / rank``.
        dtype: Of the decode copy.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], scale: float, dtype: torch.dtype) -> None:
        self.tensors = tensors
        self._scale = scale
        self._dtype = dtype
        self._factors: dict[tuple[str, ...], _Factors] = {}
        self._low_ranks: dict[tuple[str, ...], LowRank] = {}

    def factors(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> _Factors | None:
        """``[I, R]`` and ``[R, O]`` for layers of one input side by side, ``R`` the sum of their ranks.

        ``None`` where no layer is adapted. `sizes` are the layers' outputs.
        """
        pairs = self._pairs(names)
        if names not in self._factors and any(pairs):
            downs = [pair[0].T for pair in pairs if pair is not None]
            zeros = [downs[0].new_zeros(0, size) for size in sizes]
            ups = [
                none if pair is None else pair[1].T * self._scale
                for pair, none in zip(pairs, zeros, strict=True)
            ]
            down, up = torch.cat(downs, dim=1), torch.block_diag(*ups)
            self._factors[names] = down.to(self._dtype).contiguous(), up.to(self._dtype)
        return self._factors.get(names)

    def low_rank(self, names: tuple[str, ...]) -> LowRank | None:
        """The same for the kernel."""
        pairs = self._pairs(names)
        if names not in self._low_ranks and any(pairs):
            self._low_ranks[names] = LowRank(pairs, self._scale)
        return self._low_ranks.get(names)

    def _pairs(self, names: tuple[str, ...]) -> list[_Factors | None]:
        """``[r, I]`` and ``[O, r]`` of each layer, ``None`` where it is not adapted."""
        tensors = self.tensors
        return [
            (tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"]) if f"{name}.lora_A" in tensors else None
            for name in names
        ]


class AdapterRows:
    """The adapters of the rows at work, which all layers of one decode copy look up."""

    def __init__(self) -> None:
        self._rows: list[Adapter] = []
        self._by_adapter: dict[Adapter, list[int]] = {}
        """Numbers of the rows of each adapter."""
        self._records: dict[tuple[str, ...], np.ndarray] = {}
        self._orders: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._plans: dict[tuple[tuple[str, ...], int], _Plan | None] = {}

    def set(self, rows: Sequence[Adapter]) -> None:
        """From now on, row ``i`` is computed by ``rows[i]``."""
        if self._rows == rows:
            return
        by_adapter: dict[Adapter, list[int]] = {}
        for row, adapter in enumerate(rows):
            by_adapter.setdefault(adapter, []).append(row)
        if list(by_adapter) != list(self._by_adapter):
            self._records = {}
        self._rows, self._by_adapter = list(rows), by_adapter
        self._orders, self._plans = {}, {}

    def add(
        self, outputs: torch.Tensor, inputs: torch.Tensor, names: tuple[str, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """Add the low-rank part of layers side by side to their ``[..., O]`` outputs, in place, of ``[..., I]``."""
        key = names, inputs.numel()
        if key not in self._plans:
            is_compiled = inputs.dtype == torch.float32 and can_compile(inputs)
            make_plan = self._compiled_plan if is_compiled else self._torch_plan
            self._plans[key] = make_plan(inputs, names, sizes)
        plan = self._plans[key]
        if plan is not None:
            plan(outputs, inputs.contiguous())
        return outputs

    def _compiled_plan(
        self, inputs: torch.Tensor, names: tuple[str, ...], sizes: tuple[int, ...]
    ) -> _Plan | None:
        if names not in self._records:
            low_ranks = [adapter.low_rank(names) for adapter in self._by_adapter]
            self._records[names] = records_of(low_ranks, len(names))
        records = self._records[names]
        if not records.any():
            return None
        num_tokens = inputs.numel() // inputs.shape[-1]
        if num_tokens not in self._orders:
            each = num_tokens // len(self._rows)  # rows have equally many tokens
            rows = np.concatenate([*self._by_adapter.values()])
            counts = [len(found) * each for found in self._by_adapter.values()]
            self._orders[num_tokens] = chunks_of(counts), (rows[:, None] * each + np.arange(each)).ravel()
        chunks, order = self._orders[num_tokens]
        return partial(add_low_rank, records=records, tiles=tiles_of(sizes), chunks=chunks, order=order)

    def _torch_plan(self, inputs: torch.Tensor, names: tuple[str, ...], sizes: tuple[int, ...]) -> _Plan:
        each = inputs.numel() // inputs.shape[-1] // len(self._rows)
        groups = [
            (places_of(rows, inputs.device, each), factors)
            for adapter, rows in self._by_adapter.items()
            if (factors := adapter.factors(names, sizes)) is not None
        ]
        return partial(_add_groups, groups=groups)


def _add_groups(
    outputs: torch.Tensor,
    inputs: torch.Tensor,
    groups: Sequence[tuple[slice | torch.Tensor, _Factors]],
) -> None:
    flat, result = inputs.view(-1, inputs.shape[-1]), outputs.view(-1, outputs.shape[-1])
    for places, (down, up) in groups:
        if isinstance(places, slice):
            result[places].addmm_(flat[places] @ down, up)
        else:
            result.index_add_(0, places, (flat[places] @ down) @ up)


class AdaptableLinear(nn.Module):
    """Layers of one input as one packed product of the base's weights, and each row's adapter."""

    def __init__(
        self, product: JointProduct, names: tuple[str, ...], sizes: tuple[int, ...], rows: AdapterRows
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


def adaptable(
    module: "PreTrainedModel", rows: AdapterRows, join_base: Join = join_linears
) -> "PreTrainedModel":
    """Make a decode copy of the base model compute every row by its adapter; returns the module.

    `join_base` makes the product of the base's layers of one input.
    """
    named = {layer: name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}

    def join(layers: Sequence[nn.Linear]) -> AdaptableLinear:
        names = tuple(named[layer] for layer in layers)
        sizes = tuple(layer.out_features for layer in layers)
        return AdaptableLinear(join_base(layers), names, sizes, rows)

    pack_linears(fuse_layers(module, join), join)
    for layer in module.modules():
        if isinstance(layer, nn.Linear):  # one that cannot be packed
            layer.register_forward_hook(partial(_add_behind, rows=rows, name=named[layer]))
    return module


def _add_behind(
    layer: nn.Linear, inputs: tuple[torch.Tensor], output: torch.Tensor, *, rows: AdapterRows, name: str
) -> torch.Tensor:
    """A forward hook that adds the low-rank part behind a layer that stays as it is."""
    return rows.add(output, inputs[0], (name,), (layer.out_features,))
