"""The kept tokens of a conversation, made safe to show, joined with the turns that they are the replies of."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from viva.judging.records import ConversationRecord
from viva.run.secrets import printable

_Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
_Column: TypeAlias = tuple[_Number | None, ...] | None

_COLUMNS = ("ids", "sampling", "training", "anchor", "weights", "mask", "advantages")
"""Lists of ``tokens.jsonl`` with one value for every token of a turn."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Span(_Record):
    """Tokens of a turn that earned one reward."""

    start: int
    stop: int
    stream: str
    reward: _Number | None = None


class _TokenTurn(_Record):
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


class TokensRecord(_Record):
    """One line of ``tokens.jsonl``."""

    strategy: str | None = None
    turns: tuple[_TokenTurn, ...] = ()


def token_payload(row: Mapping[str, Any], record: ConversationRecord | None) -> dict[str, Any]:
    """Tokens of one conversation, ready for JSON.

    Args:
        row: A line of ``tokens.jsonl``, see `viva.training.records`.
        record: The conversation they belong to, if one was recorded.

    Raises:
        ValueError: If a value is of another kind, or the line does not hold one value per token.
    """
    try:
        tokens = TokensRecord.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ValueError(
            f"not the tokens of a conversation: {field}: {first['msg']}; the file is damaged"
        ) from error
    turns = [_token_turn(turn.model_dump(), record) for turn in tokens.turns]
    if record is not None:  # as they are read: what an agent said in two lanes of a round stands together
        turns.sort(key=lambda turn: _reading_order(turn["place"], record))
    streams = sorted({span["stream"] for turn in turns for span in turn["spans"]})
    return {"strategy": printable(tokens.strategy or ""), "streams": streams, "turns": turns}


def _reading_order(place: int | None, record: ConversationRecord) -> tuple[float, ...]:
    if place is None:
        return (math.inf,)
    turn = record.turns[place]
    return (turn.agent_id, turn.round_index, turn.lane)


def _token_turn(turn: Mapping[str, Any], record: ConversationRecord | None) -> dict[str, Any]:
    ids: Sequence[int] = turn["ids"]
    pieces = [printable(piece) for piece in turn.get("pieces") or [f"[{token}]" for token in ids]]
    columns: dict[str, Sequence[float | None]] = {
        name: turn.get(name) or [None] * len(ids) for name in _COLUMNS
    }
    if turn.get("anchor") is None:
        columns["anchor"] = columns["sampling"]
    if turn.get("weights") is None:
        columns["weights"] = [1.0] * len(ids)
    if any(len(values) != len(ids) for values in (pieces, *columns.values())):
        raise ValueError(
            "a turn of tokens.jsonl needs one value per token in every list; the file is damaged"
        )
    return {
        **_who(int(turn["seat"]), int(turn["turn"]), record),
        "pieces": pieces,
        **columns,
        "ratios": [
            None if new is None or old is None else math.exp(min(new - old, 50.0))
            for new, old in zip(columns["training"], columns["anchor"], strict=True)
        ],
        "spans": [
            {
                "start": int(span["start"]),
                "stop": int(span["stop"]),
                "stream": printable(str(span["stream"])),
                "reward": span.get("reward"),
            }
            for span in turn.get("spans") or ()
        ],
        "sampled_in": _context(turn, "sampled_in"),
        "trained_in": _context(turn, "trained_in"),
    }


def _context(turn: Mapping[str, Any], name: str) -> str | None:
    text = turn.get(name)
    return None if text is None else printable(str(text))


def _who(seat: int, turn: int, record: ConversationRecord | None) -> dict[str, Any]:
    """Which turn of the record it is: seats go agent by agent and lane by lane, turns in order of their rounds."""
    if record is None:
        return {"seat": seat, "turn": turn, "place": None, "title": f"seat {seat}, turn {turn + 1}"}
    num_lanes = max((each.lane for each in record.turns), default=0) + 1
    agent, lane = divmod(seat, num_lanes)
    places = [
        place
        for place, each in sorted(enumerate(record.turns), key=lambda pair: pair[1].round_index)
        if (each.agent_id, each.lane) == (agent, lane)
    ]
    place = places[turn] if turn < len(places) else None
    title = f"agent {agent}, turn {turn + 1}"
    if place is not None:
        own = record.turns[place]
        title = f"agent {agent}, round {own.round_index + 1}: {printable(own.segment)}"
    return {"seat": seat, "turn": turn, "place": place, "title": title}
