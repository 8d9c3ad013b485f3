"""Matrix products on a CPU: of training by oneDNN, and of a decode copy with weights in the layout they are read in.

torch multiplies float32 matrices by another library (MKL or OpenBLAS), which can be slower at the shapes of an update,
whatever the layout (``benchmarks/products.py`` measures it); bfloat16 it already multiplies by oneDNN.

A decode step multiplies a few rows by every weight, so it costs what reading the weights costs. The stock product of
torch reaches a third of the memory's speed at a dozen rows in float32; oneDNN's with weights laid out beforehand comes
to about twice that, is ahead up to whole prompts, and level for one row. Our kernel is ahead of that by 1.2 to 1.85
times up to 64 rows, level beyond, and takes its place in float32 (see the log); in bfloat16 on processors that multiply
pairs, where it is ahead by 1.1 to 1.2. In float32 it reads half as much of weights that are kept in bfloat16. Layers
that read the same input are one product, since threads meet at the end of each. Packed weights cannot be trained, saved
or moved, so this is for copies that only compute, on a CPU.

Shapes: ``n`` rows of ``I`` inputs, ``O`` outputs.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch
from torch import nn

from viva.engine.kernels import can_compile, can_multiply, multiply, tiled

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FINE_ROWS = 64
"""More rows are filled up to a round number, by 2 % on average. oneDNN makes a kernel for every number of rows it
meets, in a millisecond, and keeps it, half a megabyte: prompts of all lengths would take a gigabyte."""
_TYPICAL_ROWS = 16
"""The layout is chosen for this many rows. It is right for any number."""
_JOINT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that read the same input one after another, as ``transformers`` names them within their parent."""


def product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x W^T + b`` of ``[n, I]`` inputs and a ``[O, I]`` weight that may be a transposed view. It has no gradient."""
    if weight.dtype == torch.float32 and can_pack(weight):
        return torch.ops.mkldnn._linear_pointwise.default(inputs, weight, bias, "none", [], "")
    return nn.functional.linear(inputs, weight, bias)


def _missing_rows(num_rows: int) -> int:
    """Rows of zeros to fill up with: many rows come to a multiple of 8, or of a 32nd of the next power of two."""
    return 0 if num_rows <= _FINE_ROWS else -num_rows % max(8, 1 << (num_rows.bit_length() - 5))


class TiledLinear(nn.Module):
    """``x W^T + b`` by our kernel. It keeps no other copy of the weight.

    Inputs are of the weight's type, or of `dtype`: with float32 ones, products of a bfloat16 weight are those of the
    same numbers in float32, to the bit.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._tiles = tiled(weight, dtype or weight.dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., I]`` inputs to ``[..., O]`` outputs."""
        output = inputs.new_empty(*inputs.shape[:-1], self.out_features)
        if self._bias is not None:
            output.copy_(self._bias)
        multiply(inputs.contiguous(), self._tiles, output, keep=self._bias is not None)
        return output

    def added_to(self, others: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs plus as many others, which are added within the product."""
        output = others.clone(memory_format=torch.contiguous_format)
        if self._bias is not None:
            output += self._bias
        multiply(inputs.contiguous(), self._tiles, output, keep=True)
        return output


class PackedLinear(nn.Module):
    """``x W^T + b`` by oneDNN with packed ``W``. It keeps no other copy of the weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        self._product: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default
        self._sum: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.binary

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., I]`` inputs to ``[..., O]`` outputs."""
        num_rows = inputs.numel() // self.in_features
        missing = _missing_rows(num_rows)
        if not missing:
            return self._product(inputs, self._packed, self._bias, "none", [], "")
        flat = nn.functional.pad(inputs.reshape(-1, self.in_features), (0, 0, 0, missing))
        output = self._product(flat, self._packed, self._bias, "none", [], "")
        return output[:num_rows].view(*inputs.shape[:-1], self.out_features)

    def added_to(self, others: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs plus as many others, which are added within the product."""
        if _missing_rows(inputs.numel() // self.in_features):
            return others + self(inputs)
        return self._sum(inputs, others, self._packed, self._bias, "add")


def join_linears(layers: Sequence[nn.Linear], keep_as: torch.dtype = torch.float32) -> "JointProduct":
    """Layers that read the same input, all with a bias or all without, as one product.

    Our kernel keeps their weights as bfloat16 if `keep_as` says so, or if all of their numbers are such ones, as those
    of most published models: it reads half as much, and computes the same as of float32.
    """
    frozen = [{key: value.detach() for key, value in layer.named_parameters()} for layer in layers]
    biases = [each["bias"] for each in frozen if "bias" in each]
    weights = [each["weight"] for each in frozen]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]  # one needs no copy
    bias = torch.cat(biases) if biases else None
    if not can_tile(weight):
        return PackedLinear(weight, bias)
    is_narrow = keep_as == torch.bfloat16 or is_bfloat16(weight)
    return TiledLinear(weight.bfloat16() if is_narrow else weight, bias, weight.dtype)


def is_bfloat16(weight: torch.Tensor) -> bool:
    """Whether all numbers of a matrix are bfloat16 ones, whatever its type."""
    return all(torch.equal(part, part.bfloat16().to(part.dtype)) for part in (weight[:1], weight))


def can_tile(weight: torch.Tensor) -> bool:
    """Whether our kernel multiplies such weights with inputs of their type."""
    return can_multiply(weight, weight.dtype) and can_compile(weight)


class JointProduct(Protocol):
    """The product of layers that read the same input."""

    out_features: int

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., I]`` inputs to ``[..., O]`` outputs."""
        ...

    def added_to(self, others: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs plus as many others."""
        ...


Join = Callable[[Sequence[nn.Linear]], JointProduct]


class _Joint:
    """Layers of one input as one product; each part is handed out once."""

    def __init__(self, layers: Sequence[nn.Linear], join: "Join") -> None:
        self._sizes = [layer.out_features for layer in layers]
        self._product = join(layers)
        self._inputs: torch.Tensor | None = None
        self._waiting: dict[int, torch.Tensor] = {}

    def part(self, index: int, inputs: torch.Tensor) -> torch.Tensor:
        if inputs is not self._inputs or index not in self._waiting:
            self._inputs = inputs
            self._waiting = dict(enumerate(self._product(inputs).split(self._sizes, dim=-1)))
        output = self._waiting.pop(index)
        if not self._waiting:
            self._inputs = None
        return output


class JointPart(nn.Module):
    """One of the layers that share a product: the first one called computes the others, too."""

    def __init__(self, joint: _Joint, index: int) -> None:
        super().__init__()
        self._joint = joint
        self._index = index

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., I]`` inputs to ``[..., O]`` outputs, a view of the joint ones."""
        return self._joint.part(self._index, inputs)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this torch on this machine has the product for such weights. Decided without measuring anything."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack_linears(module: "PreTrainedModel", join: Join = join_linears) -> "PreTrainedModel":
    """Replace the linear layers of a decode copy by packed ones where that is possible; returns the module.

    `join` makes the product of layers of one input.
    """
    # a list of all modules would keep every replaced layer's weights until the last one is replaced
    for parent in [each for each in module.modules() if any(map(is_packable, each.children()))]:
        for names in _JOINT:
            if _can_join([getattr(parent, name, None) for name in names]):
                joint = _Joint([getattr(parent, name) for name in names], join)
                for index, name in enumerate(names):
                    setattr(parent, name, JointPart(joint, index))
        for name in [name for name, layer in parent.named_children() if is_packable(layer)]:
            setattr(parent, name, join([getattr(parent, name)]))
    return module


def is_packable(layer: object) -> TypeGuard[nn.Linear]:
    """Whether a layer can be a packed one."""
    return type(layer) is nn.Linear and can_pack(layer.weight)


def _can_join(layers: Sequence[object]) -> "TypeGuard[Sequence[nn.Linear]]":
    linears = [layer for layer in layers if is_packable(layer)]
    kinds = {
        (layer.in_features, layer.weight.dtype, "bias" in dict(layer.named_parameters())) for layer in linears
    }
    return len(linears) == len(layers) and len(kinds) == 1
