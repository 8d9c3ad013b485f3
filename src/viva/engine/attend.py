"""The attention of one forward pass over rows of different lengths, by whichever operation is fastest for it.

Shapes: ``B`` rows, ``T`` new tokens per row, ``L`` keys, ``Q`` query heads, ``K`` key-value heads, ``G = Q / K``,
``D`` head size.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from viva.engine.kernels import attend_many, attend_one, can_compile
from viva.engine.step import RaggedStep
from viva.engine.trunks import Part, average, two_part_attention

__all__ = ["attend"]

_Averages = tuple[torch.Tensor, torch.Tensor]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: RaggedStep,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of the rows that take part in a forward pass.

    Args:
        query: ``[B, Q, T, D]``.
        key: What `RaggedCache.update` returned.
        value: As `key`.
        step: Of the pass.
        scaling: Of the scores; the inverse root of ``D`` if left out.
        window: Keys that are seen, counting back from the query's own.
        softcap: Bound of the scores.

    Returns:
        ``[B, T, Q, D]``, contiguous.
    """
    step.num_attended += 1
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    compiled = softcap is None and can_compile(query)
    if step.parts is not None:
        folded = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
        if compiled:
            averages = _compiled_averages(query, folded.shape, step, scale, window)
        else:
            averages = _own_averages(folded, key, value, step, scale, window, softcap)
        where = step.parts, step.layer, step.positions
        output = two_part_attention(folded, averages, *where, scale, window, softcap).reshape(query.shape)
    elif compiled:
        output = _attend_compiled(query, step, scale, window)[0]
    elif softcap is not None:
        output = _softcapped(query, key, value, step.mask(window), scale, softcap)
    elif step.num_new == 1:
        output = _attend_one(query, key, value, step, scale, window)
    else:
        causal = step.causal(window)
        output = scaled_dot_product_attention(
            query,
            key.repeat_interleave(groups, 1),
            value.repeat_interleave(groups, 1),
            attn_mask=None if causal else step.bias(window, query.dtype),
            is_causal=causal,
            scale=scale,
        )
    return output.transpose(1, 2).contiguous()


def _attend_compiled(query: torch.Tensor, step: RaggedStep, scale: float, window: int | None) -> _Averages:
    """Averages over the rows' own tokens, ``[B, Q, T, D]``, and logarithms of the sums of weights, ``[B, Q, T]``."""
    kernel = attend_one if step.num_new == 1 else attend_many
    return kernel(query, step.store, step.start, step.lengths, scale, window)


def _compiled_averages(
    query: torch.Tensor, shape: torch.Size, step: RaggedStep, scale: float, window: int | None
) -> Callable[[Part], _Averages]:
    """Averages over the rows' own tokens for `two_part_attention`, which has queries in another shape."""
    found = _attend_compiled(query, step, scale, window)
    output, sums = found[0].reshape(shape), found[1].view(shape[:3])
    return lambda part: (output[part.rows], sums[part.rows])


def _own_averages(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: RaggedStep,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Callable[[Part], _Averages]:
    """Averages over the rows' own tokens for `two_part_attention`, part by part."""
    bias = step.bias(window, query.dtype, query.shape[2] // step.num_new)

    def averages(part: Part) -> _Averages:
        mask = None if bias is None else bias[part.rows, :, :, : part.length]
        known = key[part.rows, :, : part.length], value[part.rows, :, : part.length]
        return average(query[part.rows], *known, mask, scale, softcap)

    return averages


def _attend_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: RaggedStep,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attention of one new token per row, ``[B, Q, 1, D]``, without copying keys, where kernels are not for it.

    The query heads that share keys become queries of one head.
    """
    rows, heads, _, size = query.shape
    folded = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    bias = step.bias(window, query.dtype)
    parts = [
        scaled_dot_product_attention(
            folded[part],
            key[part, :, :length],
            value[part, :, :length],
            attn_mask=None if bias is None else bias[part, :, :, :length],
            scale=scale,
        )
        for part, length in step.groups
    ]
    output = parts[0] if len(parts) == 1 else torch.cat(parts)
    return output.reshape(rows, heads, 1, value.shape[-1])


def _softcapped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    """Attention whose scores are bounded by ``softcap * tanh(score / softcap)`` (Gemma 2)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value)
