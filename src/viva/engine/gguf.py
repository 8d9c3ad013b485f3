"""Models in GGUF files, the format of llama.cpp: unpacked once into a folder that ``transformers`` reads.

``transformers`` dequantises the weights. The tokenizer is built here, since ``transformers`` drops the file's
pre-tokenizer (how text is cut before byte-pair merges, ``tokenizer.ggml.pre``), without which ids differ.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from viva.engine.loading import load_errors

__all__ = ["PRE_TOKENIZERS", "cache_folder", "gguf_folder", "is_gguf"]

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
_ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral")
_CONTROL, _USER_DEFINED = 3, 4
"""Values of ``tokenizer.ggml.token_type``."""
_FORMAT = 1
"""Part of the unpacked folder's name; it changes when a file is unpacked in another way."""
_SOURCE = "gguf.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """Metadata of a GGUF file that a tokenizer is made of."""

    architecture: str
    pre: str
    tokens: Sequence[str]
    token_types: Sequence[int]
    merges: Sequence[str]
    special: dict[str, int]
    """Ids of ``bos_token``, ``eos_token``, ``unk_token`` and ``pad_token``, those that the file names."""
    chat_template: str | None
    starts_with_bos: bool


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

    Args:
        file: Path of the file.

    Raises:
        ValueError: The file is damaged, or its architecture or pre-tokenizer is not supported.
    """
    path = Path(file).expanduser()
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    root = cache_folder() / "gguf"
    target = root / f"{path.stem}-{digest[:16]}-{_FORMAT}"
    if not target.is_dir():
        header = _read_header(path)
        root.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".unpacked-", dir=root))
        try:
            _unpack(path, header, staging)
            source = {"file": path.name, "sha256": digest, "tokenizer.ggml.pre": header.pre}
            (staging / _SOURCE).write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
            staging.chmod(0o755)
            if not target.is_dir():  # else another process was quicker
                staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return target


def _read_header(path: Path) -> _Header:
    from gguf import GGUFReader

    try:
        fields = GGUFReader(path).fields
    # the reader takes the file's numbers for sizes and offsets
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{str(path)!r} is no GGUF file that can be read ({error}); fetch it anew"
        ) from error

    def value(key: str, default: Any = None) -> Any:
        return fields[key].contents() if key in fields else default

    architecture, model, pre = (
        value("general.architecture"),
        value("tokenizer.ggml.model"),
        value("tokenizer.ggml.pre", "gpt-2"),
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
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    found = {short: value(f"tokenizer.ggml.{name}_token_id") for name, short in names.items()}
    return _Header(
        architecture=architecture,
        pre=pre,
        tokens=value("tokenizer.ggml.tokens", []),
        token_types=value("tokenizer.ggml.token_type", []),
        merges=value("tokenizer.ggml.merges", []),
        special={f"{short}_token": int(number) for short, number in found.items() if number is not None},
        chat_template=value("tokenizer.chat_template"),
        starts_with_bos=bool(value("tokenizer.ggml.add_bos_token", False)),
    )


def _unpack(path: Path, header: _Header, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with load_errors(str(path)):
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32, trust_remote_code=False
        )
        tokenizer = _tokenizer(header)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(header: _Header) -> Any:
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

    vocabulary = {token: number for number, token in enumerate(header.tokens)}
    left, right = zip(*(merge.split(" ", 1) for merge in header.merges), strict=True)
    inner = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=list(zip(left, right, strict=True)),
            ignore_merges=header.pre == "llama-bpe",
        )
    )
    cuts = [pre_tokenizers.Split(Regex(rule), behavior="isolated") for rule in PRE_TOKENIZERS[header.pre]]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=header.pre not in _WHOLE)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last])
    inner.decoder = decoders.ByteLevel()
    if header.pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    for number, kind in enumerate(header.token_types):
        if kind in (_CONTROL, _USER_DEFINED):
            added = AddedToken(header.tokens[number], special=kind == _CONTROL, normalized=False)
            (inner.add_special_tokens if kind == _CONTROL else inner.add_tokens)([added])
    named = {name: header.tokens[number] for name, number in header.special.items()}
    bos = header.special.get("bos_token")
    if header.starts_with_bos and bos is not None:
        start = header.tokens[bos]
        inner.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, bos)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, **named)
    if header.chat_template is not None:
        tokenizer.chat_template = header.chat_template
    return tokenizer
