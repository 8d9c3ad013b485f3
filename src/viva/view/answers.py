"""What the page asks of runs, as values ready for JSON: the same for a server and for a report."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from viva.judging.records import Transcript
from viva.run.secrets import printable
from viva.view.conversation import conversation_payload, text_at
from viva.view.entries import Entry, Query, facets, page_of, select
from viva.view.judgement import NO_ORDERS
from viva.view.run_index import RunIndex
from viva.view.tokens import token_payload

__all__ = [
    "JudgeTotals",
    "NotFoundError",
    "conversation_answer",
    "judge_answer",
    "judge_by_step",
    "judge_totals",
    "list_answer",
    "rows_of",
    "run_answer",
    "telling",
    "text_answer",
]


class NotFoundError(LookupError):
    """There is no such run or conversation."""


def run_answer(run: RunIndex, name: str, *, is_complete: bool) -> dict[str, Any]:
    """What a run is, and how far it was read."""
    model = run.config.get("model_name")
    return {
        "name": name,
        "kind": run.kind,
        "model": printable(model) if isinstance(model, str) else "",
        "version": run.version,
        "steps": run.num_steps,
        "conversations": len(run.entries),
        "is_complete": is_complete,
        "progress": run.progress,
        "damaged": run.damaged,
        "problems": [printable(problem) for problem in run.problems],
        "config": {
            printable(key): printable(
                value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            )
            for key, value in sorted(run.config.items())
        },
    }


def list_answer(run: RunIndex, query: Query, page: int, size: int) -> dict[str, Any]:
    """One page of the conversations that match."""
    found = select(run.entries.values(), query)
    return {
        "total": len(found),
        "page": page,
        "size": size,
        "rows": rows_of(run, page_of(found, page, size)),
        "facets": facets(run.entries.values()),
    }


def rows_of(run: RunIndex, entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """Rows of a list of conversations."""
    return [asdict(entry) | {"has_tokens": run.has_tokens(entry.step, entry.group)} for entry in entries]


def conversation_answer(run: RunIndex, step: int, group: int, query: Query) -> dict[str, Any]:
    """One conversation, with its tokens where they were kept, and its neighbours among those that match.

    Raises:
        NotFoundError: If there is none.
        ValueError: If a line of a file is damaged.
    """
    transcript = Transcript.parse(f"step {step}, group {group}", _line(run, step, group))
    tokens = run.tokens(step, group)
    found = [(entry.step, entry.group) for entry in select(run.entries.values(), query)]
    at = found.index((step, group)) if (step, group) in found else None
    return {
        **conversation_payload(transcript),
        "tokens": None if tokens is None else token_payload(tokens, transcript.record),
        "previous": found[at - 1] if at else None,
        "next": found[at + 1] if at is not None and at + 1 < len(found) else None,
    }


def text_answer(run: RunIndex, step: int, group: int, ref: str) -> dict[str, Any]:
    """One whole text of a conversation.

    Raises:
        NotFoundError: If there is no such conversation.
        ValueError: If it has no such text.
    """
    return {"text": text_at(_line(run, step, group), ref)}


def _line(run: RunIndex, step: int, group: int) -> dict[str, Any]:
    row = run.transcript(step, group)
    if row is None:
        raise NotFoundError(f"this run has no conversation {group} in step {step}")
    return row


def judge_answer(run: RunIndex, query: Query, page: int, size: int) -> dict[str, Any]:
    """Figures about the judge over all conversations that match, by step, and where to look."""
    found = select(run.entries.values(), query)
    worth_a_look = telling(found)
    return {
        "totals": asdict(judge_totals(found)),
        "steps": [{"step": step, **asdict(sums)} for step, sums in judge_by_step(found).items()],
        "total": len(worth_a_look),
        "page": page,
        "size": size,
        "rows": rows_of(run, page_of(worth_a_look, page, size)),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeTotals:
    """Sums over conversations."""

    conversations: int
    pairs: int
    """Judged in both orders, with a winner in each."""
    flips: int
    """Of these, how many have two winners."""
    cycles: int
    agreeing: int
    """Preferences between a right and a wrong solution that went to the right one."""
    decidable: int
    """Such preferences."""
    orders: tuple[int, ...]
    """Pairs by their verdicts in both orders, see `viva.view.judgement.orders_of`."""


def judge_totals(entries: Iterable[Entry]) -> JudgeTotals:
    """Sums over some conversations."""
    known = list(entries)
    return JudgeTotals(
        conversations=len(known),
        pairs=sum(entry.num_pairs for entry in known),
        flips=sum(entry.num_flips for entry in known),
        cycles=sum(entry.num_cycles for entry in known),
        agreeing=sum(entry.num_agreeing for entry in known),
        decidable=sum(entry.num_decidable for entry in known),
        orders=tuple(map(sum, zip(NO_ORDERS, *(entry.orders for entry in known), strict=True))),
    )


def judge_by_step(entries: Iterable[Entry]) -> dict[int, JudgeTotals]:
    """Sums by step, in order."""
    by_step: dict[int, list[Entry]] = {}
    for entry in entries:
        by_step.setdefault(entry.step, []).append(entry)
    return {step: judge_totals(own) for step, own in sorted(by_step.items())}


def telling(entries: Iterable[Entry]) -> Sequence[Entry]:
    """Conversations with flips or cycles, in the order in which they are given."""
    return [entry for entry in entries if entry.num_flips or entry.num_cycles]
