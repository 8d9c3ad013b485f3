"""Mistakes in the declaration of a protocol, found before anything is played."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from viva.conversation.tools import MAX_CALLS

if TYPE_CHECKING:
    from viva.conversation.protocol import Protocol, Round, Segment, Sight


def mistakes_of(protocol: Protocol) -> list[str]:
    """Every mistake of a protocol, one line each; none for a protocol that can be played."""
    return [
        *_protocol_values(protocol),
        *(
            f"round {name!r} stands twice: give it another name"
            for name in _twice(r.name for r in protocol.rounds)
        ),
        *(mistake for round_ in protocol.rounds for mistake in _round_values(round_)),
        *_ambiguous_segments(protocol),
        *_lanes_without_words(protocol),
        *(mistake for index in range(len(protocol.rounds)) for mistake in _blind_sights(protocol, index)),
    ]


def _protocol_values(protocol: Protocol) -> Iterator[str]:
    if not protocol.rounds:
        yield "it has no round: add at least one"
    if any(round_.segments for round_ in protocol.rounds) and not protocol.streams:
        yield "no segment has a stream, so that nothing would earn or be trained: give one a stream"
    if protocol.on_failure not in ("void", "continue"):
        yield f"on_failure must be 'void' or 'continue'; got {protocol.on_failure!r}"
    if protocol.min_agents < 1:
        yield f"min_agents must be at least 1; got {protocol.min_agents}"


def _round_values(round_: Round) -> Iterator[str]:
    where = f"round {round_.name!r}"
    if not round_.segments:
        yield f"{where} asks for nothing: give it at least one segment"
    if round_.order not in ("sequential", "simultaneous"):
        yield f"{where}: order must be 'sequential' or 'simultaneous'; got {round_.order!r}"
    for name in _twice(segment.name for segment in round_.segments):
        yield f"{where} has two segments {name!r}: give one of them another name"
    for segment in round_.segments:
        yield from _segment_values(segment, where)
    for name in _twice(tool.name for tool in round_.tools):
        yield f"{where} has two tools {name!r}: give one of them another name"
    if round_.max_calls < 1:
        yield f"{where}: max_calls must be at least 1; got {round_.max_calls}"
    elif round_.max_calls != MAX_CALLS and not round_.tools:
        yield f"{where} has max_calls={round_.max_calls} and no tools to call: give it tools, or leave max_calls out"
    for sight in round_.sights:
        if sight.whose not in ("all", "own", "addressed"):
            yield (
                f"{where} sees {', '.join(sight.segments)}: whose must be 'all', 'own' or 'addressed'; "
                f"got {sight.whose!r}"
            )


def _segment_values(segment: Segment, where: str) -> Iterator[str]:
    if not segment.name:
        yield f"{where} has a segment without a name: name it"
    if not (isinstance(segment.instruction, str) or callable(segment.instruction)):
        yield (
            f"{where}, segment {segment.name!r}: instruction must be a text, or a function of the View that makes "
            f"one; got {segment.instruction!r}"
        )
    if segment.on_invalid not in ("keep", "fail"):
        yield (
            f"{where}, segment {segment.name!r}: on_invalid must be 'keep' or 'fail'; got {segment.on_invalid!r}"
        )
    if segment.votes_on is not None and segment.stream is not None:
        yield (
            f"{where}, segment {segment.name!r} votes without words, and nobody earns what was not sampled: set "
            f"stream=None; got {segment.stream!r}"
        )


def _ambiguous_segments(protocol: Protocol) -> Iterator[str]:
    """Rounds may ask for one segment again, but one name must not stand for two."""
    first: dict[str, tuple[Segment, str]] = {}
    for round_ in protocol.rounds:
        for segment in round_.segments:
            known, where = first.setdefault(segment.name, (segment, round_.name))
            if known != segment and where != round_.name:
                yield (
                    f"segment {segment.name!r} is one thing in round {where!r} and another in round "
                    f"{round_.name!r}: give one of them another name"
                )


def _lanes_without_words(protocol: Protocol) -> Iterator[str]:
    """Seats that would never write: a rollout has at least one reply."""
    lanes = max((len(round_.segments) for round_ in protocol.rounds), default=0)
    for lane in range(lanes):
        asked = [round_.segments[lane] for round_ in protocol.rounds if len(round_.segments) > lane]
        if all(segment.votes_on is not None for segment in asked):
            names = ", ".join(repr(segment.name) for segment in asked)
            yield f"of the segments at place {lane + 1} of their rounds, {names}, none is written: put them first"


def _blind_sights(protocol: Protocol, index: int) -> Iterator[str]:
    """Sights that can never show anything."""
    names_R = [{segment.name for segment in round_.segments} for round_ in protocol.rounds]
    round_ = protocol.rounds[index]
    for sight in round_.sights:
        if not sight.segments:
            yield f"round {round_.name!r} has a sight of no segment: name at least one"
        for name in sight.segments:
            what = f"round {round_.name!r} sees segment {name!r}"
            if any(name in names for names in names_R[:index]):
                continue
            if name in names_R[index]:
                yield from _same_round(sight, round_, what)
            elif any(name in names for names in names_R[index:]):
                yield f"{what}, which is asked for only later: move the sight to a later round"
            else:
                known = ", ".join(sorted(set[str]().union(*names_R)))
                yield f"{what}, which no round asks for; allowed: {known}. Name one of them or add the segment."


def _same_round(sight: Sight, round_: Round, what: str) -> Iterator[str]:
    if round_.order == "simultaneous":
        yield (
            f"{what}, which is asked for in the same round, and a simultaneous round never sees itself: set "
            "order='sequential', or move the sight to a later round"
        )
    elif sight.whose == "own":
        yield f"{what} of the agent itself before it is written: move the sight to a later round"


def _twice(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]
