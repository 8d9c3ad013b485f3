"""A conversation as the page gets it: its record with safe texts, nothing too long, and what has to be worked out.

Tokens that were kept are joined with the turns that they are the replies of.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, Field, ValidationError

from viva.conversation.protocol import quote
from viva.conversation.records import CritiqueReply, Solution, ToolCall, Turn
from viva.judging.ranking import RankingReply
from viva.judging.records import ConversationRecord, Transcript
from viva.run.secrets import printable, without_secrets
from viva.view.files import Row
from viva.view.judgement import judge_conversation

MAX_TEXT_CHARS = 6000
"""Longer texts lose their middle; the page says how much."""

_KEPT_HEAD = 4500
_KEPT_TAIL = 1000

_PAIR = ("agent_id", "items", "is_flipped", "in_both_orders")


def conversation_payload(transcript: Transcript) -> dict[str, object]:
    """Everything about one conversation, ready for JSON.

    Texts that are too long are ``{"head", "left_out", "tail", "ref"}``: `text_at` gives the whole text of a reference.
    """
    return {
        "step": transcript.step,
        "group": transcript.group,
        "void": transcript.void,
        "void_reason": None if transcript.void_reason is None else printable(transcript.void_reason),
        "tags": [printable(tag) for tag in transcript.tags],
        "record": None if transcript.record is None else _record(transcript.record),
    }


def _record(record: ConversationRecord) -> dict[str, object]:
    """The record by its own names, and of every turn what it saw."""
    pairs, verdicts = judge_conversation(record)
    shown = _shown(record, "record")
    for place, turn in enumerate(shown["turns"]):
        turn["sightings"] = sightings(record, place)
    return shown | {
        "agent_ids": record.agent_ids,
        "rules": {printable(name): printable(str(value)) for name, value in sorted(record.rules.items())},
        "pairs": [{name: getattr(pair, name) for name in _PAIR} for pair in pairs],
        "verdicts": _shown(verdicts, ""),
    }


def _shown(value: Any, ref: str) -> Any:
    """A value ready for JSON, with texts that can be shown and the names of declared fields."""
    if isinstance(value, str):
        head, left_out, tail = clip(value)
        shown = {"head": printable(head), "left_out": left_out, "tail": printable(tail), "ref": ref}
        return shown if left_out else shown["head"]
    if isinstance(value, list | tuple):
        return [_shown(item, f"{ref}.{place}") for place, item in enumerate(value)]
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    elif is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {printable(str(name)): _shown(item, f"{ref}.{name}") for name, item in value.items()}
    return value


def text_at(row: Row, ref: str) -> str:
    """The text that a reference names, whole and visible; `ValueError` if there is none."""
    value: Any = row
    for part in ref.split("."):
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            value = None
    if not isinstance(value, str):
        raise ValueError(f"there is no text {ref[:60]!r} in this conversation")
    return printable(value)


def clip(text: str) -> tuple[str, int, str]:
    """Head of a text, number of characters left out after it, and tail; a short text is all head.

    Credentials are hidden here: half of one would not be known.
    """
    text = without_secrets(text)
    if len(text) <= MAX_TEXT_CHARS:
        return text, 0, ""
    return text[:_KEPT_HEAD], len(text) - _KEPT_HEAD - _KEPT_TAIL, text[-_KEPT_TAIL:]


def sightings(record: ConversationRecord, place: int) -> list[dict[str, object]]:
    """Everything said before a turn, by its place in the record, and whether the turn's prompt shows it.

    Of each ``turn`` (place in the record), ``part`` (like ``solution`` or ``critique of agent 1``) and ``is_seen``.
    Two agents that said the same are seen together: the words are there.
    """
    own = record.turns[place]
    # older records of conversations in which agents reply one after another do not tell
    is_sequential = record.order == "sequential" or (
        not record.order and record.protocol in ("", "round_robin")
    )
    return [
        {"turn": index, "part": part, "is_seen": bool(text.strip()) and quote(text) in own.prompt}
        for index, turn in enumerate(record.turns)
        if turn.round_index < own.round_index
        or (is_sequential and turn.round_index == own.round_index and turn.agent_id < own.agent_id)
        for part, text in _said(turn)
    ]


def _said(turn: Turn) -> Iterator[tuple[str, str]]:
    response = turn.response
    if isinstance(response, CritiqueReply):
        for critique in response.critiques:
            yield f"critique of agent {critique.target}", critique.text
        if not response.critiques:
            yield "critique", turn.text
    elif isinstance(response, RankingReply):
        yield "ranking", turn.text
    elif isinstance(response, ToolCall):
        yield "call", turn.text[: response.stop]
    else:
        yield "solution", response.solution if isinstance(response, Solution) else turn.text


_Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
_Column: TypeAlias = tuple[_Number | None, ...] | None


class _Span(BaseModel, frozen=True):
    """Tokens of a turn that earned one reward."""

    start: int
    stop: int
    stream: str
    reward: _Number | None = None


class _TokenTurn(BaseModel, frozen=True):
    """Kept tokens of one turn, with one value for each in every list; see `viva.training.records`."""

    seat: Annotated[int, Field(ge=0)]
    turn: Annotated[int, Field(ge=0)]
    ids: tuple[int, ...]
    pieces: tuple[str, ...] | None = None
    sampling: _Column = None
    training: _Column = None
    anchor: _Column = None
    weights: _Column = None
    mask: tuple[int | None, ...] | None = None
    advantages: _Column = None
    spans: tuple[_Span, ...] = ()
    sampled_in: str | None = None
    trained_in: str | None = None


class _TokensRecord(BaseModel, frozen=True):
    """One line of ``tokens.jsonl``."""

    strategy: str | None = None
    turns: tuple[_TokenTurn, ...] = ()


def token_payload(
    row: Row, record: ConversationRecord | None, max_tokens: int | None = None
) -> dict[str, object]:
    """Tokens of one conversation, ready for JSON, from a line of ``tokens.jsonl`` and the record, if one was kept.

    With `max_tokens`, turns lose their tokens behind so many, and contexts their middle.

    Raises:
        ValueError: If a value is of another kind, or the line does not hold one value per token.
    """
    tokens = _read_tokens(row)
    turns = [(turn, _place(turn, record)) for turn in tokens.turns]
    if record is not None:  # as they are read: what an agent said in two lanes of a round stands together
        turns.sort(key=lambda pair: _reading_order(pair[1], record))
    return {
        "strategy": printable(tokens.strategy or ""),
        "streams": sorted({printable(span.stream) for turn in tokens.turns for span in turn.spans}),
        "turns": [_token_turn(turn, place, record, max_tokens) for turn, place in turns],
    }


def _read_tokens(row: Row) -> _TokensRecord:
    try:
        return _TokensRecord.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ValueError(
            f"not the tokens of a conversation: {field}: {first['msg']}; the file is damaged"
        ) from error


def solution_logprobs(row: Row, record: ConversationRecord) -> dict[int, tuple[float, ...]]:
    """By agent, sampling logprobs of the reply that gives its final solution, where its tokens were kept.

    Raises:
        ValueError: If it is no line of ``tokens.jsonl``.
    """
    ordered = sorted(enumerate(record.turns), key=lambda pair: (pair[1].round_index, pair[1].lane))
    last = {turn.agent_id: place for place, turn in ordered if isinstance(turn.response, Solution)}
    by_place = {_place(turn, record): turn.sampling for turn in _read_tokens(row).turns}
    found: dict[int, tuple[float, ...]] = {}
    for agent_id, place in last.items():
        known = [each for each in by_place.get(place) or () if each is not None]
        if known and len(known) == len(by_place[place] or ()):
            found[agent_id] = tuple(known)
    return found


def _place(turn: _TokenTurn, record: ConversationRecord | None) -> int | None:
    """The turn's place in the record: seats go agent by agent and lane by lane, written turns by round."""
    if record is None:
        return None
    agent_lane = divmod(turn.seat, _num_lanes(record))
    places = [
        place
        for place, each in sorted(enumerate(record.turns), key=lambda pair: pair[1].round_index)
        if (each.agent_id, each.lane) == agent_lane and each.response.is_sampled
    ]
    return places[turn.turn] if turn.turn < len(places) else None


def _num_lanes(record: ConversationRecord) -> int:
    return max((each.lane for each in record.turns), default=0) + 1


def _reading_order(place: int | None, record: ConversationRecord) -> tuple[float, ...]:
    if place is None:
        return (math.inf,)
    turn = record.turns[place]
    return (turn.agent_id, turn.round_index, turn.lane)


def _title(turn: _TokenTurn, place: int | None, record: ConversationRecord | None) -> str:
    if record is None:
        return f"seat {turn.seat}, turn {turn.turn + 1}"
    if place is None:
        return f"agent {turn.seat // _num_lanes(record)}, turn {turn.turn + 1}"
    own = record.turns[place]
    return f"agent {own.agent_id}, round {own.round_index + 1}: {printable(own.segment)}"


def _token_turn(
    turn: _TokenTurn, place: int | None, record: ConversationRecord | None, max_tokens: int | None
) -> dict[str, object]:
    nothing = (None,) * len(turn.ids)
    sampling, training = turn.sampling or nothing, turn.training or nothing
    anchor = sampling if turn.anchor is None else turn.anchor or nothing
    columns: dict[str, tuple[object, ...]] = {
        "ids": turn.ids,
        "pieces": tuple(printable(piece) for piece in turn.pieces or [f"[{token}]" for token in turn.ids]),
        "sampling": sampling,
        "training": training,
        "anchor": anchor,
        "weights": (1.0,) * len(turn.ids) if turn.weights is None else turn.weights or nothing,
        "mask": turn.mask or nothing,
        "advantages": turn.advantages or nothing,
    }
    if any(len(values) != len(turn.ids) for values in columns.values()):
        raise ValueError(
            "a turn of tokens.jsonl needs one value per token in every list; the file is damaged"
        )
    ratios = [
        None if new is None or old is None else math.exp(min(new - old, 50.0))
        for new, old in zip(training, anchor, strict=True)
    ]
    contexts = {"sampled_in": turn.sampled_in, "trained_in": turn.trained_in}
    return {
        "place": place,
        "title": _title(turn, place, record),
        **{name: values[:max_tokens] for name, values in columns.items()},
        "ratios": ratios[:max_tokens],
        "left_out": 0 if max_tokens is None else max(0, len(turn.ids) - max_tokens),
        "spans": [span.model_dump() | {"stream": printable(span.stream)} for span in turn.spans],
        **{name: None if text is None else _context(text, max_tokens) for name, text in contexts.items()},
    }


def _context(text: str, max_tokens: int | None) -> str:
    if max_tokens is None:
        return printable(text)
    head, left_out, tail = clip(text)
    return printable(f"{head}[{left_out:,} characters left out]{tail}" if left_out else head)
