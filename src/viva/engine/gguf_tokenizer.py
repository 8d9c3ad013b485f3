"""Tokenizers of GGUF files: byte-level BPE, read and written, and pieces of SentencePiece, read."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from viva.engine.gguf_file import (
    PRE_TOKENIZERS,
    SENTENCEPIECE,
    GgufFile,
    PreTokenizer,
    cannot_write,
    pre_name,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""In the middle of ``tokenizer.ggml.*_token_id``: what the token is called in ``transformers``."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = range(1, 6)
"""Values of ``tokenizer.ggml.token_type``."""
_SPACE = "\u2581"
"""The character that stands for a space in pieces of SentencePiece."""
_MERGER: dict[str, tuple[object, ...]] = {
    "type": ("BPE",),
    "dropout": (None,),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "byte_fallback": (False, None),
}
"""Settings of a tokenizer's model that llama.cpp takes for granted."""


def special_ids(stored: GgufFile) -> dict[str, int]:
    """Ids of ``bos_token``, ``eos_token``, ``unk_token`` and ``pad_token``, those that the file names."""
    keys = {short: f"tokenizer.ggml.{name}_token_id" for name, short in _SPECIAL_TOKENS.items()}
    return {f"{short}_token": int(stored.fields[key]) for short, key in keys.items() if key in stored.fields}


def read_tokenizer(stored: GgufFile) -> "PreTrainedTokenizerBase":
    """The file's tokenizer: byte-level BPE, cut as ``tokenizer.ggml.pre`` says, or pieces of SentencePiece."""
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    special = special_ids(stored)
    tokens: Sequence[str] = stored.fields.get("tokenizer.ggml.tokens", [])
    types: Sequence[int] = stored.fields.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    is_sentencepiece = stored.fields.get("tokenizer.ggml.model") == SENTENCEPIECE
    inner = _sentencepiece(stored, tokens, types) if is_sentencepiece else _byte_level(stored, tokens)
    for kind, add in ((_CONTROL, inner.add_special_tokens), (_USER_DEFINED, inner.add_tokens)):
        found = [token for token, its_kind in zip(tokens, types, strict=True) if its_kind == kind]
        add([AddedToken(token, special=kind == _CONTROL, normalized=False) for token in found])
    named = {name: tokens[number] for name, number in special.items()}
    bos = special.get("bos_token")
    if stored.fields.get("tokenizer.ggml.add_bos_token", is_sentencepiece) and bos is not None:
        start = tokens[bos]
        inner.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, bos)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, **named)
    if (template := stored.fields.get("tokenizer.chat_template")) is not None:
        tokenizer.chat_template = template
    return tokenizer


def _byte_level(stored: GgufFile, tokens: Sequence[str]) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = PRE_TOKENIZERS[pre_name(stored)]
    merges = [tuple(merge.split(" ", 1)) for merge in stored.fields.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.ignores_merges))
    cuts = [pre_tokenizers.Split(Regex(rule), behavior="isolated") for rule in pre.cuts]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pre.is_whole)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last])
    inner.decoder = decoders.ByteLevel()
    if pre.composes:
        inner.normalizer = normalizers.NFC()
    return inner


def _sentencepiece(stored: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> "Tokenizer":
    """A tokenizer that merges the best scored pair of neighbours first; what is no piece is bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    does_prefix = bool(stored.fields.get("tokenizer.ggml.add_space_prefix", True))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    scores: Sequence[float] = stored.fields.get("tokenizer.ggml.scores", [])
    if len(scores) != len(tokens):
        raise ValueError(f"it has {len(tokens)} pieces and {len(scores)} scores, by which they are merged")
    pieces = {
        token: score
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind in (_NORMAL, _USER_DEFINED)
    }
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(pieces, key=lambda piece: -pieces[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    inner = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token=unknown, fuse_unk=True)
    )
    spaces = normalizers.Replace(" ", _SPACE)
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), spaces] if does_prefix else [spaces]
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(" ", 1, 0)] if does_prefix else [])
    )
    return inner


def tokenizer_fields(tokenizer: "PreTrainedTokenizerBase", num_rows: int) -> dict[str, object]:
    """Metadata of a tokenizer whose model has embeddings for `num_rows` tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise cannot_write("its tokenizer has no tokenizer.json")
    stored = json.loads(backend.to_str())
    merger = stored["model"]
    for setting, allowed in _MERGER.items():
        if (value := merger.get(setting)) not in allowed:
            raise cannot_write(f"its tokenizer's model has {setting}: {value!r}; allowed: {allowed[0]!r}")
    found = _pre_tokenizer(stored)
    names = [name for name, known in PRE_TOKENIZERS.items() if known == found]
    if not names:
        raise cannot_write(
            f"its tokenizer cuts text by {json.dumps(stored['pre_tokenizer'])} with normalizer "
            f"{json.dumps(stored['normalizer'])} and ignore_merges {json.dumps(merger.get('ignore_merges', False))}, "
            f"which is none of {', '.join(PRE_TOKENIZERS)}"
        )
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in merger["merges"]]
    if not merges:
        raise cannot_write("its tokenizer has no merges, and llama.cpp reads none without")
    tokens, types = _vocabulary(stored, num_rows)
    fields: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": names[0],
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": _adds_bos(tokenizer),
    }
    for theirs, ours in _SPECIAL_TOKENS.items():
        if (number := getattr(tokenizer, f"{ours}_token_id")) is not None:
            fields[f"tokenizer.ggml.{theirs}_token_id"] = number
    if tokenizer.chat_template is not None:
        fields["tokenizer.chat_template"] = tokenizer.get_chat_template()
    return fields


def _pre_tokenizer(stored: Mapping[str, Any]) -> PreTokenizer | None:
    """The cuts of a ``tokenizer.json`` as a `PreTokenizer`; ``None`` if they are no such."""
    *splits, last = _parts(stored["pre_tokenizer"], "pretokenizers") or [{}]
    cuts = [_cut(split) for split in splits]
    normalizers = [part["type"] for part in _parts(stored["normalizer"], "normalizers")]
    if (
        last.get("type") != "ByteLevel"
        or last["add_prefix_space"]
        or None in cuts
        or normalizers not in ([], ["NFC"])
    ):
        return None
    return PreTokenizer(
        cuts=tuple(cut for cut in cuts if cut is not None),
        is_whole=not last.get("use_regex", True),
        composes=bool(normalizers),
        ignores_merges=bool(stored["model"].get("ignore_merges")),
    )


def _parts(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer, which may be a sequence of them or none."""
    if part is None:
        return []
    return part[inner] if part["type"] == "Sequence" else [part]


def _cut(split: Mapping[str, Any]) -> str | None:
    """The regular expression of a step that cuts its matches out."""
    if split["type"] == "Digits" and split["individual_digits"]:
        return r"\p{N}"
    is_plain = split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
    return split["pattern"].get("Regex") if is_plain else None


def _vocabulary(stored: Mapping[str, Any], num_rows: int) -> tuple[list[str], list[int]]:
    """Tokens and their types by id; rows of the embeddings without a token have one that is not used."""
    known: dict[int, tuple[str, int]] = {
        number: (token, _NORMAL) for token, number in stored["model"]["vocab"].items()
    }
    is_changed = stored["normalizer"] is not None
    for token in stored["added_tokens"]:
        does_strip = token["lstrip"] or token["rstrip"] or token["single_word"]
        if does_strip or (is_changed and token["normalized"]):
            raise cannot_write(
                f"its token {token['content']!r} takes spaces beside it along, or is found in normalized text, which "
                "llama.cpp does not do"
            )
        known[token["id"]] = (token["content"], _CONTROL if token["special"] else _USER_DEFINED)
    if max(known) >= num_rows:
        raise cannot_write(f"its tokenizer has ids up to {max(known)}, and its embeddings {num_rows} rows")
    rows = [known.get(number, (f"[PAD{number}]", _UNUSED)) for number in range(num_rows)]
    return [token for token, _ in rows], [kind for _, kind in rows]


def _adds_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the tokenizer puts its first token before a text."""
    alone, whole = (tokenizer.encode("a", add_special_tokens=adds) for adds in (False, True))
    if whole not in (alone, [tokenizer.bos_token_id, *alone]):
        raise cannot_write(
            f"its tokenizer turns 'a' into {whole}; llama.cpp puts nothing but the bos token before it"
        )
    return whole != alone
