"""The kept tokens of a conversation, made safe to show, joined with the turns that they are the replies of."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from viva.view.markup import visible
from viva.view.recorded import RecordedConversation, RecordedTokens

__all__ = ["token_payload"]

_COLUMNS = ("ids", "sampling", "training", "anchor", "weights", "mask", "advantages")
"""Lists of ``tokens.jsonl`` with one value for every token of a turn."""


def token_payload(row: Mapping[str, Any], record: RecordedConversation | None) -> dict[str, Any]:
    """Tokens of one conversation, ready for JSON.

    Args:
        row: A line of ``tokens.jsonl``, see `viva.training.token_records`.
        record: The conversation they belong to, if one was recorded.

    Raises:
        ValueError: If a value is of another kind, or the line does not hold one value per token.
    """
    try:
        tokens = RecordedTokens.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ValueError(
            f"not the tokens of a conversation: {field}: {first['msg']}; the file is damaged"
        ) from error
    turns = [_turn(turn.model_dump(), record) for turn in tokens.turns]
    if record is not None:  # as they are read: what an agent said in two lanes of a round stands together
        turns.sort(key=lambda turn: _reading_order(turn["place"], record))
    streams = sorted({span["stream"] for turn in turns for span in turn["spans"]})
    return {"strategy": visible(tokens.strategy or ""), "streams": streams, "turns": turns}


def _reading_order(place: int | None, record: RecordedConversation) -> tuple[float, ...]:
    if place is None:
        return (math.inf,)
    turn = record.turns[place]
    return (turn.agent_id, turn.round_index, turn.lane)


def _turn(turn: Mapping[str, Any], record: RecordedConversation | None) -> dict[str, Any]:
    ids: Sequence[int] = turn["ids"]
    pieces = [visible(piece) for piece in turn.get("pieces") or [f"[{token}]" for token in ids]]
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
                "stream": visible(str(span["stream"])),
                "reward": span.get("reward"),
            }
            for span in turn.get("spans") or ()
        ],
        "sampled_in": _context(turn, "sampled_in"),
        "trained_in": _context(turn, "trained_in"),
    }


def _context(turn: Mapping[str, Any], name: str) -> str | None:
    text = turn.get(name)
    return None if text is None else visible(str(text))


def _who(seat: int, turn: int, record: RecordedConversation | None) -> dict[str, Any]:
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
        title = f"agent {agent}, round {own.round_index + 1}: {visible(own.segment)}"
    return {"seat": seat, "turn": turn, "place": place, "title": title}
