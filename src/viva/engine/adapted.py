"""Linear layers with a low-rank adapter, as they are trained.

The layer computes ``W x + b + scale * B A x`` with ``W`` and ``b`` frozen. Forward and backward pass are written out:
the adapter is added within the products, so that nothing of the size of the layer's inputs or outputs is scaled, added
or cast beside them, and only the inputs and ``r`` numbers per row are kept.

Shapes: ``n`` rows of ``I`` inputs, ``O`` outputs, rank ``r``.
"""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from viva.engine.linear import product

__all__ = ["AdaptedLinear"]


class AdaptedLinear(nn.Linear):
    """A linear layer that shares its frozen tensors with another, and an adapter in float32 that starts at zero."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        # not nn.Linear's, which would make weights of its own
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = scale
        device = layer.weight.device
        self.lora_A = nn.Parameter(torch.zeros(rank, layer.in_features, device=device))
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, rank, device=device))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[..., I]`` inputs to ``[..., O]`` outputs, of the weight's type."""
        output: Any = _AdaptedProduct.apply(
            input.reshape(-1, self.in_features), self.weight, self.bias, self.lora_A, self.lora_B, self.scale
        )
        return output.view(*input.shape[:-1], self.out_features)


class _AdaptedProduct(torch.autograd.Function):
    """``[n, I]`` to ``[n, O]``. The adapter is rounded to the weight's type, its gradient is float32."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        lora_a: torch.Tensor,
        lora_b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        down, up = lora_a.to(weight.dtype), lora_b.to(weight.dtype)
        low = product(inputs, down).mul_(scale)
        output = product(inputs, weight, bias).addmm_(low, up.T)
        ctx.save_for_backward(inputs, weight, down, up, low)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        inputs, weight, down, up, low = ctx.saved_tensors
        grad = grad_outputs[0]
        slope = product(grad, up.T).mul_(ctx.scale)
        grad_inputs = product(grad, weight.T).addmm_(slope, down) if ctx.needs_input_grad[0] else None
        return grad_inputs, None, None, (slope.T @ inputs).float(), (grad.T @ low).float(), None
