"""One whole conversation as HTML: rounds by agents, then what it was worth."""

from collections.abc import Sequence

from viva.report.markup import data, escape, text_block
from viva.report.recorded import (
    RecordedConversation,
    RecordedFailure,
    RecordedReply,
    RecordedTurn,
    Transcript,
)
from viva.report.review import marks, rankings_html, scores_html, vote_text
from viva.report.sights import sightings
from viva.report.verdicts import verdicts_html

__all__ = ["conversation_html"]


def conversation_html(transcript: Transcript, reason: str, credit: str = "") -> str:
    """A recorded conversation as an ``<article>``.

    Args:
        transcript: A transcript with a record.
        reason: Why it is shown; its heading.
        credit: What else there is, as HTML: see `viva.report.credit`.

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
        f"{_rounds(record)}{scores_html(record)}{rankings_html(record)}{verdicts_html(record)}{credit}</article>"
    )


def _rounds(record: RecordedConversation) -> str:
    agents = record.agent_ids
    turns: dict[tuple[int, int], list[RecordedTurn]] = {}
    for turn in sorted(record.turns, key=lambda turn: turn.lane):
        turns.setdefault((turn.round_index, turn.agent_id), []).append(turn)
    failures: dict[tuple[int, int], list[RecordedFailure]] = {}
    for failure in record.failures:
        failures.setdefault((failure.round_index, failure.agent_id), []).append(failure)
    heads = "".join(f'<th scope="col">{_agent_head(record, agent)}</th>' for agent in agents)
    rows: list[str] = []
    for round_index in sorted({where[0] for where in (*turns, *failures)}):
        cells = "".join(
            _cell(record, turns.get((round_index, agent), ()), failures.get((round_index, agent), ()))
            for agent in agents
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
    return " ".join([*parts, *filter(None, [marks(record, agent)])])


def _cell(
    record: RecordedConversation, turns: Sequence[RecordedTurn], failures: Sequence[RecordedFailure]
) -> str:
    """Everything that one agent said in one round, parallel replies one below the other."""
    parts = [_turn(record, turn) for turn in turns]
    parts += [
        f'<div class="failure"><h4>Failed</h4>{text_block(failure.reason)}</div>' for failure in failures
    ]
    return f"<td>{''.join(parts)}</td>"


def _turn(record: RecordedConversation, turn: RecordedTurn) -> str:
    response = turn.response
    status = "" if turn.status == "ok" else f'<p class="status">{escape(turn.status)}</p>'
    if response.preferences is not None:
        said = _said(turn, "\n".join(map(vote_text, response.preferences)) or "no vote")
    elif response.critiques is not None:
        said = "".join(
            f"<div><h4>Critique of agent {critique.target}</h4>{text_block(critique.text)}</div>"
            for critique in response.critiques
        ) or _said(turn, "no critique")
    else:
        said = _said(turn, response.solution)
    dropped = ", ".join(f"{escape(cause)} {data(count)}" for cause, count in response.dropped.items())
    details = "".join(
        f"<details><summary>{title}</summary>{text_block(text)}{below}</details>"
        for title, text, below in (
            ("What it read", turn.prompt, _hidden(record, turn)),
            ("Reply as sampled", turn.text, ""),
        )
        if text.strip()
    )
    left_out = f'<p class="muted">left out: {dropped}</p>' if dropped else ""
    return f"{status}{said}{_asides(response)}{left_out}{details}"


def _hidden(record: RecordedConversation, turn: RecordedTurn) -> str:
    """What had been said before the turn and its agent did not see."""
    hidden = [sighting for sighting in sightings(record, record.turns.index(turn)) if not sighting.is_seen]
    if not hidden:
        return ""
    parts: list[str] = []
    for sighting in hidden:
        said = record.turns[sighting.turn]
        where = f"{sighting.part} by agent {said.agent_id} (round {said.round_index + 1})"
        parts.append(f"<li><s>{escape(where)}</s></li>")
    return f'<div class="hidden">Hidden from it<ul>{"".join(parts)}</ul></div>'


def _said(turn: RecordedTurn, text: str) -> str:
    title = "Solution" if turn.segment == "turn" else escape(turn.segment.capitalize())
    decision = f": {escape(turn.response.decision)}" if turn.response.decision else ""
    return f"<div><h4>{title}{decision}</h4>{text_block(text)}</div>"


def _asides(response: RecordedReply) -> str:
    return "".join(
        f'<div class="aside"><h4>{title}</h4>{text_block(text)}</div>'
        for title, text in (("Evaluation", response.evaluation), ("Reflection", response.reflection))
        if text.strip()
    )
