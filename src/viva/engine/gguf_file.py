"""The GGUF format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): a file's content, and llama.cpp's names.

The file is read here; the ``gguf`` package dequantises the weights.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PretrainedConfig

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """The cutting of text before byte-pair merges."""

    cuts: tuple[str, ...] = ()
    """Regular expressions whose matches are cut out of the text, one after the other."""
    is_whole: bool = False
    """Whether the last one matches every character, so that GPT-2's own expression does not follow."""
    composes: bool = False
    """Whether characters are composed first (Unicode's NFC)."""
    ignores_merges: bool = False
    """Whether a piece that is a token is that token, whatever the merges make of it."""


PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "llama-bpe": PreTokenizer(
        cuts=(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",),
        is_whole=True,
        ignores_merges=True,
    ),
    "qwen2": PreTokenizer(
        cuts=(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",),
        is_whole=True,
        composes=True,
    ),
    "smollm": PreTokenizer(cuts=(r"\p{N}",)),
}
"""By ``tokenizer.ggml.pre``."""

PARAMETERS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "attention.key_length": "head_dim",
}
"""Settings of an architecture, by name in the file, as ``transformers`` calls them."""
_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """An architecture: its names and its modules' in ``transformers``, and how a file stores its weights."""

    class_name: str
    model_type: str
    modules: Mapping[str, str]
    """By the name in the file; those of a layer without their beginning."""
    rotates_neighbours: bool = False
    """Whether neighbouring dimensions of queries and keys are rotated together, and not those of a head's halves."""
    norm_offset: int = 0
    """Number that a norm adds to its weights in ``transformers``, and that has been added in the file."""

    def from_file(self, array: "np.ndarray", module: str, config: "PretrainedConfig") -> "np.ndarray":
        """A float32 weight or bias of a module as ``transformers`` has it."""
        if self.rotates_neighbours and module in ("attn_q", "attn_k"):
            paired = array.reshape(-1, config.head_dim // 2, 2, *array.shape[1:])
            return paired.swapaxes(1, 2).reshape(array.shape)
        return array - self.norm_offset if self.norm_offset and module.endswith("norm") else array

    def to_file(self, array: "np.ndarray", module: str, config: "PretrainedConfig") -> "np.ndarray":
        """The inverse of `from_file`."""
        if self.rotates_neighbours and module in ("attn_q", "attn_k"):
            halves = array.reshape(-1, 2, config.head_dim // 2, *array.shape[1:])
            return halves.swapaxes(1, 2).reshape(array.shape)
        return array + self.norm_offset if self.norm_offset and module.endswith("norm") else array


ARCHITECTURES = {
    "llama": Architecture(
        class_name="LlamaForCausalLM", model_type="llama", modules=_MODULES, rotates_neighbours=True
    ),
    "qwen2": Architecture(class_name="Qwen2ForCausalLM", model_type="qwen2", modules=_MODULES),
    "qwen3": Architecture(class_name="Qwen3ForCausalLM", model_type="qwen3", modules=_MODULES),
    "gemma3": Architecture(
        class_name="Gemma3ForCausalLM",
        model_type="gemma3_text",
        modules=_MODULES
        | {
            "ffn_norm": "pre_feedforward_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norm_offset=1,
    ),
}
"""By ``general.architecture``. Mistral's models are stored as ``llama``."""
ROPE_FACTORS = "rope_freqs.weight"
SENTENCEPIECE = "llama"
"""The ``tokenizer.ggml.model`` of pieces of SentencePiece, which are merged by score."""
_NUMBERS = {
    kind: struct.Struct(f"<{code}") for kind, code in zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
"""By the number of a type of metadata."""
_UINT32, _STRING, _ARRAY, _UINT64 = 4, 8, 9, 10


@dataclass(frozen=True, slots=True)
class Field:
    """A value of the metadata with the number of its type, and of the type of its items."""

    value: Any
    kind: int
    items: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A stored tensor."""

    shape: tuple[int, ...]
    """Rows first, as in PyTorch."""
    type: int
    """A number of ``gguf.GGMLQuantizationType``."""
    offset: int
    """From the beginning of the tensors' data."""


class GgufFile:
    """The content of a GGUF file (version 2 or 3, little-endian).

    Raises:
        ValueError: It is no such file, or it ends too early.
        struct.error: It ends too early.
    """

    def __init__(self, path: Path) -> None:
        import numpy as np

        self._bytes = np.memmap(path, mode="r").view(np.ndarray)
        self._view = memoryview(cast(Any, self._bytes))
        self._place = 0
        magic, version = bytes(self._view[:4]), 0
        if magic == b"GGUF":
            self._place = 4
            version = self._number(_UINT32)
        if version not in (2, 3):
            raise ValueError(f"it begins with {magic!r} and version {version}")
        num_tensors, num_fields = self._number(_UINT64), self._number(_UINT64)
        self.typed_fields = dict(self._field() for _ in range(num_fields))
        """Metadata by its key."""
        self.fields: dict[str, Any] = {key: field.value for key, field in self.typed_fields.items()}
        """Values of the metadata by its key."""
        self.tensors = dict(self._tensor() for _ in range(num_tensors))
        alignment = int(self.fields.get("general.alignment", 32))
        self._data = -(-self._place // alignment) * alignment

    def floats(self, tensor: Tensor) -> "np.ndarray":
        """The tensor as a float32 NumPy array."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        kind = GGMLQuantizationType(tensor.type)
        numbers, size = GGML_QUANT_SIZES[kind]
        *rows, columns = tensor.shape
        start = self._data + tensor.offset
        stored = self._bytes[start : start + math.prod(tensor.shape) // numbers * size]
        return dequantize(stored.reshape(*rows, columns // numbers * size), kind).reshape(tensor.shape)

    def _number(self, kind: int) -> Any:
        layout = _NUMBERS[kind]
        (number,) = layout.unpack_from(self._view, self._place)
        self._place += layout.size
        return number

    def _string(self) -> str:
        length = self._number(_UINT64)
        start, self._place = self._place, self._place + length
        if self._place > len(self._view):
            raise ValueError("it ends within a text")
        return str(self._view[start : self._place], "utf-8")

    def _field(self) -> tuple[str, Field]:
        key = self._string()
        return key, self._value(self._number(_UINT32))

    def _value(self, kind: int) -> Field:
        if kind == _STRING:
            return Field(self._string(), kind)
        if kind != _ARRAY:
            return Field(self._number(kind), kind)
        items, length = self._number(_UINT32), self._number(_UINT64)
        return Field([self._value(items).value for _ in range(length)], kind, items)

    def _tensor(self) -> tuple[str, Tensor]:
        name = self._string()
        sizes = [int(self._number(_UINT64)) for _ in range(self._number(_UINT32))]
        return name, Tensor(
            shape=tuple(reversed(sizes)), type=self._number(_UINT32), offset=self._number(_UINT64)
        )


def read_gguf(path: Path) -> GgufFile:
    """A file whose model is supported.

    Raises:
        ValueError: It is damaged, or its architecture or tokenizer is not supported.
    """
    try:
        stored = GgufFile(path)
    # the file's numbers are taken for sizes and places
    except (ValueError, KeyError, OverflowError, MemoryError, RecursionError, struct.error) as error:
        raise ValueError(
            f"{str(path)!r} is no GGUF file that can be read ({error}); fetch it anew"
        ) from error
    architecture, model = (stored.fields.get(key) for key in ("general.architecture", "tokenizer.ggml.model"))
    pre = pre_name(stored)
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{str(path)!r} holds a model of architecture {architecture!r}; GGUF files are read of "
            f"{', '.join(ARCHITECTURES)}. Give a folder that transformers' save_pretrained wrote."
        )
    if model != SENTENCEPIECE and (model != "gpt2" or pre not in PRE_TOKENIZERS):
        raise ValueError(
            f"{str(path)!r} has a tokenizer of kind {model!r} with pre-tokenizer {pre!r}; supported are "
            f"{SENTENCEPIECE!r}, and 'gpt2' with {', '.join(PRE_TOKENIZERS)}. With another one ids would differ from "
            "those that the model was trained on. Give a folder with the model's own tokenizer.json."
        )
    return stored


def pre_name(stored: GgufFile) -> str:
    """The name of the pre-tokenizer."""
    return str(stored.fields.get("tokenizer.ggml.pre", "gpt-2"))


def llama_3_factors(config: "PretrainedConfig", head_size: int) -> "torch.Tensor":
    """Divisors of the rotary frequencies in the scaling of Llama 3.1 and later, half as many as a head's dimensions."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, head_size, 2) / head_size)
    return plain / ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]


def cannot_write(reason: str) -> ValueError:
    """The error of a model that a GGUF file cannot hold exactly; what to do instead."""
    return ValueError(
        f"this model cannot be written as a GGUF file: {reason}. Export it as a folder (to=FOLDER) and give the folder "
        "model in it to llama.cpp's convert_hf_to_gguf.py."
    )
