"""Norms and gates of a model that is trained on a CPU, each one compiled kernel forward and one backward.

torch takes several passes over memory for each. Only frozen norms are replaced: the weight has no gradient here.

Shapes: ``n`` tokens, ``H`` hidden size, ``F`` inner size.
"""

from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from viva.engine.fused import is_stock, uses_silu
from viva.engine.kernels import can_compile, gate_back, gate_pair, normalise, normalise_back

__all__ = ["FrozenNorm", "GatedMLP", "replace_parts"]

_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
_GATED = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")


def replace_parts(module: Any) -> Any:
    """Replace norms and gated layers of known kinds, names of parameters kept; returns the module."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            part: Any = child
            if is_stock(child, _NORMS) and can_compile(part.weight) and not part.weight.requires_grad:
                setattr(parent, name, FrozenNorm(part.weight, part.variance_epsilon))
            elif is_stock(child, _GATED) and uses_silu(part):
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
        return cast(torch.Tensor, _Normalised.apply(hidden.contiguous(), self.weight, self._eps))


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) up(x))``."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., H]`` to as many."""
        gate, up = self.gate_proj(hidden), self.up_proj(hidden)
        inner = _Gated.apply(gate, up) if can_compile(gate) else nn.functional.silu(gate) * up
        return self.down_proj(inner)


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.eps = eps
        return normalise(hidden, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        return normalise_back(hidden, weight, ctx.eps, grad_outputs[0].contiguous()), None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return gate_pair(gate, up)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return gate_back(gate, up, grad_outputs[0].contiguous())
