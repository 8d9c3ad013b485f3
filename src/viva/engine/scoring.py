"""Logprobs of a prompt's own tokens, untempered.

Shapes: ``P`` prompt tokens, ``V`` vocabulary, ``k`` alternatives, ``K`` chosen targets per position.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
import torch

from viva.engine.model import head_logits
from viva.engine.sdk import make_topk

__all__ = ["PromptScoring", "make_scoring", "not_finite", "score_prompt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScoring:
    """What to report about a prompt's tokens."""

    first: int
    """First position to score, at least 1: position 0 has nothing before it."""
    logprobs: bool
    """The prompt's own tokens."""
    topk: int
    """The most likely tokens."""
    targets: np.ndarray | None
    """``[P - 1, K]`` chosen token ids; row ``i`` is scored at position ``i + 1``, -1 scores nothing."""


def make_scoring(
    num_tokens: int,
    vocab_size: int,
    *,
    logprobs: bool,
    topk: int,
    last_n: int | None,
    targets: tinker.TensorData | None,
) -> PromptScoring | None:
    """Check what a request asks to know about its prompt; ``None`` if nothing.

    Raises:
        ValueError: A setting out of its range.
    """
    if topk < 0:
        raise ValueError(f"topk_prompt_logprobs must be at least 0, not {topk}.")
    if last_n is not None and not logprobs:
        raise ValueError(
            "prompt_logprobs_last_n applies to prompt logprobs; set include_prompt_logprobs=True."
        )
    if last_n is not None and not 1 <= last_n <= num_tokens - 1:
        raise ValueError(
            f"prompt_logprobs_last_n must be from 1 to {num_tokens - 1} for this prompt, not {last_n}."
        )
    ids = None
    if targets is not None:
        ids = (
            targets.to_numpy(pad_value=-1) if targets.sparse_crow_indices is not None else targets.to_numpy()
        )
        if targets.dtype != "int64" or ids.ndim != 2 or len(ids) != num_tokens - 1:
            raise ValueError(
                f"target_prompt_logprobs must be int64 of shape [{num_tokens - 1}, K] for this prompt, not "
                f"{targets.dtype} of shape {list(ids.shape)}."
            )
        if ids.min(initial=-1) < -1 or ids.max(initial=-1) >= vocab_size:
            raise ValueError(f"target_prompt_logprobs has ids outside -1 to {vocab_size - 1}.")
    if not logprobs and not topk and ids is None:
        return None
    first = 1 if last_n is None else num_tokens - last_n
    if ids is not None:
        named = np.flatnonzero((ids >= 0).any(axis=1))
        first = min(first, int(named[0]) + 1) if len(named) else first
    return PromptScoring(first=first, logprobs=logprobs, topk=topk, targets=ids)


def score_prompt(
    module: Any, hidden: torch.Tensor, prompt: np.ndarray, scoring: PromptScoring, max_logits: int
) -> dict[str, Any]:
    """Fields of the response that concern the prompt.

    Args:
        module: The causal language model.
        hidden: ``[P - first, H]`` hidden states of positions ``first - 1 .. P - 2``, which predict ``first .. P - 1``.
        prompt: ``[P]`` token ids.
        scoring: What to report.
        max_logits: Logits to hold at once.

    Raises:
        FloatingPointError: Logits are not finite.
    """
    num_tokens, first = len(prompt), scoring.first
    own = np.full(num_tokens, np.nan, dtype=np.float32)
    topk_ids = np.zeros((num_tokens, scoring.topk), dtype=np.int64)
    topk_values = np.full((num_tokens, scoring.topk), -np.inf, dtype=np.float32)
    chosen = None if scoring.targets is None else np.zeros(scoring.targets.shape, dtype=np.float32)
    vocab_size = module.get_output_embeddings().out_features
    size = max(1, max_logits // vocab_size)
    for start in range(0, len(hidden), size):
        logits = head_logits(module, hidden[start : start + size])
        totals = logits.logsumexp(dim=1, keepdim=True)
        if not torch.isfinite(totals).all():
            raise not_finite("of the prompt")
        span = slice(first + start, first + start + len(logits))
        tokens = torch.from_numpy(prompt[span]).to(logits.device)
        own[span] = (logits.gather(1, tokens[:, None]) - totals)[:, 0].cpu().numpy()
        if scoring.topk:
            values, ids = logits.topk(min(scoring.topk, vocab_size), dim=1)
            topk_ids[span, : ids.shape[1]] = ids.cpu().numpy()
            topk_values[span, : ids.shape[1]] = (values - totals).cpu().numpy()
        if chosen is not None and scoring.targets is not None:
            rows = slice(span.start - 1, span.stop - 1)
            ids = scoring.targets[rows]
            picked = (
                (logits.gather(1, torch.from_numpy(ids.clip(min=0)).to(logits.device)) - totals).cpu().numpy()
            )
            chosen[rows] = np.where(ids >= 0, picked, 0.0)
    result: dict[str, Any] = {}
    if scoring.logprobs:
        result["prompt_logprobs_np"] = own
    if scoring.topk:
        result["topk_prompt_logprobs_np"] = make_topk(topk_ids, topk_values)
    if chosen is not None:
        result["target_prompt_logprobs"] = tinker.TensorData.from_numpy(chosen)
    return result


def not_finite(where: str) -> FloatingPointError:
    """The error of logits that are not finite."""
    return FloatingPointError(
        f"The model's logits {where} are not finite numbers. If training led there, go back to an earlier checkpoint "
        "and lower the learning rate; else try precision='float32'."
    )
