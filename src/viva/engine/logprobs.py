"""Logprobs of targets under the weights being trained, without holding all logits.

Logits of a position cost as much memory as the vocabulary is large. They are computed in chunks; where a gradient is
needed and they do not fit together, a chunk's logits are computed again in the backward pass instead of being kept.

Shapes: ``B`` sequences padded to ``T`` tokens, ``M`` positions that carry a target, ``K`` candidates per target.
"""

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from viva.engine.model import head_logits

__all__ = ["target_logprobs"]


def target_logprobs(
    module: Any, hidden: torch.Tensor, targets: torch.Tensor, max_logits: int
) -> torch.Tensor:
    """Logprobs of target tokens.

    Args:
        module: The causal language model.
        hidden: ``[M, H]`` hidden states after the final norm.
        targets: ``[M]`` or ``[M, K]`` token ids.
        max_logits: Logits to hold at once.

    Returns:
        Float32 of the targets' shape, with a graph if gradients are enabled.
    """
    vocab_size = module.get_output_embeddings().weight.shape[0]
    size = max(1, max_logits // vocab_size)
    if len(hidden) <= size:
        return _logprobs(module, hidden, targets)
    chunks: list[torch.Tensor] = []
    for start in range(0, len(hidden), size):
        part, wanted = hidden[start : start + size], targets[start : start + size]
        if torch.is_grad_enabled():
            chunks.append(checkpoint(_logprobs, module, part, wanted, use_reentrant=False))  # pyright: ignore[reportArgumentType]
        else:
            chunks.append(_logprobs(module, part, wanted))
    return torch.cat(chunks)


def _logprobs(module: Any, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = head_logits(module, hidden)
    candidates = targets if targets.ndim == 2 else targets[:, None]
    chosen = logits.gather(1, candidates) - logits.logsumexp(dim=1, keepdim=True)
    return chosen if targets.ndim == 2 else chosen[:, 0]
