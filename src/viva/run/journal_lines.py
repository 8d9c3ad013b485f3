"""The journal's lines: one answer of an engine each, found by what was asked, with a checksum.

Arrays are kept as their bytes, lists of numbers as JSON, so that every bit comes back.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

import numpy as np
import tinker
from pydantic import BaseModel

from viva.sdk import make_topk

__all__ = ["call_key", "decode_answer", "encode_answer", "make_line", "read_line"]

_OPENING = b'{"check": "'
_MIDDLE = b'", "line": '
_CLOSING = b"}\n"
_DIGITS = 16
_BEGIN = len(_OPENING) + _DIGITS + len(_MIDDLE)

_PLAIN = (type(None), bool, int, float, str)


def call_key(version: int | str, arguments: Mapping[str, Any]) -> str | None:
    """A digest of a call; ``None`` if its arguments are of a kind that a digest cannot tell apart.

    Args:
        version: Of the policy that is asked.
        arguments: Of ``sample``, by name.
    """
    digest = hashlib.blake2b(repr(version).encode(), digest_size=16)
    for name in sorted(arguments):
        value = arguments[name]
        digest.update(b"\0" + name.encode() + b"\0")
        if isinstance(value, tinker.ModelInput):
            _add_prompt(digest, value)
        elif isinstance(value, BaseModel):
            digest.update(value.model_dump_json().encode())
        elif isinstance(value, _PLAIN):
            digest.update(repr(value).encode())
        else:
            return None
    return digest.hexdigest()


def _add_prompt(digest: Any, prompt: tinker.ModelInput) -> None:
    for chunk in prompt.chunks:
        if isinstance(chunk, tinker.EncodedTextChunk):
            digest.update(np.asarray(chunk.tokens, dtype=np.int64).tobytes())
        else:
            digest.update(b"\1" + chunk.model_dump_json().encode())


def make_line(body: Mapping[str, Any]) -> bytes:
    """A line of JSON with a checksum of its content."""
    text = json.dumps(body, separators=(",", ":"), allow_nan=True).encode()
    return _OPENING + _check(text) + _MIDDLE + text + _CLOSING


def read_line(line: bytes) -> dict[str, Any] | None:
    """The content of a line; ``None`` if it is not as it was written."""
    text = line[_BEGIN : -len(_CLOSING)]
    if line != _OPENING + _check(text) + _MIDDLE + text + _CLOSING:
        return None
    return cast(dict[str, Any], json.loads(text))


def _check(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_DIGITS // 2).hexdigest().encode()


def encode_answer(response: Any) -> dict[str, Any] | None:
    """A response as JSON; ``None`` if it holds something that JSON would not give back."""
    try:
        whole = {name: _encode(value) for name, value in _values(tinker.SampleResponse, response)}
        whole["sequences"] = [
            {name: _encode(value) for name, value in _values(tinker.SampledSequence, sequence)}
            for sequence in response.sequences
        ]
    except TypeError:
        return None
    return whole


def decode_answer(stored: Mapping[str, Any]) -> tinker.SampleResponse:
    """The response that `encode_answer` was given."""
    whole = {name: _decode(value) for name, value in stored.items() if name != "sequences"}
    sequences = [
        tinker.SampledSequence(**{name: _decode(value) for name, value in sequence.items()})
        for sequence in stored["sequences"]
    ]
    return tinker.SampleResponse(sequences=sequences, **whole)


def _values(response_class: Any, response: Any) -> list[tuple[str, Any]]:
    """What a response holds; what is not there is left out."""
    values = [(field.name, getattr(response, field.name, None)) for field in fields(response_class)]
    return [(name, value) for name, value in values if name != "sequences" and value is not None]


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        text = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"array": text, "dtype": value.dtype.str, "shape": value.shape}
    if isinstance(value, list | tuple):
        return {"list": [_encode(item) for item in cast(list[Any], value)], "tuple": isinstance(value, tuple)}
    if hasattr(value, "token_ids") and hasattr(value, "logprobs"):
        return {"topk": [_encode(value.token_ids), _encode(value.logprobs)]}
    if not isinstance(value, _PLAIN):
        raise TypeError(f"{type(value).__name__} has no place in the journal")
    return value


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    stored = cast(dict[str, Any], value)
    if "array" in stored:
        data = base64.b64decode(stored["array"])
        return np.frombuffer(data, dtype=stored["dtype"]).reshape(stored["shape"]).copy()
    if "topk" in stored:
        return make_topk(*(_decode(part) for part in stored["topk"]))
    items = [_decode(item) for item in stored["list"]]
    return tuple(items) if stored["tuple"] else items
