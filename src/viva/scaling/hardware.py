"""From tokens to hours on accelerators, with every assumption in one place, and the size of a model.

Counted is a decoder with rotary positions, grouped-query attention and a gated feed-forward layer (Llama, Qwen2 and 3,
Mistral), without biases; a multiplication with an addition is two FLOPs.

The model of a step: agents' waves one after another (a wave's replies are decoded together, equally long), then the
judge, the scoring pass, the update. Sampling and training take turns on the same accelerators, on-policy. Nothing is
charged for moving weights, for communication, for stragglers or for failures, so the hours are a lower bound that
real runs miss by a factor that the utilisations below have to hold.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import chz

from viva.scaling.counts import Blocks, Call, Cost, Counts, rows_cost, tree_cost


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes in a model's ``config.json`` that matter."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    """Whether the output layer is the embeddings."""
    qk_norm: bool = False

    @property
    def body_weights(self) -> int:
        """Weights of all matrices that a token is multiplied with, but the output layer."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def head_weights(self) -> int:
        """Weights of the output layer."""
        return self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        """All of them."""
        norms = self.layers * (2 * self.hidden + 2 * self.head_dim * self.qk_norm) + self.hidden
        return self.body_weights + self.head_weights * (1 if self.tied else 2) + norms

    def forward_flops(self, cost: Cost, targets: float) -> float:
        """FLOPs of a forward pass; the logits of so many targets are needed."""
        attention = 4 * self.layers * self.heads * self.head_dim
        return (
            2.0 * self.body_weights * cost.tokens + attention * cost.pairs + 2.0 * self.head_weights * targets
        )

    def train_flops(self, cost: Cost, targets: float, *, is_lora: bool) -> float:
        """FLOPs of a forward and a backward pass.

        A backward pass computes the gradients of all inputs, as much again as the forward pass (twice that in
        attention, which multiplies activations alone), and those of the weights, as much once more; an adapter saves
        the latter. The adapter's own FLOPs (its rank over the width of a layer) are left out.
        """
        matrices = 2.0 * (self.body_weights * cost.tokens + self.head_weights * targets)
        attention = 4.0 * self.layers * self.heads * self.head_dim * cost.pairs
        return matrices * (2 if is_lora else 3) + attention * 3

    def kv_bytes(self) -> float:
        """Bytes of one token's keys and values, in bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2.0


_LLAMA_8B = ModelShape(
    name="8b", hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256
)
PRESETS = {
    "8b": _LLAMA_8B,
    "70b": replace(_LLAMA_8B, name="70b", hidden=8192, layers=80, heads=64, ffn=28672),
}
"""The shapes of Llama 3.1 8B and 70B."""

_COUNTED = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Values of ``model_type`` whose matrices are those of `ModelShape`."""


def read_shape(name: str) -> ModelShape:
    """A preset, or the shape in a model folder's ``config.json``.

    Raises:
        ValueError: If it is neither, or not such a decoder.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name).expanduser() / "config.json"
    if not path.is_file():
        raise ValueError(
            f"model={name} is neither {' nor '.join(PRESETS)} nor a folder with a config.json, nor was it loaded from "
            "the hub before; give one of these"
        )
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; give the folder of an intact model") from error
    config = cast(Mapping[str, Any], content if isinstance(content, dict) else {})
    kind = config.get("model_type")
    if kind not in _COUNTED:
        # experts, ungated layers and other attention have other sizes: a wrong count would look like a right one
        raise ValueError(
            f"{path} has model_type {kind!r}, which is not counted; counted are {', '.join(sorted(_COUNTED))}. Give "
            f"model={' or model='.join(PRESETS)} or a folder of such a model"
        )
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        return ModelShape(
            name=Path(name).name,
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            ffn=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qk_norm=kind == "qwen3",
        )
    except KeyError as error:
        raise ValueError(f"{path} has no {error.args[0]}; give the folder of an intact model") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f"{path} has a size that is no whole number above 0 ({error}); give the folder of an intact model"
        ) from error


_MEMORY_SHARE = 0.9
"""The share that weights and caches may fill."""


@chz.chz
class Assumptions:
    """An accelerator, and how well it is used. The defaults are those of an H100 with 80 GB, in bfloat16."""

    peak_tflops: float = chz.field(default=989.0, doc="of one accelerator, in bfloat16")
    memory_gb: float = chz.field(default=80.0, doc="of one accelerator")
    bandwidth_tb: float = chz.field(default=3.35, doc="TB/s of one accelerator's memory")
    mfu_prefill: float = chz.field(default=0.5, doc="share of the peak that prompts reach")
    mfu_train: float = chz.field(default=0.35, doc="share of the peak that training reaches")
    bandwidth_share: float = chz.field(default=0.6, doc="share of the bandwidth that decoding reaches")

    @chz.validate
    def check(self) -> None:
        """Check; `ValueError` if a number is not positive and finite, or a share above 1."""
        for name in ("peak_tflops", "memory_gb", "bandwidth_tb"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite; got {getattr(self, name)}")
        for name in ("mfu_prefill", "mfu_train", "bandwidth_share"):
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
        flops += shape.forward_flops(passes.cost(reuse=reuse), passes.targets)
    trained = counts.trained
    return flops + shape.train_flops(trained.cost(reuse=reuse), trained.targets, is_lora=is_lora)


def _waves(calls: Sequence[Call]) -> list[list[Call]]:
    numbers = sorted({call.wave for call in calls})
    return [[call for call in calls if call.wave == number] for number in numbers]


def _cost(paths: Sequence[Blocks], *, reuse: bool) -> Cost:
    return tree_cost(paths) if reuse else rows_cost(paths)


def _prefills(calls: Sequence[Call], *, reuse: bool) -> list[Cost]:
    """The cost that each wave's prompts add to those of all waves before."""
    prompts: list[Blocks] = []
    totals = [Cost()]
    for wave in _waves(calls):
        prompts += [call.prompt for call in wave]
        totals.append(_cost(prompts, reuse=reuse))
    return [after + before.times(-1.0) for before, after in pairwise(totals)]


def cache_bytes(calls: Sequence[Call], num_groups: int, shape: ModelShape, *, reuse: bool) -> float:
    """Keys and values of the largest wave, all groups in flight together."""
    sizes = [
        _cost([call.prompt for call in wave], reuse=reuse).tokens + sum(call.reply for call in wave)
        for wave in _waves(calls)
    ]
    return max(sizes, default=0.0) * num_groups * shape.kv_bytes()


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
    """Seconds of one step, of which `calls` are those of one group; ``None`` if the accelerators cannot hold the model.

    With `reuse` common beginnings are computed once; what a decoded token reads is counted without it.
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
    scored, trained = counts.scored, counts.trained
    score_flops = shape.forward_flops(scored.cost(reuse=reuse), scored.targets)
    train_flops = shape.train_flops(trained.cost(reuse=reuse), trained.targets, is_lora=is_lora)
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
    memory = split * assumptions.memory_gb * 1e9 * _MEMORY_SHARE
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
