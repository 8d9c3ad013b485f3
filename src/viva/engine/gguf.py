"""Models in GGUF files, the format of llama.cpp: unpacked once into a folder that ``transformers`` reads.

The file is read once, by `viva.engine.gguf_file`. ``transformers`` reads such a file twice and slowly, and drops the
pre-tokenizer (how text is cut before byte-pair merges, ``tokenizer.ggml.pre``) and the factors of rotary frequencies
(``rope_freqs``).
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from viva.engine.gguf_file import (
    ARCHITECTURES,
    PARAMETERS,
    ROPE_FACTORS,
    GgufFile,
    llama_3_factors,
    pre_name,
    read_gguf,
)
from viva.engine.gguf_tokenizer import read_tokenizer, special_ids
from viva.engine.loading import load_errors
from viva.model_files import GGUF_SOURCE

if TYPE_CHECKING:
    import numpy as np
    from transformers import PretrainedConfig

_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<kind>weight|bias)")
_FORMAT = 2
"""Part of the unpacked folder's name; it changes when a file is unpacked in another way."""


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
