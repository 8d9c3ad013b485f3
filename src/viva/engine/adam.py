"""AdamW on named parameters.

Kingma and Ba 2015, arXiv 1412.6980; decoupled decay: Loshchilov and Hutter 2019, arXiv 1711.05101.
"""

import math
from collections.abc import Mapping

import torch
from tinker import AdamParams
from torch import nn

_SMALLEST_EPS = torch.finfo(torch.float32).tiny
"""Anything less is 0 in float32, and a gradient of 0 would be divided by it."""
_KINDS = ("mean", "square")
"""Moments of a parameter."""


def check_adam(params: AdamParams) -> None:
    """Refuse settings with which a step makes no sense, by a `ValueError`. A learning rate of 0 is allowed."""
    for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
        value = getattr(params, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a number of 0 or more; got {value}.")
    for name in ("beta1", "beta2"):
        value = getattr(params, name)
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be at least 0 and below 1, for example 0.9; got {value}.")
    if not (math.isfinite(params.eps) and params.eps >= _SMALLEST_EPS):
        raise ValueError(f"eps must be above 0 (in float32), for example 1e-8; got {params.eps}.")


class AdamW:
    """The update of ``torch.optim.AdamW``, with settings given per step and a state that can be stored."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self.num_steps = 0
        self.moments: dict[str, torch.Tensor] = {}
        """By ``mean.<parameter>`` and ``square.<parameter>``."""

    def step(self, params: AdamParams) -> dict[str, float]:
        """Update the parameters from their gradients; gradients are left as they are.

        Returns:
            ``grad_norm``, the global norm before clipping.

        Raises:
            FloatingPointError: The gradient is not finite; nothing was changed.
        """
        gradients = {
            name: parameter.grad for name, parameter in self._parameters.items() if parameter.grad is not None
        }
        norm = torch.nn.utils.get_total_norm(list(gradients.values()))
        if not torch.isfinite(norm):
            raise FloatingPointError(
                f"The gradient's norm is {norm.item()}; the step was not taken and the weights are unchanged. "
                "Lower the learning rate or look for extreme advantages or logprobs in the data."
            )
        scale = 1.0
        if params.grad_clip_norm > 0:
            scale = min(1.0, params.grad_clip_norm / (norm.item() + 1e-6))
        self.num_steps += 1
        with torch.no_grad():
            for name, gradient in gradients.items():
                self._update(name, gradient * scale if scale < 1 else gradient, params)
        return {"grad_norm": norm.item()}

    def _update(self, name: str, gradient: torch.Tensor, params: AdamParams) -> None:
        parameter = self._parameters[name]
        keys = [f"{kind}.{name}" for kind in _KINDS]
        if keys[0] not in self.moments:
            self.moments |= {key: torch.zeros_like(parameter) for key in keys}
        mean, square = (self.moments[key] for key in keys)
        if params.weight_decay:
            parameter.mul_(1 - params.learning_rate * params.weight_decay)
        mean.lerp_(gradient, 1 - params.beta1)
        square.mul_(params.beta2).addcmul_(gradient, gradient, value=1 - params.beta2)
        corrected = (square.sqrt() / (1 - params.beta2**self.num_steps) ** 0.5).add_(params.eps)
        parameter.addcdiv_(mean, corrected, value=-params.learning_rate / (1 - params.beta1**self.num_steps))

    def load(self, moments: Mapping[str, torch.Tensor], num_steps: int) -> None:
        """Take over stored moments; `ValueError` if they belong to other parameters."""
        owners = {f"{kind}.{name}": owner for kind in _KINDS for name, owner in self._parameters.items()}
        foreign = sorted(set(moments) - set(owners))
        if foreign:
            raise ValueError(f"The optimiser state has parameters this model does not train: {foreign[:3]}.")
        self.num_steps = num_steps
        self.moments = {
            key: moments[key].to(owner.device, owner.dtype).clone()
            for key, owner in owners.items()
            if key in moments
        }
