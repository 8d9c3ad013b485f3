"""A tokenizer under which message text can never become a control token.

Chat tokenizers turn ``<|im_end|>`` inside *text* into the control token, and ``split_special_tokens`` misses added
tokens that are not marked special. So a marker goes inside every occurrence of an added token in a text before it is
rendered, and `GuardedTokenizer.encode` encodes the pieces between markers on their own.

Most pre-tokenizers always cut behind a line's end, so a line has the same tokens wherever it stands: those of a
conversation's lines are kept (`remembering`), which nearly halves a turn's cost. Others encode the text whole.
"""

import itertools
import json
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from string import punctuation
from typing import Any

from viva.conversation.records import encodable

MARKER = "\ufdd0"
"""A code point that Unicode reserves for internal use: it never stands in text that is meant for
interchange."""

_ANCHORS = ("\x02", "\n")
"""Characters to encode a piece behind that is not the beginning of a text: most rarely joined to what follows first."""

_LONGEST_REMEMBERED = 1024
"""Characters of a text whose tokens are kept: role headers and system prompts, which every prompt has again."""
_MOST_REMEMBERED = 1024

_Trie = dict[str, "_Trie"]
_END = ""


def _trie(words: Iterable[str]) -> _Trie:
    root: _Trie = {}
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[_END] = {}
    return root


def _starts_word(text: str, start: int, trie: _Trie) -> bool:
    node = trie
    for position in range(start, len(text)):
        child = node.get(text[position])
        if child is None:
            return False
        if _END in child:
            return True
        node = child
    return False


class GuardedTokenizer:
    """Wraps a Hugging Face tokenizer; everything but `encode` and `decode` is the wrapped tokenizer's own.

    Added tokens that are white space only, or a single character, stay what they are: they are letters of the
    tokenizer's alphabet and control nothing.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        added: Mapping[str, int] = inner.get_added_vocab() if hasattr(inner, "get_added_vocab") else {}
        guarded = {word: id_ for word, id_ in added.items() if len(word) > 1 and not word.isspace()}
        self.control_ids = frozenset(guarded.values())
        """Ids that no text may become."""
        trie = _trie(guarded)
        prefixes = {word[:length] for word in guarded for length in range(1, len(word))}
        suffixes = {word[length:] for word in guarded for length in range(1, len(word))}
        self._trie, self._prefixes, self._suffixes = trie, prefixes, suffixes
        self._later = {suffix[0] for suffix in suffixes}
        self._earlier = {prefix[-1] for prefix in prefixes}
        self._words = tuple(guarded)
        self._longest = max(map(len, guarded), default=0)
        letters = "".join(map(re.escape, sorted(trie)))
        self._first_letter = re.compile(f"[{letters}]") if letters else None
        self._openings = sorted({word[:2] for word in guarded})
        self._folds = _folds_text(inner, guarded)
        self._anchor = _anchor(inner)
        self._lines = LineEncoder(inner)
        self._decoded: tuple[list[int] | None, Any] = None, ""
        self._remembered = lru_cache(maxsize=_MOST_REMEMBERED)(self._encoded)

    def __reduce__(self) -> tuple[type["GuardedTokenizer"], tuple[object]]:
        return GuardedTokenizer, (self.inner,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def shield(self, text: str) -> str:
        """Mark text so that `encode` can make no control token of it.

        Markers in it are dropped, half characters become U+FFFD; nothing else is lost: decoding the encoded shielded
        text gives the text back wherever the tokenizer itself is lossless.
        """
        text = encodable(text.replace(MARKER, ""))
        cuts = self._cuts(text)
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        if self._folds:
            pieces = [part for piece in pieces for part in self._split_folded(piece)]
        return MARKER.join(pieces)

    def encode(self, text: str, add_special_tokens: bool = True, **options: object) -> list[int]:
        """Token ids of text, its pieces between markers encoded on their own.

        Raises:
            ValueError: If special tokens are asked for around marked text by a tokenizer that also puts
                some at the end.
        """
        if options or len(text) > _LONGEST_REMEMBERED:
            return self._encoded(text, add_special_tokens, **options)
        return list(self._remembered(text, add_special_tokens))

    def decode(self, tokens: object, **options: object) -> Any:
        """The wrapped tokenizer's text of tokens; that of the last call is remembered."""
        if options or not isinstance(tokens, list):
            return self.inner.decode(tokens, **options)
        known, text = self._decoded
        if known != tokens:
            text = self.inner.decode(tokens)
            self._decoded = list(tokens), text
        return text

    def _encoded(self, text: str, add_special_tokens: bool, **options: object) -> list[int]:
        if MARKER not in text and add_special_tokens:
            return self.inner.encode(text, add_special_tokens=True, **options)
        tokens: list[int] = self._opening_tokens() if add_special_tokens else []
        begun = False
        for piece in filter(None, text.split(MARKER)):
            if begun and self._anchor:
                tokens += self._continued(piece, **options)
            else:
                tokens += self._lines.encode(piece, **options)
            begun = True
        return tokens

    def _continued(self, piece: str, **options: object) -> list[int]:
        """Tokens of a piece behind other text, for tokenizers that put a space before whatever they encode."""
        before: list[int] = self.inner.encode(self._anchor, add_special_tokens=False, **options)
        tokens: list[int] = self.inner.encode(f"{self._anchor}{piece}", add_special_tokens=False, **options)
        if tokens[: len(before)] == before:
            return tokens[len(before) :]
        return self.inner.encode(piece, add_special_tokens=False, **options)

    def _opening_tokens(self) -> list[int]:
        tokens: list[int] = self.inner.encode("", add_special_tokens=True)
        if tokens not in ([], [self.inner.bos_token_id]):
            raise ValueError(
                f"this tokenizer puts the tokens {tokens} around every text, so shielded text cannot be "
                "encoded in pieces; use a renderer that encodes with add_special_tokens=False"
            )
        return tokens

    def _cuts(self, text: str) -> list[int]:
        """Positions to cut at: inside every occurrence, and at ends that a token could reach across."""
        if self._first_letter is None or not text:
            return []
        cuts: set[int] = set()
        if any(opening in text for opening in self._openings):
            starts = (match.start() for match in self._first_letter.finditer(text))
            cuts = {start + 1 for start in starts if _starts_word(text, start, self._trie)}
        reach = range(1, min(self._longest, len(text)) + 1)
        if text[0] in self._later and any(text[:length] in self._suffixes for length in reach):
            cuts.add(0)
        if text[-1] in self._earlier and any(text[-length:] in self._prefixes for length in reach):
            cuts.add(len(text))
        if len(text) < self._longest and any(text in word[1:-1] for word in self._words):
            cuts.add(0)  # what stands around it could make the token whole
        return sorted(cuts)

    def _split_folded(self, piece: str) -> list[str]:
        """Cut tokens that only show after the tokenizer's own normalisation (of fullwidth letters, say)."""
        done: list[str] = []
        waiting = [piece]
        while waiting:
            current = waiting.pop()
            encoding = self.inner.backend_tokenizer.encode(current, add_special_tokens=False)
            spans = [
                span
                for id_, span in zip(encoding.ids, encoding.offsets, strict=True)
                if id_ in self.control_ids
            ]
            # one character that is folded into a whole token cannot be cut
            alone = {start for start, end in spans if end - start == 1}
            current = "".join("\ufffd" if place in alone else letter for place, letter in enumerate(current))
            middles = [(start + end) // 2 for start, end in spans if end - start > 1]
            if not middles:
                done.append(current)
                continue
            bounds = zip([0, *middles], [*middles, len(current)], strict=True)
            waiting.extend(reversed([current[start:end] for start, end in bounds]))
        return done


def _anchor(inner: Any) -> str:
    """Text that keeps the tokenizer from putting a space before a piece; empty if it puts none, or nothing keeps it."""

    def encode(text: str) -> list[int]:
        return list(inner.encode(text, add_special_tokens=False))

    alone = encode("x")
    for anchor in _ANCHORS:
        before, behind = encode(anchor), encode(f"{anchor}x")
        if behind[: len(before)] == before:
            return "" if behind[len(before) :] == alone else anchor
    return ""


def _folds_text(inner: Any, guarded: Mapping[str, int]) -> bool:
    """Whether some added token is looked for in normalised text, where it may be spelled otherwise."""
    backend = getattr(inner, "backend_tokenizer", None)
    if backend is None or backend.normalizer is None:
        return False
    decoder = inner.added_tokens_decoder
    return any(decoder[id_].normalized for id_ in guarded.values() if id_ in decoder)


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
