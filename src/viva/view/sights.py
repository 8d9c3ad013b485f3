"""What an agent saw of what had been said before its turn, and what was hidden from it.

The prompt of every turn is kept word for word; what stands in it, quoted as protocols quote, was seen. So this holds
for any protocol, and needs none: it is read off the record.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from viva.conversation.prompts import quote
from viva.view.recorded import RecordedConversation, RecordedTurn

__all__ = ["Sighting", "sightings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One earlier thing that was said, from the place of a later turn."""

    turn: int
    """Place of the earlier turn in the record."""
    part: str
    """What of it: ``solution``, ``critique of agent 1`` or ``ranking``."""
    is_seen: bool


def sightings(record: RecordedConversation, place: int) -> list[Sighting]:
    """Everything said before a turn, in order, and whether the turn's prompt shows it.

    Two agents that said the same are seen together: the words are there.

    Args:
        record: The conversation.
        place: Of the turn in the record's turns.
    """
    own = record.turns[place]
    return [
        Sighting(turn=index, part=part, is_seen=bool(text.strip()) and quote(text) in own.prompt)
        for index, turn in enumerate(record.turns)
        if _is_before(turn, own, is_sequential=_is_sequential(record))
        for part, text in _parts(turn)
    ]


def _is_sequential(record: RecordedConversation) -> bool:
    """Whether agents reply one after another; older records of conversations that did so do not tell."""
    return record.order == "sequential" or (not record.order and record.protocol in ("", "round_robin"))


def _is_before(turn: RecordedTurn, own: RecordedTurn, *, is_sequential: bool) -> bool:
    if turn.round_index != own.round_index:
        return turn.round_index < own.round_index
    return is_sequential and turn.agent_id < own.agent_id


def _parts(turn: RecordedTurn) -> Iterator[tuple[str, str]]:
    response = turn.response
    if response.critiques is not None:
        for critique in response.critiques:
            yield f"critique of agent {critique.target}", critique.text
        if not response.critiques:
            yield "critique", turn.text
    elif response.preferences is not None:
        yield "ranking", turn.text
    else:
        yield "solution", response.solution
