"""Places of pieces of a reply's text on the sampled token ids.

The ids are never encoded again from text: text has many spellings in ids, and credit must fall on those that were
sampled. Instead the ids are detokenised one after the other, which gives every token its place in the text.

- A token belongs to the span that holds its *first* character. So neighbouring spans never share a token, a token
  that begins before a span stays outside, and one that begins inside and reaches beyond belongs to the span.
- A token that begins inside a character (further bytes of an emoji) begins at that character.
- Whatever cannot be located without doubt has no span, and so earns nothing: a text that does not stand at the end of
  the detokenised reply (white space and the stop aside), or ids whose pieces do not add up to the whole.

Segments that are a whole reply need none of this: their span is the action, thinking and stop token included.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol, cast

from tinker_cookbook.renderers.base import Renderer

_UNFINISHED = "\ufffd"
_LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character: after as many tokens, a piece that still looks unfinished is just invalid."""


class Decoder(Protocol):
    """A tokenizer, as far as it is needed here."""

    def decode(self, tokens: list[int]) -> str:
        """Text of some ids."""
        ...


def token_ranges(
    renderer: Renderer, tokens_T: Sequence[int], text: str, ranges: Sequence[tuple[int, int]]
) -> list[tuple[int, int] | None]:
    """Token ranges of character ranges of a reply.

    Takes time linear in the reply, for all ranges together.

    Args:
        renderer: The one that read the reply.
        tokens_T: The sampled ids.
        text: What `viva.conversation.rendering.read_reply` returned for these ids: without thinking and stop.
        ranges: ``[start, stop)`` in characters of ``text``.

    Returns:
        ``[start, stop)`` in ``tokens_T`` for each range, in order. ``None`` where the text cannot be located in the
        ids, or no token begins in the range.

    Raises:
        ValueError: If a range does not lie in the text.
    """
    for start, stop in ranges:
        if not 0 <= start <= stop <= len(text):
            raise ValueError(f"a range must lie in the text's {len(text)} characters; got [{start}, {stop})")
    decoder, tokens = cast(Decoder, renderer.tokenizer), list(tokens_T)
    raw = decoder.decode(tokens)
    offset = _place(_body(renderer, tokens, raw), text)
    starts_T = None if offset is None else _starts(decoder, tokens, raw)
    if offset is None or starts_T is None:
        return [None] * len(ranges)
    return [_tokens_between(starts_T, offset + start, offset + stop) for start, stop in ranges]


def token_texts(decoder: Decoder, tokens_T: Sequence[int]) -> list[str]:
    """The text of every token; all together are the text of the ids, where its pieces add up to it.

    A character that several tokens spell belongs to the last of them. Takes time linear in the number of tokens.
    """
    tokens = list(tokens_T)
    raw = decoder.decode(tokens)
    starts_T = _starts(decoder, tokens, raw)
    if starts_T is None:
        return [decoder.decode([token]) for token in tokens]
    return [raw[start:stop] for start, stop in pairwise([0, *starts_T[1:], len(raw)])] if tokens else []


def _body(renderer: Renderer, tokens: list[int], raw: str) -> str:
    """The text before the stop, thinking included: the beginning of ``raw``."""
    decoder = cast(Any, renderer.tokenizer)
    stops = renderer.get_stop_sequences()
    if tokens and tokens[-1] in (*stops, decoder.eos_token_id):
        raw = str(decoder.decode(tokens[:-1]))
    for stop in stops:
        if isinstance(stop, str):
            raw = raw.partition(stop)[0]
    return raw


def _place(body: str, text: str) -> int | None:
    """The place of the text at the end of the body, white space behind it aside."""
    words = text.rstrip()
    place = len(body.rstrip()) - len(words)
    return place if words and place >= 0 and body.startswith(text, place) else None


def _starts(decoder: Decoder, tokens: list[int], raw: str) -> list[int] | None:
    """Place of every token's first character in ``raw``; ``None`` if the pieces do not add up to it.

    Each piece is read off together with the piece before it, because tokenizers write a token differently at the
    beginning of a text.
    """
    starts_T: list[int] = []
    context: list[int] = []
    pending: list[int] = []
    before = ""
    end = next_start = 0
    for index, token in enumerate(tokens):
        starts_T.append(
            next_start + raw.startswith(_UNFINISHED, next_start)
        )  # nothing continues what is broken
        pending.append(token)
        after = decoder.decode([*context, *pending])
        if not after.startswith(before):
            return None
        piece = after[len(before) :]
        is_open = piece.endswith(_UNFINISHED) and len(pending) < _LONGEST_CHARACTER
        if is_open and index + 1 < len(tokens):
            next_start = end + len(piece) - 1
            continue
        if not raw.startswith(piece, end):
            return None
        end = next_start = end + len(piece)
        context, pending = pending, []
        before = decoder.decode(context)
    return starts_T if end == len(raw) else None


def _tokens_between(starts_T: Sequence[int], start: int, stop: int) -> tuple[int, int] | None:
    """Tokens whose first character lies in ``[start, stop)``; starts are in order."""
    first, last = bisect_left(starts_T, start), bisect_left(starts_T, stop)
    return (first, last) if first < last else None
