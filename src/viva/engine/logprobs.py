"""Logprobs of targets under the weights being trained, without holding all logits.

Logits of a position cost as much memory as the vocabulary is large, and time for every pass over them. They are
computed once, some rows at a time, and turned into their own gradient in place.

Shapes: ``M`` positions that carry a target, ``H`` hidden, ``K`` candidates per target, ``V`` vocabulary.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from viva.engine.model import head_logits

__all__ = ["rows_at_once", "target_logprobs"]

_LOGITS = 2**23
_ROWS = 128
"""More logits at once are no faster and leave the cache; fewer rows read the output layer too often."""


def rows_at_once(vocab_size: int, max_logits: int) -> int:
    """Positions whose logits are computed together, at least 1."""
    return max(1, min(max_logits // vocab_size, max(_ROWS, _LOGITS // vocab_size)))


def target_logprobs(
    module: Any, hidden: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Logprobs of target tokens.

    Args:
        module: The causal language model.
        hidden: ``[M, H]`` hidden states after the final norm.
        targets: ``[M, K]`` token ids.
        temperature: Divides the logits.

    Returns:
        ``[M, K]`` float32, with a graph that can be gone through once if gradients are enabled.
    """
    logits = head_logits(module, hidden)
    logprobs: Any = _TargetLogprobs.apply(logits if temperature == 1 else logits / temperature, targets)
    return logprobs


class _TargetLogprobs(torch.autograd.Function):
    """``[M, V]`` logits and ``[M, K]`` targets to ``[M, K]`` logprobs."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logprobs = logits.log_softmax(dim=1)
        ctx.save_for_backward(logprobs, targets)
        return logprobs.gather(1, targets)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        logprobs, targets = ctx.saved_tensors
        grad = grad_outputs[0]
        # nobody else has these logprobs: they become the gradient in their own place
        slopes = logprobs.exp_().mul_(-grad.sum(dim=1, keepdim=True))
        return slopes.scatter_add_(1, targets, grad), None
