"""When a sample ends.

``stop=None`` ends at the model's end-of-text tokens. Token ids or strings replace them, as in the tinker SDK (``[]``
ends nowhere before ``max_tokens``). The token that ends a sample is part of it: renderers look for it when they parse.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from viva.engine.model import BaseModel

__all__ = ["StopRule", "make_stop_rule"]

_MARGIN = 4
"""Tokens decoded in front of the longest stop string, so that a decoder's treatment of the first token of a text
(a dropped space, a broken character) cannot reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """Tokens or strings that end a sample."""

    ids: frozenset[int]
    strings: tuple[str, ...]
    tokenizer: Any
    text_of: dict[int, str]
    """Text of single tokens, filled as needed and shared by all rules of one tokenizer."""

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether the last of these sampled tokens ends the sample. Called after every token."""
        last = tokens[-1]
        if last in self.ids:
            return True
        return bool(self.strings) and self._may_complete(last) and self._text_ends(tokens)

    def _may_complete(self, token: int) -> bool:
        """Whether this token can hold the last character of a stop string. Cheap, and never wrongly false."""
        text = self.text_of.get(token)
        if text is None:
            text = self.tokenizer.decode(
                [token], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            self.text_of[token] = text
        # parts of a character decode to U+FFFD, and some tokenizers drop a leading space
        return "\ufffd" in text or any(string[-1] in text or string[-1].isspace() for string in self.strings)

    def _text_ends(self, tokens: Sequence[int]) -> bool:
        """Whether the text contains a stop string. A string of ``n`` bytes spans at most ``n`` tokens."""
        window = max(len(string.encode()) for string in self.strings) + _MARGIN
        text = self.tokenizer.decode(
            list(tokens[-window:]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(string in text for string in self.strings)


def make_stop_rule(stop: str | Sequence[str] | Sequence[int] | None, base: BaseModel) -> StopRule:
    """Read the ``stop`` field of ``SamplingParams``.

    Raises:
        ValueError: An empty string, a mixture of strings and ids, or an id the model does not have.
    """
    entries: list[object] = [stop] if isinstance(stop, str) else list(base.eos_ids if stop is None else stop)
    strings = [entry for entry in entries if isinstance(entry, str)]
    ids = [entry for entry in entries if isinstance(entry, int)]
    if len(strings) + len(ids) != len(entries) or (strings and ids):
        raise ValueError(f"stop must be a string, a list of strings or a list of token ids, not {stop!r}.")
    if "" in strings:
        raise ValueError("stop holds an empty string, which would end every sample at once. Remove it.")
    if any(not 0 <= token < base.vocab_size for token in ids):
        raise ValueError(
            f"stop={stop!r} has token ids outside 0 to {base.vocab_size - 1}, the ids of {base.name!r}."
        )
    return StopRule(
        ids=frozenset(ids), strings=tuple(strings), tokenizer=base.tokenizer, text_of=base.token_texts
    )
