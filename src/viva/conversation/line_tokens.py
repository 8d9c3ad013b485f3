"""Tokens of lines that a conversation shows again and again.

Every turn's prompt shows the whole transcript, and encoding it anew is nearly half of what a turn costs. Most
pre-tokenizers always cut behind a line's end, so a line has the same tokens wherever it stands: those of a
conversation's lines are kept with the conversation. For any other tokenizer the text is encoded whole.
"""

import itertools
import json
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from string import punctuation
from typing import Any

LineTokens = dict[tuple["LineEncoder", str, bool], tuple[int, ...]]
"""Tokens by who encoded them, by line, and by whether special tokens in it are split up."""

_memory: ContextVar[LineTokens | None] = ContextVar("line_tokens", default=None)

_BEGINNING = r"[>\[A-Za-z]"
_CUT = re.compile(rf"(?<=\S\n)(?={_BEGINNING})")
_OVER_A_CUT = re.compile(rf"\n{_BEGINNING}")
_STEPS = ("ByteLevel", "Digits", "Split")
"""Pre-tokenizers that look at the characters around a place only, apart from what `_LOOKS_AROUND` finds."""
_CLASS = re.compile(r"\[(?:\\.|[^\[\]\\])*+\]?+", re.S)
_LOOKS_AROUND = re.compile(r"\(\?[<=]|\(\?!(?!\\S\))|\\[ABbGKZz]|[\^$]")
"""Parts of a pattern, its character classes left out, that depend on what stands behind or far ahead."""
_LONGEST_OFTEN, _MOST_OFTEN = 512, 4096
"""Characters and number of lines that are kept for all conversations: what the protocol itself writes."""
_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD")
"""Normal forms of Unicode: no line's end and no ASCII character joins what stands before it."""
_FIRST = (">", "[", "a", "s", "S")
_LAST = ("a", "S", "0", *punctuation, "é", "e\u0301", "ß", "中", "۳", "\u200d", "\U0001f642", "\uffff")
"""Characters of every kind that a line may begin and end with."""


@contextmanager
def remembering(memory: LineTokens) -> Generator[None]:
    """While it lasts, and in tasks that are made meanwhile, lines are looked up in a memory and put into it."""
    token = _memory.set(memory)
    try:
        yield
    finally:
        _memory.reset(token)


class LineEncoder:
    """Encodes texts by a Hugging Face tokenizer, line by line where that gives the same tokens.

    A text is cut where a line that ends in no white space is followed by one that begins with an ASCII letter, with
    ``>`` or with ``[``, as all lines of a protocol do.

    Args:
        inner: The tokenizer.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._backend: Any = getattr(inner, "backend_tokenizer", None)
        self.cuts_lines = self._backend is not None and _cuts_lines(self._backend)
        """Whether lines have tokens of their own."""
        self._encode_often = lru_cache(maxsize=_MOST_OFTEN)(self._encode_line)

    def encode(self, text: str, **options: Any) -> list[int]:
        """Token ids of a text without special tokens around it: always those of encoding it whole."""
        memory, backend = _memory.get(), self._backend
        split = options.get("split_special_tokens", getattr(self._inner, "split_special_tokens", False))
        is_plain = self.cuts_lines and not options.keys() - {"split_special_tokens"}
        # cutting off and padding are left over from another call; the tokenizer turns them off
        if memory is None or not is_plain or backend.truncation is not None or backend.padding is not None:
            return self._inner.encode(text, add_special_tokens=False, **options)
        tokens: list[int] = []
        for line in _CUT.split(text):
            known = memory.get((self, line, split))
            if known is None:
                find = self._encode_often if len(line) <= _LONGEST_OFTEN else self._encode_line
                known = memory[self, line, split] = find(line, split)
            tokens += known
        return tokens

    def _encode_line(self, line: str, split: bool) -> tuple[int, ...]:
        if self._backend.encode_special_tokens is not split:
            self._backend.encode_special_tokens = split
        return tuple(self._backend.encode(line, add_special_tokens=False).ids)


def _cuts_lines(backend: Any) -> bool:
    """Whether a line's tokens depend on nothing outside it.

    No step may know more of a text than the characters around a place, no added token may reach over a line's end,
    and the pre-tokenizer must cut between every kind of last and first character.
    """
    if not all(step["type"] in _NORMALIZERS for step in _steps(backend.normalizer)):
        return False
    if backend.pre_tokenizer is None or not all(map(_is_local, _steps(backend.pre_tokenizer))):
        return False
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or _OVER_A_CUT.search(token.content) for token in added):
        return False
    lines = [f"{first}{last}\n" for last in _LAST for first in _FIRST]
    pieces = backend.pre_tokenizer.pre_tokenize_str("".join(lines))
    starts = itertools.accumulate(map(len, lines[:-1]), initial=0)
    return {start for _, (start, _) in pieces}.issuperset(starts)


def _steps(whole: Any) -> Iterator[Mapping[str, Any]]:
    """Declarations of a normalizer's or a pre-tokenizer's steps, as its JSON has them; none of ``None``."""
    if whole is None:
        return
    try:
        waiting: list[Mapping[str, Any]] = [json.loads(whole.__getstate__())]
    except Exception:  # noqa: BLE001 - all that a step written in Python raises: nothing is known of it
        waiting = [{"type": "unknown"}]
    while waiting:
        step = waiting.pop()
        if step["type"] == "Sequence":
            waiting.extend(step.get("pretokenizers", step.get("normalizers", ())))
        else:
            yield step


def _is_local(step: Mapping[str, Any]) -> bool:
    if step["type"] not in _STEPS or step.get("add_prefix_space"):
        return False
    pattern = step.get("pattern", {}).get("Regex", "")
    return not _LOOKS_AROUND.search(_CLASS.sub("x", pattern))
