"""One whole conversation as HTML: rounds by agents, then the verdict on every pair in both orders."""

from collections.abc import Sequence

from viva.report.markup import data, escape, text_block
from viva.report.recorded import (
    RecordedComparison,
    RecordedConversation,
    RecordedFailure,
    RecordedTurn,
    Transcript,
)

__all__ = ["conversation_html"]

_WINNERS = {"A": "first", "B": "second"}


def conversation_html(transcript: Transcript, reason: str) -> str:
    """A recorded conversation as an ``<article>``.

    Args:
        transcript: A transcript with a record.
        reason: Why it is shown; its heading.

    Raises:
        ValueError: If the transcript has no record.
    """
    record = transcript.record
    if record is None:
        raise ValueError(
            f"step {transcript.step}, group {transcript.group} has no recorded conversation to show"
        )
    where = " \u00b7 ".join([f"step {transcript.step}", f"group {transcript.group}", *transcript.tags])
    void = ""
    if transcript.void:
        why = f": {escape(transcript.void_reason)}" if transcript.void_reason else ""
        void = f'<p class="failure">Void, it trained nothing{why}</p>'
    answer = "" if record.answer is None else f"<p>Right answer</p>{text_block(record.answer)}"
    return (
        f'<article class="conversation"><h3>{escape(reason.capitalize())}</h3>'
        f'<p class="muted">{escape(where)}</p>{void}'
        f'<div class="question"><p>Question</p>{text_block(record.question)}{answer}</div>'
        f"{_rounds(record)}{_verdicts(record)}</article>"
    )


def _rounds(record: RecordedConversation) -> str:
    agents = record.agent_ids
    turns = {(turn.round_index, turn.agent_id): turn for turn in record.turns}
    failures = {(failure.round_index, failure.agent_id): failure for failure in record.failures}
    heads = "".join(f'<th scope="col">{_agent_head(record, agent)}</th>' for agent in agents)
    rows: list[str] = []
    for round_index in sorted({where[0] for where in (*turns, *failures)}):
        cells = "".join(
            _cell(turns.get((round_index, agent)), failures.get((round_index, agent))) for agent in agents
        )
        rows.append(f'<tr><th scope="row">{round_index + 1}</th>{cells}</tr>')
    return (
        '<div class="scroll"><table class="rounds"><thead><tr><th scope="col">Round</th>'
        f"{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _agent_head(record: RecordedConversation, agent: int) -> str:
    parts = [f"Agent {agent}"]
    if agent in record.rewards:
        reward = record.rewards[agent]
        parts.append(f'<span class="reward">reward {data(reward, f"{reward:+.2f}")}</span>')
    if record.correct is not None and agent in record.correct:
        parts.append(_mark(record.correct[agent]))
    return " ".join(parts)


def _mark(is_right: bool) -> str:
    return (
        '<span class="mark right">\u2713 right</span>'
        if is_right
        else '<span class="mark wrong">\u2717 wrong</span>'
    )


def _cell(turn: RecordedTurn | None, failure: RecordedFailure | None) -> str:
    parts: list[str] = []
    if turn is not None:
        response = turn.response
        if turn.status != "ok":
            parts.append(f'<p class="status">{escape(turn.status)}</p>')
        parts.append(f"<div><h4>Solution</h4>{text_block(response.solution)}</div>")
        for title, text in (("Evaluation", response.evaluation), ("Reflection", response.reflection)):
            if text.strip():
                parts.append(f'<div class="aside"><h4>{title}</h4>{text_block(text)}</div>')
        for title, text in (("What it read", turn.prompt), ("Reply as sampled", turn.text)):
            if text.strip():
                parts.append(f"<details><summary>{title}</summary>{text_block(text)}</details>")
    if failure is not None:
        parts.append(f'<div class="failure"><h4>Failed</h4>{text_block(failure.reason)}</div>')
    return f"<td>{''.join(parts)}</td>"


def _verdicts(record: RecordedConversation) -> str:
    if not record.comparisons:
        return ""
    agents = sorted({agent for pair in record.comparisons for agent in (pair.first, pair.second)})
    by_pair: dict[tuple[int, int], list[RecordedComparison]] = {}
    for comparison in record.comparisons:
        by_pair.setdefault((comparison.first, comparison.second), []).append(comparison)
    heads = "".join(f'<th scope="col">second: agent {agent}</th>' for agent in agents)
    rows: list[str] = []
    for first in agents:
        cells = "".join(
            _verdict_cell(by_pair.get((first, second), ()), by_pair.get((second, first), ()))
            for second in agents
        )
        rows.append(f'<tr><th scope="row">first: agent {first}</th>{cells}</tr>')
    texts = "".join(
        f"<p>Agent {item.first} first, agent {item.second} second</p>{text_block(item.text)}"
        for item in record.comparisons
        if item.text.strip()
    )
    details = f"<details><summary>What the judge wrote</summary>{texts}</details>" if texts else ""
    return (
        '<h4>Verdicts</h4><p class="muted">Who won, and the score from \u22121 (first wins) to +1 '
        "(second wins), for each order in which a pair was shown.</p>"
        f'<div class="scroll"><table class="verdicts"><thead><tr><td></td>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{details}"
    )


def _verdict_cell(comparisons: Sequence[RecordedComparison], mirrored: Sequence[RecordedComparison]) -> str:
    """The verdicts on one ordered pair; one that the other order contradicts is marked."""
    if not comparisons:
        return '<td class="none"></td>'
    winners = {_winner(item) for item in mirrored}
    lines: list[str] = []
    for item in comparisons:
        winner = _winner(item)
        text = escape(item.outcome) if winner is None else f"agent {winner}"
        score = "" if item.score is None else f" {data(item.score, f'{item.score:+.2f}')}"
        flip = "" if winner is None or not winners - {winner, None} else ' <span class="flip">flips</span>'
        lines.append(f"<p>{text}{score}{flip}{_probabilities(item)}</p>")
    return f"<td>{''.join(lines)}</td>"


def _winner(item: RecordedComparison) -> int | None:
    side = _WINNERS.get(item.outcome)
    return None if side is None else item.first if side == "first" else item.second


def _probabilities(item: RecordedComparison) -> str:
    if item.probabilities is None:
        return ""
    shown = ", ".join(
        f"{label} {data(probability, f'{probability:.2f}')}"
        for label, probability in zip(("A", "B", "tie"), item.probabilities, strict=True)
    )
    return f'<br><span class="muted">{shown}</span>'
