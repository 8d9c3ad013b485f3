"""Models in GGUF files, the format of llama.cpp: unpacked into folders that ``transformers`` reads, and written.

A file is read once, by `viva.engine.gguf_file`. ``transformers`` reads it twice and slowly, and drops the
pre-tokenizer (how text is cut before byte-pair merges, ``tokenizer.ggml.pre``) and the factors of rotary frequencies
(``rope_freqs``).

Files are written by the ``gguf`` package. A model that was read from one keeps what that says of it and of its
tokenizer; the weights are replaced. For another model the metadata is made of its configuration and tokenizer, where
llama.cpp computes the very same.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from viva.engine.gguf_file import (
    ARCHITECTURES,
    PARAMETERS,
    ROPE_FACTORS,
    Field,
    GgufFile,
    cannot_write,
    llama_3_factors,
    pre_name,
    read_gguf,
)
from viva.engine.gguf_tokenizer import read_tokenizer, special_ids, tokenizer_fields
from viva.engine.loading import load_errors
from viva.model_files import GGUF_SOURCE, file_digest

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<kind>weight|bias)")
"""Names of tensors in a file, and below in ``transformers``."""
_WEIGHT = re.compile(r"(?:model\.layers\.(?P<layer>\d+)\.)?(?P<module>[\w.]+)\.(?P<kind>weight|bias)")
_FORMAT = 2
"""Part of the unpacked folder's name; it changes when a file is unpacked in another way."""

PRECISIONS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
"""Precisions of matrices, with their names in ``gguf``; vectors (norms, biases) are always in float32."""

_FROM_FOLDERS = ("llama", "qwen2", "qwen3")
"""Architectures whose metadata can be made of a configuration."""
_OF_WEIGHTS = ("general.file_type", "general.quantization_version", "general.alignment", "quantize.")
"""Beginnings of keys that tell how the weights of a file are stored."""
_PLAIN: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
}
"""Settings of a configuration that llama.cpp takes for granted."""


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
    digest = file_digest(path)
    root = cache_folder() / "gguf"
    target = root / f"{path.stem}-{digest[:16]}-{_FORMAT}"
    if not target.is_dir():
        stored = read_gguf(path)
        root.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".unpacked-", dir=root))
        try:
            with load_errors(str(path)):
                _save_model(stored, staging)
                read_tokenizer(stored).save_pretrained(staging)
            source = {"file": path.name, "sha256": digest, "tokenizer.ggml.pre": pre_name(stored)}
            (staging / GGUF_SOURCE).write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
            staging.chmod(0o755)
            if not target.is_dir():  # else another process was quicker
                staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


def _save_model(stored: GgufFile, folder: Path) -> None:
    """Write weights and configuration; tensors are renamed, and rotated as ``transformers`` rotates."""
    import numpy as np
    from safetensors.numpy import save_file

    config = _config(stored)
    architecture = ARCHITECTURES[stored.fields["general.architecture"]]
    weights: dict[str, np.ndarray] = {}
    for name, tensor in stored.tensors.items():
        if name == ROPE_FACTORS:
            continue
        found = _TENSOR.fullmatch(name)
        if found is None or found["module"] not in architecture.modules:
            raise ValueError(f"it has a tensor {name!r}, which its architecture here does not know")
        array = architecture.from_file(stored.floats(tensor), found["module"], config)
        place = "" if found["layer"] is None else f"model.layers.{found['layer']}."
        module = architecture.modules[found["module"]]
        weights[f"{place}{module}.{found['kind']}"] = np.ascontiguousarray(array)
    file = folder / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    config.save_pretrained(folder)
    shutil.copymode(folder / "config.json", file)  # safetensors' files are the owner's alone


def _config(stored: GgufFile) -> "PretrainedConfig":
    from transformers import AutoConfig

    architecture = stored.fields["general.architecture"]
    options = {
        ours: stored.fields[f"{architecture}.{theirs}"]
        for theirs, ours in PARAMETERS.items()
        if f"{architecture}.{theirs}" in stored.fields
    }
    if (scaling := stored.fields.get(f"{architecture}.rope.scaling.type", "none")) != "none":
        raise ValueError(f"it scales rotary frequencies by {scaling!r}, which is not supported")
    options.setdefault("head_dim", options["hidden_size"] // options["num_attention_heads"])
    options |= {f"{name}_id": number for name, number in special_ids(stored).items()}
    if architecture == "llama":
        options["attention_bias"] = "blk.0.attn_q.bias" in stored.tensors
        options["mlp_bias"] = "blk.0.ffn_gate.bias" in stored.tensors
    if architecture == "gemma3":
        options |= _gemma_3(stored, options)
    known = ARCHITECTURES[architecture]
    config = AutoConfig.for_model(
        known.model_type,
        architectures=[known.class_name],
        vocab_size=stored.tensors["token_embd.weight"].shape[0],
        tie_word_embeddings="output.weight" not in stored.tensors,
        dtype="float32",
        **options,
    )
    if ROPE_FACTORS in stored.tensors:
        _scale_rotation(config, stored.floats(stored.tensors[ROPE_FACTORS]))
    return config


def _gemma_3(stored: GgufFile, options: Mapping[str, Any]) -> dict[str, object]:
    """Settings of Gemma 3 that llama.cpp has built in: five layers in six see a window of text."""
    layers, size = options["num_hidden_layers"], options["head_dim"]
    pattern = stored.fields.get("gemma3.attention.sliding_window_pattern", 6)
    sees_window = pattern if isinstance(pattern, list) else [(i + 1) % pattern > 0 for i in range(layers)]
    is_27b = layers == 62
    return {
        "sliding_window": stored.fields.get("gemma3.attention.sliding_window"),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in sees_window],
        "rope_local_base_freq": stored.fields.get("gemma3.rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": options["hidden_size"] // options["num_attention_heads"] if is_27b else size,
    }


def _scale_rotation(config: "PretrainedConfig", factors: "np.ndarray") -> None:
    """Give the configuration the scaling of Llama 3.1 and later that has these factors; `ValueError` if none has."""
    import torch

    config.rope_parameters |= {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not torch.allclose(llama_3_factors(config, config.head_dim), torch.tensor(factors), rtol=1e-3):
        raise ValueError(f"its {ROPE_FACTORS} is not the scaling of Llama 3, and no other one is supported")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """All of a GGUF file but its weights."""

    architecture: str
    fields: Mapping[str, Field]
    """By key; without the architecture, and without what depends on the type of the weights."""
    rope_factors: "np.ndarray | None"
    """Divisors of the rotary frequencies, half as many as a head has dimensions."""


def metadata_of_file(file: str | Path, name: str) -> Metadata:
    """The fields of a GGUF file, for new weights under another name; `ValueError` if it cannot be read."""
    stored = read_gguf(Path(file).expanduser())
    fields = {
        key: field
        for key, field in stored.typed_fields.items()
        # the writer has no empty texts and lists
        if not key.startswith(_OF_WEIGHTS) and key != "general.architecture" and field.value not in ("", [])
    }
    named: dict[str, object] = {"general.name": name}
    if (before := stored.fields.get("general.name")) is not None:
        named |= {"general.base_model.count": 1, "general.base_model.0.name": before}
    factors = stored.tensors.get(ROPE_FACTORS)
    return Metadata(
        architecture=stored.fields["general.architecture"],
        fields=fields | {key: _typed(value) for key, value in named.items()},
        rope_factors=None if factors is None else stored.floats(factors).copy(),
    )


def metadata_of_model(
    config: "PretrainedConfig", tokenizer: "PreTrainedTokenizerBase", name: str
) -> Metadata:
    """The fields of a GGUF file by which llama.cpp computes what a model of ``transformers`` does; `name` is shown.

    Raises:
        ValueError: Its architecture, one of its settings or its tokenizer is one that cannot be written exactly.
    """
    architecture = config.model_type
    if architecture not in _FROM_FOLDERS:
        raise cannot_write(f"its architecture is {architecture!r}; allowed: {', '.join(_FROM_FOLDERS)}")
    plain = _PLAIN | ({"attention_bias": (False, None)} if architecture == "qwen3" else {})
    for setting, allowed in plain.items():
        if (value := getattr(config, setting, None)) not in allowed:
            raise cannot_write(f"its configuration has {setting}: {value!r}; allowed: {allowed[0]!r}")
    rotary = config.rope_parameters
    numbers = {key: getattr(config, ours, None) for key, ours in PARAMETERS.items() if ours != "rope_theta"}
    size = numbers["attention.key_length"] or config.hidden_size // config.num_attention_heads
    numbers |= dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), size)
    numbers |= {"rope.freq_base": float(rotary["rope_theta"]), "vocab_size": config.vocab_size}
    fields = {f"{architecture}.{key}": value for key, value in numbers.items()}
    fields |= {"general.type": "model", "general.name": name}
    return Metadata(
        architecture=architecture,
        fields={
            key: _typed(value)
            for key, value in (fields | tokenizer_fields(tokenizer, config.vocab_size)).items()
        },
        rope_factors=_rope_factors(config, size),
    )


def write_gguf(file: Path, module: "PreTrainedModel", metadata: Metadata, precision: str) -> None:
    """Write a model that is on the CPU, tensor by tensor, in one of `PRECISIONS`; a file that is there is replaced.

    The metadata are of the same architecture and sizes. An output layer that is the embeddings is not written again.

    Raises:
        ValueError: A weight is too large for float16.
    """
    import numpy as np
    from gguf import GGML_QUANT_VERSION, GGUFValueType, GGUFWriter, LlamaFileType, quantize
    from gguf.quants import quant_shape_to_byte_shape

    label, architecture = PRECISIONS[precision], ARCHITECTURES[metadata.architecture]
    writer = GGUFWriter(str(file), metadata.architecture)
    try:
        for key, field in metadata.fields.items():
            items = None if field.items is None else GGUFValueType(field.items)
            writer.add_key_value(key, field.value, GGUFValueType(field.kind), items)
        writer.add_file_type(int(LlamaFileType[f"{'ALL' if label == 'F32' else 'MOSTLY'}_{label}"]))
        if precision == "q8_0":
            writer.add_quantization_version(GGML_QUANT_VERSION)
        tensors = dict(_tensors(module, metadata))
        for name, tensor in tensors.items():
            kind = _type_of(tensor, precision)
            size = int(np.prod(quant_shape_to_byte_shape(tensor.shape, kind)))
            writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), size, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in tensors.items():
            array = tensor.detach().float().numpy()
            array = architecture.to_file(array, name.split(".")[-2], module.config)
            with np.errstate(over="ignore"):
                stored = quantize(np.ascontiguousarray(array), _type_of(tensor, precision))
            if stored.dtype == np.float16 and not np.isfinite(stored).all():
                raise ValueError(
                    f"{name} has numbers up to {abs(array).max():.3g}, and float16 ends at 65504; export with "
                    "precision=bfloat16"
                )
            writer.write_tensor_data(stored)
    finally:
        writer.close()


def _tensors(module: "PreTrainedModel", metadata: Metadata) -> Iterator[tuple[str, "torch.Tensor"]]:
    """A model's tensors by their names in the file; rows as ``transformers`` has them."""
    import torch

    theirs = {ours: name for name, ours in ARCHITECTURES[metadata.architecture].modules.items()}
    for name, tensor in module.state_dict().items():
        if name == "lm_head.weight" and module.config.tie_word_embeddings:
            continue
        found = _WEIGHT.fullmatch(name)
        short = theirs.get(found["module"]) if found else None
        if found is None or short is None:
            raise cannot_write(f"it has weights {name!r}, which llama.cpp has no name for")
        layer = "" if found["layer"] is None else f"blk.{found['layer']}."
        yield f"{layer}{short}.{found['kind']}", tensor
    if metadata.rope_factors is not None:
        yield ROPE_FACTORS, torch.from_numpy(metadata.rope_factors)


def _type_of(tensor: "torch.Tensor", precision: str) -> "GGMLQuantizationType":
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType[PRECISIONS[precision] if tensor.dim() > 1 else "F32"]
    does_fit = tensor.shape[-1] % GGML_QUANT_SIZES[kind][0] == 0
    return kind if does_fit else GGMLQuantizationType.F16  # as llama.cpp's own converter does


def _typed(value: Any) -> Field:
    """A value with the type that llama.cpp expects: unsigned numbers, but for lists."""
    if isinstance(value, list):
        return Field(value, 9, 8 if isinstance(value[0], str) else 5)
    return Field(value, {bool: 7, int: 4, float: 6, str: 8}[type(value)])


def _rope_factors(config: "PretrainedConfig", head_size: int) -> "np.ndarray | None":
    kind = config.rope_parameters.get("rope_type", "default")
    if kind == "default":
        return None
    if kind != "llama3" or config.model_type != "llama":
        raise cannot_write(
            f"it scales rotary frequencies by {kind!r}; allowed: 'default', and 'llama3' of architecture 'llama'"
        )
    return llama_3_factors(config, head_size).numpy()
