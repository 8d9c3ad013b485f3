"""The mathematics of drawing a token.

A token is found by inverting the cumulative distribution at one uniform number per (request seed, sample index,
position). Weights are float32, as logits are; they are added up span by span, and the sums of spans, and of the tokens
of the one span the number falls into, in float64. The draw of one row is a function of its own logits and its own
number, so a sample does not depend on what else is in the batch.

Shapes: ``B`` rows, ``V`` vocabulary, ``k`` alternatives.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tinker import SamplingParams

from viva.engine.kernels import can_compile
from viva.engine.kernels import draw as draw_compiled

_BLOCK = 64
_SPAN = 128
"""Tokens whose weights are added up before a number is looked for."""
_WORD = 2**64

Alternatives = tuple[np.ndarray, np.ndarray]
"""The most likely tokens, most likely first, and their logprobs: minus infinity for those that could not be drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """One token per row, on the CPU."""

    tokens: list[int]
    logprobs: list[float]
    """Logprob of each token under the distribution it was drawn from."""
    finite: list[bool]
    """False where the logits were not numbers; token and logprob of such a row mean nothing."""
    alternatives: Alternatives | None
    """``[B, k]`` each, if any were asked for."""


def uniform_numbers(seed: int, sample_index: int) -> Iterator[float]:
    """The numbers in ``[0, 1)`` of one sample: number ``i`` depends on ``(seed, sample_index, i)`` alone."""
    key = np.array([seed % _WORD, sample_index % _WORD], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    while True:
        yield from generator.random(_BLOCK).tolist()


def draw_tokens(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    uniforms: Sequence[float],
    num_alternatives: int = 0,
) -> Draws:
    """Draw one token per row of ``[B, V]`` float32 logits.

    Every row has a temperature, where 0 means greedy (the most likely token, its logprob that of the untempered
    distribution), its truncation, and a number in ``[0, 1)``, which a greedy row ignores. `num_alternatives` is ``k``.
    """
    device = logits.device
    divisors = torch.tensor([[row.temperature or 1.0] for row in params], dtype=torch.float64, device=device)
    truncated = [
        index for index, row in enumerate(params) if row.temperature > 0 and (row.top_k > 0 or row.top_p < 1)
    ]
    if truncated:
        rows = torch.tensor(truncated, device=device)
        exact = logits[rows].double() / divisors[rows]  # rounded, a token more or less might stay
        keep = truncation_mask(exact, [params[index] for index in truncated])
        logits = logits.index_copy(0, rows, logits[rows].masked_fill(~keep, float("-inf")))
    greedy = [index for index, row in enumerate(params) if row.temperature == 0]
    draw = draw_compiled if can_compile(logits) else _draw
    drawn = draw(logits, divisors[:, 0], greedy, uniforms)
    tokens, logprobs, totals = drawn.tolist()
    alternatives = None
    if num_alternatives:
        scaled = (logits - logits.amax(dim=1, keepdim=True)) / divisors.to(logits.dtype)
        values, indices = scaled.topk(min(num_alternatives, logits.shape[1]), dim=1)
        sums = drawn[2, :, None].log().to(device)
        alternatives = indices.cpu().numpy(), (values - sums).float().cpu().numpy()
    return Draws(
        tokens=[int(token) for token in tokens],
        logprobs=logprobs,
        finite=[math.isfinite(total) for total in totals],
        alternatives=alternatives,
    )


def _draw(
    logits: torch.Tensor, divisors: torch.Tensor, greedy: Sequence[int], uniforms: Sequence[float]
) -> torch.Tensor:
    """The draw by torch's operations; see `viva.engine.kernels.draw`."""
    top = logits.amax(dim=1, keepdim=True)
    scaled = (logits - top) / divisors[:, None].to(logits.dtype)
    numbers = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None]
    tokens, totals = _search(scaled.exp(), numbers)
    if greedy:
        rows = torch.tensor(greedy, device=logits.device)
        tokens[rows] = logits[rows].argmax(dim=1, keepdim=True)
    logprobs = (logits.gather(1, tokens).double() - top) / divisors[:, None] - totals.log()
    # one transfer from the device; token ids are exact in float64
    return torch.cat([tokens.double(), logprobs, totals], dim=1).T.cpu()


def _search(weights: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Search the cumulative distributions of ``[B, V]`` weights, one above zero in each, for numbers in ``[0, 1)``.

    Returns:
        Tokens ``[B, 1]``, with a weight above zero where weights are numbers, and sums of the rows' weights ``[B, 1]``.
    """
    size = weights.shape[1]
    whole = size // _SPAN * _SPAN
    spans = [weights[:, :whole].unflatten(1, (-1, _SPAN)).sum(2), weights[:, whole:].sum(1, keepdim=True)]
    ends = torch.cat(spans, dim=1).double().cumsum(dim=1)
    totals = ends[:, -1:]
    # strictly below the sum, here and in the span, so that a search always ends on something above zero
    targets = torch.minimum(numbers * totals, totals.nextafter(torch.zeros_like(totals)))
    span = torch.searchsorted(ends, targets, right=True).clamp(max=ends.shape[1] - 1)
    before = ends.gather(1, (span - 1).clamp(min=0)).masked_fill(span == 0, 0)
    places = span * _SPAN + torch.arange(_SPAN, device=weights.device)
    within = (
        weights.gather(1, places.clamp(max=size - 1)).masked_fill(places >= size, 0).double().cumsum(dim=1)
    )
    most = within[:, -1:]
    rest = torch.minimum(targets - before, most.nextafter(torch.zeros_like(most)))
    return (span * _SPAN + torch.searchsorted(within, rest, right=True)).clamp(max=size - 1), totals


def truncation_mask(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Tokens that stay after top-k and then top-p (on what top-k left, renormalised): at least one per row.

    The tempered logits are float64. Ties are broken by the lower token id, so exactly ``top_k`` tokens stay.
    """
    size = scaled.shape[1]
    limits = torch.tensor([row.top_k if row.top_k > 0 else size for row in params], device=scaled.device)
    masses = torch.tensor([row.top_p for row in params], dtype=torch.float64, device=scaled.device)
    values, order = scaled.sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(size, device=scaled.device)
    probabilities = values.masked_fill(ranks >= limits[:, None], float("-inf")).softmax(dim=1)
    before = probabilities.cumsum(dim=1) - probabilities
    keep = (ranks < limits[:, None]) & ((before < masses[:, None]) | (masses[:, None] >= 1))
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter(1, order, keep)
