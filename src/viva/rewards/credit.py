"""Credit: rewards on spans of sampled tokens, where these spans are, and what advantages they give.

A span is a run of sampled tokens that earned one reward of one stream (``r_sol``, ``r_diag``, ``r_meta``). With ``S``
the spans of one stream in one round of one group, every token of span ``s`` gets

    A_s = w_stream * (r_s - mean_{u in S} r_u)

and every token outside all spans gets exactly 0, because it is left out and not because its reward is 0. The unit of
the mean is the span: long spans do not set the baseline of short ones, and units of different streams never mix.

The mean contains the span's own reward. With ``n = |S|`` spans,

    E[sum_s A_s grad log pi(s)] = w sum_s ( (1 - 1/n) E[r_s grad log pi(s)] - 1/n sum_{u != s} E[r_u grad log pi(s)] )

Where the tokens of one span do not move the rewards of the others, the second sum vanishes. Where they do (strengths of
one Bradley-Terry fit sum to zero), being better than the others pays, and so does making the others worse. A lone span
(``n = 1``) has advantage 0.

Legend: ``_G`` members of a group (seats), ``_K`` transitions of a seat, ``_T`` action tokens.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, cast

from tinker_cookbook.renderers.base import Renderer

from viva.conversation.rendering import with_own_end


def group_advantages(rewards_G: Sequence[float]) -> list[float]:
    """Reward minus the group's mean, without GRPO's division by the standard deviation.

    GRPO: Shao et al., 2024, arXiv 2402.03300. The division biases towards very easy and very hard prompts (Liu et al.,
    2025, arXiv 2503.20783). Equal rewards give exact zeros, so that callers see that there is no signal.

    Raises:
        ValueError: If a reward is not a finite number.
    """
    if not all(math.isfinite(reward) for reward in rewards_G):
        raise ValueError(
            f"rewards of a group must be finite numbers; got {list(rewards_G)}. "
            "A reward that could not be computed must raise where it is computed."
        )
    if len(set(rewards_G)) <= 1:
        return [0.0] * len(rewards_G)
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanCredit:
    """One reward on the sampled tokens ``[start, stop)`` of one transition."""

    seat: int
    """Index of the environment in its group."""
    transition: int
    """Index of the turn in the seat's trajectory."""
    start: int
    stop: int
    stream: str
    round_index: int
    """The round the tokens were sampled in. Together with the stream, it names the baseline."""
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCredit:
    """Rewards on the spans of one group.

    Raises:
        ValueError: A reward or weight that is no finite number, a span without tokens, a stream without weight, or
            spans that overlap.
    """

    spans: tuple[SpanCredit, ...]
    weights: Mapping[str, float]

    def __post_init__(self) -> None:
        for stream, weight in self.weights.items():
            if not math.isfinite(weight):
                raise ValueError(f"the weight of stream {stream!r} must be a finite number; got {weight}")
        for span in self.spans:
            if not math.isfinite(span.reward):
                raise ValueError(
                    f"rewards must be finite numbers; got {span}. "
                    "A reward that could not be computed must raise where it is computed."
                )
            if not 0 <= span.start < span.stop:
                raise ValueError(
                    f"a span needs at least one token, 0 <= start < stop; got {span}. Leave it out."
                )
            if span.stream not in self.weights:
                known = ", ".join(sorted(self.weights)) or "none"
                raise ValueError(f"stream {span.stream!r} of {span} has no weight; streams with one: {known}")
        order = sorted(self.spans, key=lambda span: (span.seat, span.transition, span.start))
        for one, other in pairwise(order):
            if (one.seat, one.transition) == (other.seat, other.transition) and other.start < one.stop:
                raise ValueError(f"a token earns at most one reward; {one} and {other} overlap")

    def streams(self) -> dict[tuple[str, int], list[SpanCredit]]:
        """The spans that share a baseline, by (stream, round)."""
        found: dict[tuple[str, int], list[SpanCredit]] = {}
        for span in self.spans:
            found.setdefault((span.stream, span.round_index), []).append(span)
        return found

    def advantages(self) -> Iterator[tuple[SpanCredit, float]]:
        """Every span and the advantage of its tokens; exact zeros where all rewards of a stream's round are equal."""
        for (stream, _), spans in self.streams().items():
            centred = group_advantages([span.reward for span in spans])
            for span, advantage in zip(spans, centred, strict=True):
                yield span, self.weights[stream] * advantage


def stream_advantages(
    credit: GroupCredit, num_tokens_G_K: Sequence[Sequence[int]]
) -> list[list[list[float]] | None]:
    """Advantages of all tokens of a group, given the numbers of sampled tokens per seat and transition.

    Returns:
        Per seat ``[transition][token]``, or ``None`` for a seat in which nothing carries a signal.

    Raises:
        ValueError: If a span lies outside the sampled tokens.
    """
    advantages_G_K_T = [[[0.0] * count for count in num_tokens_K] for num_tokens_K in num_tokens_G_K]
    for span, advantage in credit.advantages():
        if not 0 <= span.seat < len(num_tokens_G_K):
            raise ValueError(f"{span} must lie in one of {len(num_tokens_G_K)} seats")
        num_tokens_K = num_tokens_G_K[span.seat]
        if not (0 <= span.transition < len(num_tokens_K) and span.stop <= num_tokens_K[span.transition]):
            raise ValueError(
                f"{span} must lie in the seat's sampled tokens, {list(num_tokens_K)} per transition"
            )
        own_T = advantages_G_K_T[span.seat][span.transition]
        own_T[span.start : span.stop] = [advantage] * (span.stop - span.start)
    return [
        advantages_K_T if any(value for advantages_T in advantages_K_T for value in advantages_T) else None
        for advantages_K_T in advantages_G_K_T
    ]


# Places of text on the sampled ids. Text is never encoded again: it has many spellings in ids, and credit must fall on
# those that were sampled. A token belongs to the span that holds its first character, so neighbouring spans never share
# one; a token that begins inside a character (further bytes of an emoji) begins at that character.

_UNFINISHED = "\ufffd"
_LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character: after as many tokens, a piece that still looks unfinished is just invalid."""


class TokenDecoder(Protocol):
    """A tokenizer, as far as it is needed here."""

    def decode(self, tokens: list[int]) -> str:
        """Text of some ids."""
        ...


def token_ranges(
    renderer: Renderer, tokens_T: Sequence[int], text: str, ranges: Sequence[tuple[int, int]]
) -> list[tuple[int, int] | None]:
    """Token ranges of character ranges of a reply, in time linear in the reply for all ranges together.

    Args:
        renderer: The one that read the reply.
        tokens_T: The sampled ids.
        text: What `viva.conversation.rendering.read_reply` returned for these ids: without thinking and stop.
        ranges: ``[start, stop)`` in characters of ``text``.

    Returns:
        ``[start, stop)`` in ``tokens_T`` for each range, in order. ``None`` where no token begins in the range, or the
        text does not stand at the end of the detokenised reply (white space and the stop aside).

    Raises:
        ValueError: If a range does not lie in the text.
    """
    for start, stop in ranges:
        if not 0 <= start <= stop <= len(text):
            raise ValueError(f"a range must lie in the text's {len(text)} characters; got [{start}, {stop})")
    decoder, tokens = cast(TokenDecoder, renderer.tokenizer), list(tokens_T)
    raw = decoder.decode(tokens)
    body, words = _body(renderer, tokens, raw), text.rstrip()
    offset = len(body.rstrip()) - len(words)
    is_there = bool(words) and offset >= 0 and body.startswith(text, offset)
    starts_T = _starts(decoder, tokens, raw) if is_there else None
    if starts_T is None:
        return [None] * len(ranges)
    places = [
        (bisect_left(starts_T, offset + start), bisect_left(starts_T, offset + stop))
        for start, stop in ranges
    ]
    return [(first, last) if first < last else None for first, last in places]


def token_texts(decoder: TokenDecoder, tokens_T: Sequence[int]) -> list[str]:
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
    if tokens and with_own_end(renderer, tokens)[-1] in (*stops, decoder.eos_token_id):
        raw = str(decoder.decode(tokens[:-1]))
    for stop in stops:
        if isinstance(stop, str):
            raw = raw.partition(stop)[0]
    return raw


def _starts(decoder: TokenDecoder, tokens: list[int], raw: str) -> list[int] | None:
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
        # nothing continues a character that is broken
        starts_T.append(next_start + raw.startswith(_UNFINISHED, next_start))
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
