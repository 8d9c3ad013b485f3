"""A conversation as the page gets it: safe text, nothing too long, and what has to be worked out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from viva.conversation.prompts import quote
from viva.conversation.records import AgentResponse, CritiqueReply, Reply, Revision, Solution
from viva.judging.ballots import Item, Preference, Vote
from viva.judging.ranking import RankingReply
from viva.judging.records import ConversationRecord, Transcript, TurnRecord
from viva.run.secrets import printable, without_secrets
from viva.view.judgement import PairVerdict, RankingJudgement, judge_conversation

MAX_TEXT_CHARS = 6000
"""Longer texts lose their middle; the page says how much."""

_KEPT_HEAD = 4500
_KEPT_TAIL = 1000

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
        "void_reason": None if transcript.void_reason is None else printable(transcript.void_reason),
        "tags": [printable(tag) for tag in transcript.tags],
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
    return printable(value)


def clip(text: str) -> tuple[str, int, str]:
    """Head of a text, number of characters left out after it, and tail; a short text is all head.

    Credentials are hidden here: half of one would not be known.
    """
    text = without_secrets(text)
    if len(text) <= MAX_TEXT_CHARS:
        return text, 0, ""
    return text[:_KEPT_HEAD], len(text) - _KEPT_HEAD - _KEPT_TAIL, text[-_KEPT_TAIL:]


def _text(text: str, ref: str) -> dict[str, Any]:
    head, left_out, tail = clip(text)
    return {"head": printable(head), "left_out": left_out, "tail": printable(tail), "ref": ref}


def _record(record: ConversationRecord) -> dict[str, Any]:
    judged = judge_conversation(record)
    return {
        "question": _text(record.question, "record.question"),
        "answer": None if record.answer is None else _text(record.answer, "record.answer"),
        "protocol": printable(record.protocol),
        "system": _text(record.system_prompt, "record.system_prompt"),
        "judge": None
        if record.judge is None
        else {
            "system": _text(record.judge.system_prompt, "record.judge.system_prompt"),
            "prefill": printable(record.judge.prefill),
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
        "rules": {printable(name): printable(str(value)) for name, value in sorted(record.rules.items())},
        "comparisons": [_comparison(record, place) for place in range(len(record.comparisons))],
        "pairs": [_pair(pair) for pair in judged.pairs],
        "cycles": [list(cycle) for cycle in judged.cycles],
        "agreement": {"right": judged.agreement.num_right, "of": judged.agreement.num_pairs},
        "rankings": [_ranking(segment, ranking) for segment, ranking in judged.rankings.items()],
    }


def _agent(record: ConversationRecord, agent: int) -> dict[str, Any]:
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
        "streams": {printable(name): value for name, value in record.streams.get(agent, {}).items()},
    }


def _turn(record: ConversationRecord, place: int) -> dict[str, Any]:
    turn = record.turns[place]
    at = f"record.turns.{place}"
    response = turn.response
    earlier = sightings(record, place)
    return {
        "agent": turn.agent_id,
        "round": turn.round_index,
        "segment": printable(turn.segment),
        "lane": turn.lane,
        "status": printable(turn.status),
        "saw": _text(turn.prompt, f"{at}.prompt"),
        "said": _text(turn.text, f"{at}.text"),
        "parts": _parts(turn, at),
        "votes": [_vote(vote) for vote in response.preferences]
        if isinstance(response, RankingReply)
        else None,
        "critiques": None
        if not isinstance(response, CritiqueReply)
        else [
            {"target": critique.target, "text": _text(critique.text, f"{at}.response.critiques.{index}.text")}
            for index, critique in enumerate(response.critiques)
        ],
        "dropped": _dropped(response),
        "seen": [{"turn": sighting.turn, "part": sighting.part} for sighting in earlier if sighting.is_seen],
        "hidden": [
            {"turn": sighting.turn, "part": sighting.part} for sighting in earlier if not sighting.is_seen
        ],
    }


def _dropped(response: Reply) -> dict[str, int]:
    if not isinstance(response, RankingReply | CritiqueReply):
        return {}
    return {printable(cause): count for cause, count in response.dropped.items()}


def _parts(turn: TurnRecord, at: str) -> list[dict[str, Any]]:
    """The parts that a reply was read into, for replies that are solutions."""
    response = turn.response
    named: list[tuple[str, str]] = []
    if isinstance(response, AgentResponse):
        named += [("reflection", response.reflection), ("evaluation", response.evaluation)]
    if isinstance(response, Revision):
        named.append(("decision", response.decision))
    if isinstance(response, Solution):
        named.append(("solution", response.solution))
    return [
        {"name": name, "text": _text(text, f"{at}.response.{name}")} for name, text in named if text.strip()
    ]


def _vote(vote: Vote) -> dict[str, Any]:
    if isinstance(vote, Preference):
        return {"above": _item(vote.winner), "below": _item(vote.loser), "tie": False}
    return {"above": _item(vote.first), "below": _item(vote.second), "tie": True}


def _item(item: Item) -> str:
    return f"agent {item}" if isinstance(item, int) else printable(f"{item[0]} {item[1]}")


def _comparison(record: ConversationRecord, place: int) -> dict[str, Any]:
    item = record.comparisons[place]
    return {
        "agent": item.agent_id,
        "first": item.first,
        "second": item.second,
        "outcome": printable(item.outcome),
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


def _ranking(segment: str, ranking: RankingJudgement) -> dict[str, Any]:
    """One kind of ranking: items, who put what above what, cycles, and agreement with known answers."""
    shown = [{"voter": voter, **_vote(vote)} for voter, votes in ranking.ballots.items() for vote in votes]
    return {
        "segment": printable(segment),
        "items": sorted({side for vote in shown for side in (vote["above"], vote["below"])}),
        "votes": shown,
        "cycles": [[_item(item) for item in cycle] for cycle in ranking.cycles],
        "agreement": {"right": ranking.agreement.num_right, "of": ranking.agreement.num_pairs},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """One earlier thing that was said, from the place of a later turn."""

    turn: int
    """Place of the earlier turn in the record."""
    part: str
    """What of it: ``solution``, ``critique of agent 1`` or ``ranking``."""
    is_seen: bool


def sightings(record: ConversationRecord, place: int) -> list[Sighting]:
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
        for part, text in _said(turn)
    ]


def _is_sequential(record: ConversationRecord) -> bool:
    """Whether agents reply one after another; older records of conversations that did so do not tell."""
    return record.order == "sequential" or (not record.order and record.protocol in ("", "round_robin"))


def _is_before(turn: TurnRecord, own: TurnRecord, *, is_sequential: bool) -> bool:
    if turn.round_index != own.round_index:
        return turn.round_index < own.round_index
    return is_sequential and turn.agent_id < own.agent_id


def _said(turn: TurnRecord) -> Iterator[tuple[str, str]]:
    response = turn.response
    if isinstance(response, CritiqueReply):
        for critique in response.critiques:
            yield f"critique of agent {critique.target}", critique.text
        if not response.critiques:
            yield "critique", turn.text
    elif isinstance(response, RankingReply):
        yield "ranking", turn.text
    else:
        yield "solution", response.solution if isinstance(response, Solution) else turn.text
