"""A conversation as the page gets it: safe text, nothing too long, and what only the server can work out."""

from collections.abc import Mapping
from typing import Any

from viva.judging.ballots import Item, Preference, Vote
from viva.view.entries import known_answers
from viva.view.judgement import (
    PairVerdict,
    agreement_of_comparisons,
    agreement_of_votes,
    cycles_of_ballots,
    judge_pairs,
    pair_cycles,
    preferences_of,
)
from viva.view.markup import clip, visible
from viva.view.recorded import RecordedConversation, RecordedTurn, Transcript
from viva.view.sights import sightings

__all__ = ["conversation_payload", "rankings_payload", "text_at"]

_MAX_REF_PARTS = 8


def conversation_payload(transcript: Transcript) -> dict[str, Any]:
    """Everything about one conversation, ready for JSON.

    Texts are ``{"head", "left_out", "tail", "ref"}``: `text_at` gives the whole text of a reference.
    """
    record = transcript.record
    return {
        "step": transcript.step,
        "group": transcript.group,
        "void": transcript.void,
        "void_reason": None if transcript.void_reason is None else visible(transcript.void_reason),
        "tags": [visible(tag) for tag in transcript.tags],
        "record": None if record is None else _record(record),
    }


def text_at(row: Mapping[str, Any], ref: str) -> str:
    """The text that a reference names, whole and visible.

    Raises:
        ValueError: If there is no text there.
    """
    value: Any = row
    parts = ref.split(".")
    for part in parts[:_MAX_REF_PARTS]:
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            value = None
    if not isinstance(value, str) or len(parts) > _MAX_REF_PARTS:
        raise ValueError(f"there is no text {ref[:60]!r} in this conversation")
    return visible(value)


def _text(text: str, ref: str) -> dict[str, Any]:
    head, left_out, tail = clip(text)
    return {"head": visible(head), "left_out": left_out, "tail": visible(tail), "ref": ref}


def _record(record: RecordedConversation) -> dict[str, Any]:
    said = [(item.agent_id, item.first, item.second, item.outcome) for item in record.comparisons]
    pairs = judge_pairs(said)
    agreement = agreement_of_comparisons(said, record.correct_initial or {}, record.correct or {})
    return {
        "question": _text(record.question, "record.question"),
        "answer": None if record.answer is None else _text(record.answer, "record.answer"),
        "protocol": visible(record.protocol),
        "system": _text(record.system_prompt, "record.system_prompt"),
        "judge": None
        if record.judge is None
        else {
            "system": _text(record.judge.system_prompt, "record.judge.system_prompt"),
            "prefill": visible(record.judge.prefill),
        },
        "agents": [_agent(record, agent) for agent in record.agent_ids],
        "turns": [_turn(record, place) for place in range(len(record.turns))],
        "failures": [
            {
                "agent": failure.agent_id,
                "round": failure.round_index,
                "reason": _text(failure.reason, f"record.failures.{place}.reason"),
            }
            for place, failure in enumerate(record.failures)
        ],
        "rules": {visible(name): visible(str(value)) for name, value in sorted(record.rules.items())},
        "comparisons": [_comparison(record, place) for place in range(len(record.comparisons))],
        "pairs": [_pair(pair) for pair in pairs],
        "cycles": [list(cycle) for cycle in pair_cycles(pairs)],
        "agreement": {"right": agreement.num_right, "of": agreement.num_pairs},
        "rankings": rankings_payload(record),
    }


def _agent(record: RecordedConversation, agent: int) -> dict[str, Any]:
    scores = record.scores
    return {
        "id": agent,
        "reward": record.rewards.get(agent),
        "right_before": (record.correct_initial or {}).get(agent),
        "right": (record.correct or {}).get(agent),
        "before": scores.initial.get(agent),
        "before_error": scores.initial_error.get(agent),
        "after": scores.final.get(agent),
        "after_error": scores.final_error.get(agent),
        "streams": {visible(name): value for name, value in record.streams.get(agent, {}).items()},
    }


def _turn(record: RecordedConversation, place: int) -> dict[str, Any]:
    turn = record.turns[place]
    at = f"record.turns.{place}"
    response = turn.response
    earlier = sightings(record, place)
    return {
        "agent": turn.agent_id,
        "round": turn.round_index,
        "segment": visible(turn.segment),
        "lane": turn.lane,
        "status": visible(turn.status),
        "saw": _text(turn.prompt, f"{at}.prompt"),
        "said": _text(turn.text, f"{at}.text"),
        "parts": _parts(turn, at),
        "votes": None if response.preferences is None else [_vote(vote) for vote in response.preferences],
        "critiques": None
        if response.critiques is None
        else [
            {"target": critique.target, "text": _text(critique.text, f"{at}.response.critiques.{index}.text")}
            for index, critique in enumerate(response.critiques)
        ],
        "dropped": {visible(cause): count for cause, count in response.dropped.items()},
        "seen": [{"turn": sighting.turn, "part": sighting.part} for sighting in earlier if sighting.is_seen],
        "hidden": [
            {"turn": sighting.turn, "part": sighting.part} for sighting in earlier if not sighting.is_seen
        ],
    }


def _parts(turn: RecordedTurn, at: str) -> list[dict[str, Any]]:
    """What a reply was read into, for replies that are solutions."""
    response = turn.response
    named = (
        ("reflection", response.reflection),
        ("evaluation", response.evaluation),
        ("decision", response.decision),
        ("solution", response.solution),
    )
    return [
        {"name": name, "text": _text(text, f"{at}.response.{name}")} for name, text in named if text.strip()
    ]


def _vote(vote: Vote) -> dict[str, Any]:
    if isinstance(vote, Preference):
        return {"above": _item(vote.winner), "below": _item(vote.loser), "tie": False}
    return {"above": _item(vote.first), "below": _item(vote.second), "tie": True}


def _item(item: Item) -> str:
    return f"agent {item}" if isinstance(item, int) else visible(f"{item[0]} {item[1]}")


def _comparison(record: RecordedConversation, place: int) -> dict[str, Any]:
    item = record.comparisons[place]
    return {
        "agent": item.agent_id,
        "first": item.first,
        "second": item.second,
        "outcome": visible(item.outcome),
        "score": item.score,
        "probabilities": item.probabilities,
        "text": _text(item.text, f"record.comparisons.{place}.text"),
        "prompt": _text(item.prompt, f"record.comparisons.{place}.prompt"),
    }


def _pair(pair: PairVerdict) -> dict[str, Any]:
    return {
        "agent": pair.agent_id,
        "items": pair.items,
        "winner": pair.winner,
        "flipped": pair.is_flipped,
        "both_orders": pair.in_both_orders,
    }


def rankings_payload(record: RecordedConversation) -> list[dict[str, Any]]:
    """Every kind of ranking: items, who put what above what, cycles, and agreement with known answers."""
    ballots: dict[str, dict[int, list[Vote]]] = {}
    for turn in record.turns:
        if turn.response.preferences:
            by_voter = ballots.setdefault(turn.segment, {})
            by_voter.setdefault(turn.agent_id, []).extend(turn.response.preferences)
    return [_ranking(record, segment, by_voter) for segment, by_voter in ballots.items()]


def _ranking(record: RecordedConversation, segment: str, ballots: Mapping[int, list[Vote]]) -> dict[str, Any]:
    votes = [(voter, vote) for voter, cast_votes in ballots.items() for vote in cast_votes]
    shown = [{"voter": voter, **_vote(vote)} for voter, vote in votes]
    items = sorted({side for vote in shown for side in (vote["above"], vote["below"])})
    known = known_answers(record.correct_initial or {}, record.correct or {}, segment)
    agreement = agreement_of_votes(preferences_of([vote for _, vote in votes]), known)
    return {
        "segment": visible(segment),
        "items": items,
        "votes": shown,
        "cycles": [[_item(item) for item in cycle] for cycle in cycles_of_ballots(ballots)],
        "agreement": {"right": agreement.num_right, "of": agreement.num_pairs},
    }
