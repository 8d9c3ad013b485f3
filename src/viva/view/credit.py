"""Credit on tokens as HTML: shaded by advantage, one stream at a time or all, without a script."""

from collections.abc import Mapping, Sequence
from typing import Any

from viva.view.markup import data, escape, format_number, text_block

__all__ = ["credit_html"]

_MAX_TOKENS = 1500
"""Of one turn; a long reply loses what comes after."""

_MAX_STREAMS = 6
"""With a button of their own; as many as the style sheet knows."""

_LEVELS = 5

_NUMBERS = (
    ("id", "ids"),
    ("advantage", "advantages"),
    ("sampling logprob", "sampling"),
    ("training logprob", "training"),
    ("ratio", "ratios"),
    ("weight", "weights"),
    ("mask", "mask"),
)


def credit_html(payload: Mapping[str, Any], name: str) -> str:
    """The tokens of a conversation, turn by turn.

    Args:
        payload: What `viva.view.token_turns.token_payload` made.
        name: Tells this group of buttons from others of the page.
    """
    streams: Sequence[str] = payload["streams"][:_MAX_STREAMS]
    most = max((abs(value or 0.0) for turn in payload["turns"] for value in turn["advantages"]), default=0.0)
    turns = "".join(_turn(turn, streams, most) for turn in payload["turns"])
    buttons = "".join(
        f'<label><input type="radio" name="{escape(name)}" class="s{index}"{" checked" if not index else ""}>'
        f"{escape(stream)}</label> "
        for index, stream in enumerate(["all streams", *streams])
    )
    return (
        '<div class="credit"><h4>Credit on tokens</h4><p class="muted">Green earned more than its baseline, red less; '
        "struck tokens are masked. Point at a token for its numbers.</p>"
        f'<p class="streams">{buttons}</p>{turns}</div>'
    )


def _turn(turn: Mapping[str, Any], streams: Sequence[str], most: float) -> str:
    count = len(turn["ids"])
    tokens = "".join(_token(turn, place, streams, most) for place in range(min(count, _MAX_TOKENS)))
    cut = f'<span class="cut">[{count - _MAX_TOKENS:,} tokens left out]</span>' if count > _MAX_TOKENS else ""
    names = dict.fromkeys(span["stream"] for span in turn["spans"])
    earned = f", {escape(', '.join(names))}" if names else ""
    contexts = ""
    if turn["sampled_in"] is not None or turn["trained_in"] is not None:
        contexts = "".join(
            f"<div><h4>{title}</h4>{text_block(turn[key] or '')}</div>"
            for title, key in (("Sampled in", "sampled_in"), ("Trained in", "trained_in"))
        )
        contexts = f'<div class="contexts">{contexts}</div><h4>The completion they share</h4>'
    noun = "token" if count == 1 else "tokens"
    return (
        f'<details><summary>{escape(turn["title"])} <span class="muted">{data(count)} {noun}{earned}</span>'
        "</summary>"
        f'{contexts}<p class="tokens">{tokens}{cut}</p></details>'
    )


def _token(turn: Mapping[str, Any], place: int, streams: Sequence[str], most: float) -> str:
    span = next((span for span in turn["spans"] if span["start"] <= place < span["stop"]), None)
    stream = span["stream"] if span else None
    classes = [_level(turn["advantages"][place] or 0.0, most)]
    classes += [f"t{streams.index(stream) + 1}"] if stream in streams else []
    classes += ["masked"] if turn["mask"][place] == 0 else []
    numbers = [f"{title} {_shown(turn[key][place])}" for title, key in _NUMBERS]
    if turn["anchor"][place] not in (None, turn["sampling"][place]):
        numbers.insert(4, f"anchor logprob {_shown(turn['anchor'][place])}")
    if span is not None:
        numbers.append(f"{stream} {_shown(span['reward'])}")
    text = turn["pieces"][place].replace("\n", "\u21b5\n")
    return f'<span class="{" ".join(classes)}" title="{escape(", ".join(numbers))}">{escape(text)}</span>'


def _shown(value: float | None) -> str:
    return "\u2013" if value is None else format_number(value)


def _level(value: float, most: float) -> str:
    if not value or not most:
        return "a0"
    return f"a{'p' if value > 0 else 'n'}{max(1, min(_LEVELS, -int(-abs(value) / most * _LEVELS // 1)))}"
