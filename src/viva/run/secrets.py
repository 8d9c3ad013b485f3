"""Redaction of credentials from files, logs and tracebacks, and of control characters from lines on the terminal."""

import base64
import json
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from types import TracebackType
from typing import Any
from urllib.parse import quote, unquote

KEY_VARIABLE = "TINKER_API_KEY"
"""The environment variable with the key of hosted Tinker."""

_USER_INFO = re.compile(r"(?<=://)[^/\s?#\"'<>]*@")
_PARAMETER = re.compile(r"([?&][\w-]*(?:key|token|secret|password|signature)=)([^&\s\"'<>]+)", re.IGNORECASE)
_HEADER = re.compile(
    r"((?:x-api-key|api-key|authorization|cookie)[\"']?\s*[:=,]\s*b?[\"']?(?:bearer |basic )?)([^\s\"',]{8,})",
    re.IGNORECASE,
)
_JWT = ("eyJ",)
_SHAPES = {
    ("ghp_", "gho_", "ghu_", "ghs_", "ghr_"): re.compile(r"(?<![A-Za-z0-9])gh[opsur]_[A-Za-z0-9]{16,}"),
    ("github_pat_",): re.compile(r"(?<![A-Za-z0-9])github_pat_[A-Za-z0-9_]{20,}"),
    ("glpat-",): re.compile(r"(?<![A-Za-z0-9])glpat-[A-Za-z0-9_-]{16,}"),
    ("hf_",): re.compile(r"(?<![A-Za-z0-9])hf_[A-Za-z0-9]{16,}"),
    ("tml-",): re.compile(r"(?<![A-Za-z0-9])tml-[A-Za-z0-9_-]{16,}"),
    ("sk-",): re.compile(r"(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{20,}"),
    ("AKIA", "ASIA"): re.compile(r"(?<![A-Za-z0-9])A[KS]IA[A-Z0-9]{16}"),
    ("AIza",): re.compile(r"(?<![A-Za-z0-9])AIza[A-Za-z0-9_-]{30,}"),
    ("xox",): re.compile(r"(?<![A-Za-z0-9])xox[abeoprs]-[A-Za-z0-9-]{10,}"),
    ("npm_", "pypi-"): re.compile(r"(?<![A-Za-z0-9])(?:npm_|pypi-)[A-Za-z0-9_-]{30,}"),
    _JWT: re.compile(r"(?<![A-Za-z0-9])eyJ[A-Za-z0-9_.-]{20,}"),
}
"""Credentials by how they begin; each holds a digit, too, and a web token two dots."""

_KEY_BEGIN, _KEY_HEAD, _KEY_END = "-----BEGIN ", "PRIVATE KEY-----", "-----END "
_LONGEST_HEAD = 64
_NAME_ENDS = ("KEY", "KEYS", "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL")
_NAME_WORDS = ("CREDENTIALS", "PASS", "PAT", "PATS")
_PLACES = ("DIR", "FILE", "PATH")
"""Last words of names of variables that say where a secret is, which is none."""
_HIDDEN = "***"
_SHORTEST_KEY = 8
"""Shorter ones are no keys, and stand in harmless text."""
_NO_TOKEN = -1
"""In place of the id of a token whose text is hidden."""

_SIGNS = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **{code: f"\\x{code:02x}" for code in range(0x80, 0xA0)},
    **{
        code: f"\\u{code:04x}"
        for code in (0x061C, 0x200E, 0x200F, 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    },
    **dict.fromkeys((*range(0xD800, 0xE000), 0xFFFE, 0xFFFF), "\ufffd"),
}
"""Signs for control characters, and for those that reorder what stands around them: a text could show other words than
it holds."""


def without_secrets(text: str, known: frozenset[str] | None = None) -> str:
    """The text with secrets replaced by stars.

    Secrets are values of environment variables named like keys or passwords, credentials of a known form, blocks of
    private keys, user names and passwords in addresses, and keys in their parameters and in headers. Whoever has many
    texts reads the variables once, by `environment_secrets`, and gives them as `known`.
    """
    parts: list[str] = []
    end = 0
    for start, stop in _secret_spans(text, known):
        parts += [text[end:start], _HIDDEN]
        end = stop
    return "".join([*parts, text[end:]]) if parts else text


def redacted(value: object) -> Any:
    """A JSON value without secrets, text by text: the whole as one text would not be JSON any more."""
    return map_texts(partial(without_secrets, known=environment_secrets()), value)


def map_texts(change: Callable[[str], str], value: object) -> Any:
    """A JSON value with every text in it changed, keys among them."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [map_texts(change, item) for item in value]
    if isinstance(value, dict):
        return {map_texts(change, key): map_texts(change, item) for key, item in value.items()}
    return value


def hidden_tokens(ids: Sequence[int], pieces: Sequence[str]) -> tuple[list[int], list[str]]:
    """Tokens and their texts without secrets, which may run over several of them; the ids of these tokens are -1."""
    shown, kept = list(ids), list(pieces)
    spans = _secret_spans("".join(pieces))
    start = 0
    for place, piece in enumerate(pieces if spans else ()):
        stop = start + len(piece)
        own = [(max(low, start) - start, min(high, stop) - start) for low, high in spans]
        for low, high in reversed([(low, high) for low, high in own if low < high]):
            kept[place] = f"{kept[place][:low]}{_HIDDEN}{kept[place][high:]}"
            shown[place] = _NO_TOKEN
        start = stop
    return shown, kept


def printable(text: str, known: frozenset[str] | None = None) -> str:
    """Lines without secrets, with visible signs for control characters and others that would steer a terminal."""
    return without_secrets(text, known).translate(_SIGNS)


def environment_secrets() -> frozenset[str]:
    """Values of environment variables named like keys or passwords, in all spellings."""
    return _spellings(tuple(os.environ[name] for name in os.environ if _names_secret(name)))


def _secret_spans(text: str, known: frozenset[str] | None = None) -> list[tuple[int, int]]:
    """Begin and end of every secret in a text, in order, without overlaps."""
    if len(text) < _SHORTEST_KEY:
        return []
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(_found(text, environment_secrets() if known is None else known)):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _found(text: str, known: frozenset[str]) -> Iterator[tuple[int, int]]:
    """Secrets in no order; most texts hold no sign of any, and are not looked through further."""
    yield from _known_values(text, known)
    if "@" in text and "://" in text:
        for found in _USER_INFO.finditer(text):
            yield found.start(), found.end() - 1
    if "=" in text and ("?" in text or "&" in text):
        yield from (found.span(2) for found in _PARAMETER.finditer(text))
    lowered = text.lower()
    if any(name in lowered for name in ("api-key", "authorization", "cookie")):
        yield from (found.span(2) for found in _HEADER.finditer(text))
    for signs, pattern in _SHAPES.items():
        if any(sign in text for sign in signs):
            for found in pattern.finditer(text):
                key = found.group()
                if any(letter.isdigit() for letter in key) and (signs != _JWT or key.count(".") >= 2):
                    yield found.span()
    yield from _key_blocks(text)


def _known_values(text: str, known: frozenset[str]) -> Iterator[tuple[int, int]]:
    for value in known:
        start = text.find(value)
        while start >= 0:
            yield start, start + len(value)
            start = text.find(value, start + len(value))


def _key_blocks(text: str) -> Iterator[tuple[int, int]]:
    """Private keys as OpenSSL and OpenSSH write them, between their first and last lines; one may be cut off."""
    end = 0
    while (begin := text.find(_KEY_BEGIN, end)) >= 0:
        end = begin + len(_KEY_BEGIN)
        body = text.find(_KEY_HEAD, end, end + _LONGEST_HEAD)
        if body >= 0:
            body += len(_KEY_HEAD)
            end = text.find(_KEY_END, body)
            end = len(text) if end < 0 else end
            yield body, end


@lru_cache(maxsize=1024)
def _names_secret(name: str) -> bool:
    words = name.upper().split("_")
    return words[-1] not in _PLACES and any(
        word.endswith(_NAME_ENDS) or word in _NAME_WORDS for word in words
    )


@lru_cache(maxsize=4)
def _spellings(values: tuple[str, ...]) -> frozenset[str]:
    """Values as they are, and as they stand in JSON and in addresses."""
    return frozenset(
        spelling
        for value in map(str.strip, values)
        if len(value) >= _SHORTEST_KEY
        for spelling in (value, json.dumps(value)[1:-1], quote(value, safe=""))
    )


def split_address(address: str) -> tuple[str, dict[str, str]]:
    """An address without user name and password, which HTTP clients put into errors and logs, and a header for them."""
    found = _USER_INFO.search(address)
    if found is None:
        return address, {}
    user_info = unquote(found.group().removesuffix("@"))
    plain = address[: found.start()] + address[found.end() :]
    return plain, {"Authorization": f"Basic {base64.b64encode(user_info.encode()).decode()}"}


def guard_tracebacks() -> None:
    """Remove secrets from what Python itself writes (tracebacks, warnings, log records); for programs that start."""
    sys.excepthook = _write_traceback
    warnings.formatwarning = _format_warning
    logging.setLogRecordFactory(_PrintableRecord)


class _PrintableRecord(logging.LogRecord):
    def getMessage(self) -> str:
        return printable(super().getMessage())


_plain_warning = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return printable(_plain_warning(message, category, filename, lineno, line))


def _write_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(printable("".join(traceback.format_exception(kind, error, trace))))
