"""Text of a sample while it is drawn: whole characters only, up to where it was told to stop."""

from collections.abc import Collection, Sequence
from typing import Any

_MOST_UNREAD = 8
"""Tokens that may wait for the rest of a character. It has at most four bytes, so what takes longer is none."""
_BROKEN = "\ufffd"


class SampleText:
    """Text of one sample, handed out as far as later tokens cannot change it.

    The pieces together are the text: a stop string, what follows it, and tokens that end a sample are no part of it.

    Args:
        tokenizer: Of the model.
        end_ids: Token ids that end a sample.
        stops: Strings that end it.
    """

    def __init__(self, tokenizer: Any, end_ids: Collection[int], stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._stops = stops
        self._tokens: list[int] = []
        self._start = self._read = 0
        self._held = ""
        self._is_over = False

    def feed(self, token: int) -> str:
        """The text that is certain now that this token is known."""
        if self._is_over:
            return ""
        if token in self._end_ids:
            return self.finish()
        self._tokens.append(token)
        return self._release(self._next())

    def finish(self) -> str:
        """The rest of the text."""
        if self._is_over:
            return ""
        rest = self._decode(self._start)[len(self._decode(self._start, self._read)) :]
        released = self._release(rest) + self._held
        self._is_over, self._held = True, ""
        return released

    def _next(self) -> str:
        before, text = self._decode(self._start, self._read), self._decode(self._start)
        is_whole = len(text) > len(before) and not text.endswith(_BROKEN)
        if not is_whole and len(self._tokens) - self._read < _MOST_UNREAD:
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return text[len(before) :]

    def _release(self, text: str) -> str:
        """Text that no stop string can begin in; at a stop string the text is over."""
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self._is_over, self._held = True, ""
            return text[: min(places)]
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _decode(self, start: int, end: int | None = None) -> str:
        tokens = self._tokens[start:end]
        return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that a stop string begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
