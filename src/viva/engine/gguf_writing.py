"""Models written as GGUF files, for llama.cpp and what is built on it, by the writer of the ``gguf`` package.

A model that was read from such a file keeps what that says of it and of its tokenizer; the weights are replaced. For
another model the metadata is made of its configuration and tokenizer, where llama.cpp computes the very same.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from viva.engine.gguf_file import (
    ARCHITECTURES,
    PARAMETERS,
    ROPE_FACTORS,
    Field,
    cannot_write,
    llama_3_factors,
    read_gguf,
)
from viva.engine.gguf_tokenizer import tokenizer_fields

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

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
_WEIGHT = re.compile(r"(?:model\.layers\.(?P<layer>\d+)\.)?(?P<module>[\w.]+)\.(?P<kind>weight|bias)")
_OUTPUT = "lm_head.weight"


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
        if name == _OUTPUT and module.config.tie_word_embeddings:
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
