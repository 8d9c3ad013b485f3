"""From tokens to hours on accelerators, with every assumption in one place.

The model of a step: agents' waves one after another (a wave's replies are decoded together, equally long), then the
judge, the scoring pass, the update. Sampling and training take turns on the same accelerators, on-policy. Nothing is
charged for moving weights, for communication, for stragglers or for failures, so the hours are a lower bound that
real runs miss by a factor that the utilisations below have to hold.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from viva.scaling.calls import Call
from viva.scaling.counts import Counts
from viva.scaling.shapes import ModelShape
from viva.scaling.tree import Cost, Path, rows_cost, tree_cost

__all__ = ["Assumptions", "StepTime", "cache_bytes", "step_flops", "step_time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """An accelerator, and how well it is used. The defaults are those of an H100 with 80 GB, in bfloat16."""

    peak_tflops: float = 989.0
    memory_gb: float = 80.0
    bandwidth_tb: float = 3.35
    """Per second."""
    mfu_prefill: float = 0.5
    """Share of the peak that prompts and scoring passes reach."""
    mfu_train: float = 0.35
    """That forward and backward passes reach."""
    bandwidth_share: float = 0.6
    """That decoding reaches."""
    memory_share: float = 0.9
    """That weights and caches may fill."""

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ValueError: If a number is not positive and finite, or a share above 1.
        """
        for name in ("peak_tflops", "memory_gb", "bandwidth_tb"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite; got {getattr(self, name)}")
        for name in ("mfu_prefill", "mfu_train", "bandwidth_share", "memory_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1; got {getattr(self, name)}")

    def split(self, shape: ModelShape) -> int:
        """Accelerators that one copy of the weights is spread over: the power of two that leaves half for caches."""
        needed = 2.0 * shape.parameters / (0.5 * self.memory_gb * 1e9)
        return 2 ** max(math.ceil(math.log2(needed)), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step."""

    prefill: float
    decode: float
    score: float
    train: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.prefill + self.decode + self.score + self.train


def step_flops(counts: Counts, shape: ModelShape, *, reuse: bool, is_lora: bool) -> float:
    """FLOPs of one step; of a prompt, the logits of its last position alone are needed."""
    flops = shape.forward_flops(counts.decoded, counts.decoded.tokens)
    for passes in (counts.prompts, counts.judge_prompts, counts.scored):
        flops += shape.forward_flops(passes.tree if reuse else passes.rows, passes.targets)
    trained = counts.trained.tree if reuse else counts.trained.rows
    return flops + shape.train_flops(trained, counts.trained.targets, is_lora=is_lora)


def _waves(calls: Sequence[Call]) -> list[list[Call]]:
    numbers = sorted({call.wave for call in calls})
    return [[call for call in calls if call.wave == number] for number in numbers]


def _prefills(calls: Sequence[Call], *, reuse: bool) -> list[Cost]:
    """What each wave's prompts add; with reuse, to the prompts of all waves before."""
    seen: list[Path] = []
    before, added = Cost(), list[Cost]()
    for wave in _waves(calls):
        prompts = [call.prompt for call in wave]
        if not reuse:
            added.append(rows_cost(prompts))
            continue
        seen += prompts
        now = tree_cost(seen)
        added.append(now + before.times(-1.0))
        before = now
    return added


def cache_bytes(calls: Sequence[Call], num_groups: int, shape: ModelShape, *, reuse: bool) -> float:
    """Keys and values of the largest wave, all groups in flight together."""
    largest = 0.0
    for wave in _waves(calls):
        prompts = [call.prompt for call in wave]
        cost = tree_cost(prompts) if reuse else rows_cost(prompts)
        largest = max(largest, cost.tokens + sum(call.reply for call in wave))
    return largest * num_groups * shape.kv_bytes()


def step_time(
    calls: Sequence[Call],
    counts: Counts,
    shape: ModelShape,
    accelerators: int,
    *,
    assumptions: Assumptions,
    reuse: bool = True,
    is_lora: bool = True,
) -> StepTime | None:
    """Seconds of one step.

    Args:
        calls: Of one group.
        counts: Of the step they make.
        shape: The model.
        accelerators: How many there are.
        assumptions: What they can do.
        reuse: Whether common beginnings are computed once. What a decoded token reads is counted without it.
        is_lora: Whether an adapter is trained.

    Returns:
        ``None`` if they cannot hold the model.
    """
    split = assumptions.split(shape)
    copies = accelerators // split
    if copies == 0:
        return None
    peak = assumptions.peak_tflops * 1e12
    prefill = decode = 0.0
    for wave, cost in zip(_waves(calls), _prefills(calls, reuse=reuse), strict=True):
        busy = min(copies, len(wave) * counts.num_groups) * split
        flops = shape.forward_flops(cost.times(counts.num_groups), 0.0)
        prefill += flops / (busy * peak * assumptions.mfu_prefill)
        decode += _decode_seconds(wave, counts.num_groups, shape, copies, assumptions)
    scored = counts.scored.tree if reuse else counts.scored.rows
    trained = counts.trained.tree if reuse else counts.trained.rows
    score_flops = shape.forward_flops(scored, counts.scored.targets)
    train_flops = shape.train_flops(trained, counts.trained.targets, is_lora=is_lora)
    return StepTime(
        prefill=prefill,
        decode=decode,
        score=score_flops / (accelerators * peak * assumptions.mfu_prefill),
        train=train_flops / (accelerators * peak * assumptions.mfu_train),
    )


def _decode_seconds(
    wave: Sequence[Call], num_groups: int, shape: ModelShape, copies: int, assumptions: Assumptions
) -> float:
    """A wave's calls are dealt to the copies; each decodes as many at once as its cache can hold.

    A token of all of them takes as long as reading weights and caches, or as multiplying, whichever is longer.
    """
    split = assumptions.split(shape)
    memory = split * assumptions.memory_gb * 1e9 * assumptions.memory_share
    bandwidth = split * assumptions.bandwidth_tb * 1e12 * assumptions.bandwidth_share
    flops = split * assumptions.peak_tflops * 1e12 * assumptions.mfu_prefill
    weights = 2.0 * shape.parameters
    total = len(wave) * num_groups
    reply = sum(call.reply for call in wave) / len(wave)
    context = rows_cost([call.prompt for call in wave]).tokens / len(wave) + reply / 2
    on_each = math.ceil(total / copies)
    room = max(int((memory - weights) / ((context + reply / 2) * shape.kv_bytes())), 1)
    turns = math.ceil(on_each / room)
    together = on_each / turns
    read = (weights + together * context * shape.kv_bytes()) / bandwidth
    multiplied = shape.forward_flops(Cost(tokens=together, pairs=together * context), together) / flops
    return turns * reply * max(read, multiplied)
