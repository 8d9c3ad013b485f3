"""Models in GGUF files, the format of llama.cpp: unpacked once into a folder that ``transformers`` reads.

The file is read here, once (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md); the ``gguf`` package
dequantises the weights. ``transformers`` reads such a file twice and slowly, and drops the pre-tokenizer (how text is
cut before byte-pair merges, ``tokenizer.ggml.pre``) and the factors of rotary frequencies (``rope_freqs``).
"""

import hashlib
import json
import math
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from viva.engine.loading import load_errors

if TYPE_CHECKING:
    import numpy as np
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "gpt-2": (),
    "llama-bpe": (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",),
    "qwen2": (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",),
    "smollm": (r"\p{N}",),
}
"""By ``tokenizer.ggml.pre``: regular expressions whose matches are cut out of the text, one after the other. GPT-2's
own expression follows where the last one does not match every character (``gpt-2``, ``smollm``)."""

_WHOLE = frozenset({"llama-bpe", "qwen2"})
"""Pre-tokenizers whose expression matches every character, so that GPT-2's does not follow."""
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""By ``general.architecture``: the class of ``transformers``. Mistral's models are stored as ``llama``."""
_PARAMETERS = {
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
_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<kind>weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_NUMBERS = {
    kind: struct.Struct(f"<{code}") for kind, code in zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
"""By the number of a type of metadata."""
_STRING, _ARRAY = 8, 9
_CONTROL, _USER_DEFINED = 3, 4
"""Values of ``tokenizer.ggml.token_type``."""
_FORMAT = 2
"""Part of the unpacked folder's name; it changes when a file is unpacked in another way."""
_SOURCE = "gguf.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """A stored tensor."""

    shape: tuple[int, ...]
    """Rows first, as in PyTorch."""
    type: int
    """A number of ``gguf.GGMLQuantizationType``."""
    offset: int
    """From the beginning of the tensors' data."""


class _File:
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
            version = self._number(4)
        if version not in (2, 3):
            raise ValueError(f"it begins with {magic!r} and version {version}")
        num_tensors, num_fields = self._number(10), self._number(10)
        self.fields: dict[str, Any] = {}
        """Metadata by its key."""
        for _ in range(num_fields):
            key = self._string()
            self.fields[key] = self._value(self._number(4))
        self.tensors = dict(self._tensor() for _ in range(num_tensors))
        alignment = int(self.fields.get("general.alignment", 32))
        self._data = -(-self._place // alignment) * alignment

    def field(self, key: str, default: Any = None) -> Any:
        """Metadata of a key."""
        return self.fields.get(key, default)

    def floats(self, tensor: _Tensor) -> "np.ndarray":
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
        length = self._number(10)
        start, self._place = self._place, self._place + length
        if self._place > len(self._view):
            raise ValueError("it ends within a text")
        return str(self._view[start : self._place], "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(kind)
        inner, length = self._number(4), self._number(10)
        return [self._value(inner) for _ in range(length)]

    def _tensor(self) -> tuple[str, _Tensor]:
        name = self._string()
        sizes = [int(self._number(10)) for _ in range(self._number(4))]
        return name, _Tensor(shape=tuple(reversed(sizes)), type=self._number(4), offset=self._number(10))


def cache_folder() -> Path:
    """Folder for files that can be made or fetched again: ``$VIVA_CACHE``, by default ``~/.cache/viva``."""
    return Path(os.environ.get("VIVA_CACHE") or Path.home() / ".cache" / "viva")


def is_gguf(name: str) -> bool:
    """Whether a model's name is the path of a GGUF file."""
    return name.lower().endswith(".gguf") and os.path.isfile(os.path.expanduser(name))


def gguf_folder(file: str | Path) -> Path:
    """Folder with the model of a GGUF file: float32 safetensors, configuration, tokenizer and chat template.

    It is made on first use under ``$VIVA_CACHE`` (default ``~/.cache/viva``) and named after the file's SHA-256, which
    stands in its ``gguf.json``.

    Raises:
        ValueError: The file is damaged, or its architecture, pre-tokenizer or something else in it is not supported.
    """
    path = Path(file).expanduser()
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    root = cache_folder() / "gguf"
    target = root / f"{path.stem}-{digest[:16]}-{_FORMAT}"
    if not target.is_dir():
        stored = _read(path)
        root.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".unpacked-", dir=root))
        try:
            with load_errors(str(path)):
                _save_model(stored, staging)
                _tokenizer(stored).save_pretrained(staging)
            source = {"file": path.name, "sha256": digest, "tokenizer.ggml.pre": _pre(stored)}
            (staging / _SOURCE).write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
            staging.chmod(0o755)
            if not target.is_dir():  # else another process was quicker
                staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


def _read(path: Path) -> _File:
    try:
        stored = _File(path)
    # the file's numbers are taken for sizes and places
    except (ValueError, KeyError, OverflowError, MemoryError, RecursionError, struct.error) as error:
        raise ValueError(
            f"{str(path)!r} is no GGUF file that can be read ({error}); fetch it anew"
        ) from error
    architecture, model, pre = (
        stored.field("general.architecture"),
        stored.field("tokenizer.ggml.model"),
        _pre(stored),
    )
    if architecture not in _ARCHITECTURES:
        raise ValueError(
            f"{str(path)!r} holds a model of architecture {architecture!r}; GGUF files are read of "
            f"{', '.join(_ARCHITECTURES)}. Give a folder that transformers' save_pretrained wrote."
        )
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"{str(path)!r} has a tokenizer of kind {model!r} with pre-tokenizer {pre!r}; supported is 'gpt2' with "
            f"{', '.join(PRE_TOKENIZERS)}. With another one ids would differ from those that the model was trained on. "
            "Give a folder with the model's own tokenizer.json."
        )
    return stored


def _pre(stored: _File) -> str:
    return str(stored.field("tokenizer.ggml.pre", "gpt-2"))


def _save_model(stored: _File, folder: Path) -> None:
    """Write weights and configuration; tensors are renamed, and rotated as ``transformers`` rotates."""
    import numpy as np
    from safetensors.numpy import save_file

    config = _config(stored)
    weights: dict[str, np.ndarray] = {}
    for name, tensor in stored.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        found = _TENSOR.fullmatch(name)
        module = _MODULES.get(found["module"]) if found else None
        if found is None or module is None:
            raise ValueError(f"it has a tensor {name!r}, which its architecture here does not know")
        array = stored.floats(tensor)
        if config.model_type == "llama" and found["module"] in ("attn_q", "attn_k"):
            # llama.cpp turns neighbours, transformers the two halves of a head
            array = array.reshape(-1, config.head_dim // 2, 2, *array.shape[1:])
            array = array.swapaxes(1, 2).reshape(tensor.shape)
        layer = f"model.layers.{found['layer']}." if found["layer"] is not None else ""
        weights[f"{layer}{module}.{found['kind']}"] = np.ascontiguousarray(array)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)


def _config(stored: _File) -> "PretrainedConfig":
    from transformers import AutoConfig

    architecture = stored.field("general.architecture")
    options = {
        ours: stored.field(f"{architecture}.{theirs}")
        for theirs, ours in _PARAMETERS.items()
        if f"{architecture}.{theirs}" in stored.fields
    }
    if (scaling := stored.field(f"{architecture}.rope.scaling.type", "none")) != "none":
        raise ValueError(f"it scales rotary frequencies by {scaling!r}, which is not supported")
    options.setdefault("head_dim", options["hidden_size"] // options["num_attention_heads"])
    options |= {f"{name}_id": number for name, number in _special(stored).items()}
    if architecture == "llama":
        options["attention_bias"] = "blk.0.attn_q.bias" in stored.tensors
    config: Any = AutoConfig.for_model(
        architecture,
        architectures=[_ARCHITECTURES[architecture]],
        vocab_size=stored.tensors["token_embd.weight"].shape[0],
        tie_word_embeddings="output.weight" not in stored.tensors,
        dtype="float32",
        **options,
    )
    if _ROPE_FACTORS in stored.tensors:
        _scale_rotation(config, stored.floats(stored.tensors[_ROPE_FACTORS]))
    return config


def _scale_rotation(config: "PretrainedConfig", factors: "np.ndarray") -> None:
    """Give the configuration the scaling of Llama 3.1 and later that has these factors; `ValueError` if none has."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    config.rope_parameters |= {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled = cast(Any, ROPE_INIT_FUNCTIONS["llama3"])(config, torch.device("cpu"))[0]
    if not torch.allclose(plain / scaled, torch.tensor(factors), rtol=1e-3):
        raise ValueError(f"its {_ROPE_FACTORS} is not the scaling of Llama 3, and no other one is supported")


def _special(stored: _File) -> dict[str, int]:
    """Ids of ``bos_token``, ``eos_token``, ``unk_token`` and ``pad_token``, those that the file names."""
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    found = {short: stored.field(f"tokenizer.ggml.{name}_token_id") for name, short in names.items()}
    return {f"{short}_token": int(number) for short, number in found.items() if number is not None}


def _tokenizer(stored: _File) -> "PreTrainedTokenizerBase":
    """The file's tokenizer: byte-level BPE, cut as ``tokenizer.ggml.pre`` says."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )
    from transformers import PreTrainedTokenizerFast

    pre, special = _pre(stored), _special(stored)
    tokens: Sequence[str] = stored.field("tokenizer.ggml.tokens", [])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    left, right = zip(
        *(merge.split(" ", 1) for merge in stored.field("tokenizer.ggml.merges", [])), strict=True
    )
    inner = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=list(zip(left, right, strict=True)), ignore_merges=pre == "llama-bpe"
        )
    )
    cuts = [pre_tokenizers.Split(Regex(rule), behavior="isolated") for rule in PRE_TOKENIZERS[pre]]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _WHOLE)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last])
    inner.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    for number, kind in enumerate(stored.field("tokenizer.ggml.token_type", [])):
        if kind in (_CONTROL, _USER_DEFINED):
            added = AddedToken(tokens[number], special=kind == _CONTROL, normalized=False)
            (inner.add_special_tokens if kind == _CONTROL else inner.add_tokens)([added])
    named = {name: tokens[number] for name, number in special.items()}
    bos = special.get("bos_token")
    if stored.field("tokenizer.ggml.add_bos_token", False) and bos is not None:
        start = tokens[bos]
        inner.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, bos)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, **named)
    if (template := stored.field("tokenizer.chat_template")) is not None:
        tokenizer.chat_template = template
    return tokenizer
