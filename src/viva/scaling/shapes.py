"""The size of a model: parameters, FLOPs per token, bytes of its key/value cache.

Counted is a decoder with rotary positions, grouped-query attention and a gated feed-forward layer (Llama, Qwen2 and 3,
Mistral), without biases; a multiplication with an addition is two FLOPs.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from viva.scaling.tree import Cost

__all__ = ["PRESETS", "ModelShape", "read_shape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What counts of a model's ``config.json``."""

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
        """Of the output layer."""
        return self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        """All of them."""
        norms = self.layers * (2 * self.hidden + 2 * self.head_dim * self.qk_norm) + self.hidden
        return self.body_weights + self.head_weights * (1 if self.tied else 2) + norms

    def forward_flops(self, cost: Cost, targets: float) -> float:
        """Of a forward pass.

        Args:
            cost: Tokens and attention pairs.
            targets: Positions of which the logits are needed.
        """
        attention = 4 * self.layers * self.heads * self.head_dim
        return (
            2.0 * self.body_weights * cost.tokens + attention * cost.pairs + 2.0 * self.head_weights * targets
        )

    def train_flops(self, cost: Cost, targets: float, *, is_lora: bool) -> float:
        """Of a forward and a backward pass.

        A backward pass computes the gradients of all inputs, as much again as the forward pass (twice that in
        attention, which multiplies activations alone), and those of the weights, as much once more; an adapter saves
        the latter. The adapter's own FLOPs (its rank over the width of a layer) are left out.
        """
        matrices = 2.0 * (self.body_weights * cost.tokens + self.head_weights * targets)
        attention = 4.0 * self.layers * self.heads * self.head_dim * cost.pairs
        return matrices * (2 if is_lora else 3) + attention * 3

    def kv_bytes(self, bytes_per_value: float = 2.0) -> float:
        """Of one token's keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_value


PRESETS = {
    "8b": ModelShape(
        name="8b",
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=14336,
        vocab=128256,
    ),
    "70b": ModelShape(
        name="70b",
        hidden=8192,
        layers=80,
        heads=64,
        kv_heads=8,
        head_dim=128,
        ffn=28672,
        vocab=128256,
    ),
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
