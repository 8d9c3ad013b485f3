"""One whole conversation as HTML: rounds by agents, then what it was worth."""

from collections.abc import Sequence

from viva.view.markup import data, escape, text_block
from viva.view.pictures import arrows_svg, critique_place, scores_svg
from viva.view.recorded import (
    RecordedConversation,
    RecordedFailure,
    RecordedReply,
    RecordedTurn,
    Transcript,
)
from viva.view.review import marks, rankings_html, scores_html, vote_text
from viva.view.sights import Sighting, sightings
from viva.view.verdicts import verdicts_html

__all__ = ["conversation_html"]


def conversation_html(
    transcript: Transcript, reason: str, credit: str = "", *, anchor: str = "conversation"
) -> str:
    """A recorded conversation as an ``<article>``.

    Args:
        transcript: A transcript with a record.
        reason: Why it is shown; its heading.
        credit: What else there is, as HTML: see `viva.view.credit`.
        anchor: Its place on the page, and the beginning of the places of its parts.

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
        f'<article class="conversation" id="{anchor}"><h3>{escape(reason.capitalize())}</h3>'
        f'<p class="muted">{escape(where)}</p>{void}'
        f'<div class="question"><p>Question</p>{text_block(record.question)}{answer}</div>'
        f'{_rounds(record, anchor)}<div class="pictures">{scores_svg(record)}{arrows_svg(record, anchor)}</div>'
        f"{scores_html(record)}{rankings_html(record)}{verdicts_html(record)}{credit}</article>"
    )


def _rounds(record: RecordedConversation, anchor: str) -> str:
    agents = record.agent_ids
    turns: dict[tuple[int, int], list[int]] = {}
    for place, turn in sorted(enumerate(record.turns), key=lambda pair: pair[1].lane):
        turns.setdefault((turn.round_index, turn.agent_id), []).append(place)
    failures: dict[tuple[int, int], list[RecordedFailure]] = {}
    for failure in record.failures:
        failures.setdefault((failure.round_index, failure.agent_id), []).append(failure)
    heads = "".join(f'<th scope="col">{_agent_head(record, agent)}</th>' for agent in agents)
    rows: list[str] = []
    for round_index in sorted({where[0] for where in (*turns, *failures)}):
        cells = "".join(
            _cell(record, turns.get((round_index, agent), ()), failures.get((round_index, agent), ()), anchor)
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
    record: RecordedConversation, places: Sequence[int], failures: Sequence[RecordedFailure], anchor: str
) -> str:
    """Everything that one agent said in one round, parallel replies one below the other."""
    parts = [
        f'<div class="turn" id="{_turn_place(anchor, place)}">{_turn(record, place, anchor)}</div>'
        for place in places
    ]
    parts += [
        f'<div class="failure"><h4>Failed</h4>{text_block(failure.reason)}</div>' for failure in failures
    ]
    return f"<td>{''.join(parts)}</td>"


def _turn_place(anchor: str, place: int) -> str:
    return f"{anchor}-turn-{place}"


def _turn(record: RecordedConversation, place: int, anchor: str) -> str:
    turn = record.turns[place]
    response = turn.response
    status = "" if turn.status == "ok" else f'<p class="status">{escape(turn.status)}</p>'
    if response.preferences is not None:
        said = _said(turn, "\n".join(map(vote_text, response.preferences)) or "no vote")
    elif response.critiques is not None:
        said = "".join(
            f'<div id="{critique_place(anchor, turn.agent_id, critique.target, turn.round_index)}">'
            f"<h4>Critique of agent {critique.target}</h4>{text_block(critique.text)}</div>"
            for critique in response.critiques
        ) or _said(turn, "no critique")
    else:
        said = _said(turn, response.solution)
    dropped = ", ".join(f"{escape(cause)} {data(count)}" for cause, count in response.dropped.items())
    details = "".join(
        f"<details><summary>{title}</summary>{text_block(text)}{below}</details>"
        for title, text, below in (
            ("System message", record.system_prompt, ""),
            ("What it read", turn.prompt, _sights(record, place, anchor)),
            ("Reply as sampled", turn.text, ""),
        )
        if text.strip()
    )
    left_out = f'<p class="muted">left out: {dropped}</p>' if dropped else ""
    return f"{status}{said}{_asides(response)}{left_out}{details}"


def _sights(record: RecordedConversation, place: int, anchor: str) -> str:
    """What had been said before the turn: what its agent saw of it, and what was hidden from it."""
    seen: list[str] = []
    hidden: list[str] = []
    for sighting in sightings(record, place):
        name = _sighting(record, sighting, anchor)
        if sighting.is_seen:
            seen.append(name)
        else:
            hidden.append(f"<li><s>{name}</s></li>")
    parts = [f'<p class="seen"><b>In it:</b> {"; ".join(seen)}</p>'] if seen else []
    if hidden:
        parts.append(f'<div class="hidden">Hidden from it<ul>{"".join(hidden)}</ul></div>')
    return "".join(parts)


def _sighting(record: RecordedConversation, sighting: Sighting, anchor: str) -> str:
    said = record.turns[sighting.turn]
    text = f"{sighting.part} by agent {said.agent_id} (round {said.round_index + 1})"
    return f'<a href="#{_turn_place(anchor, sighting.turn)}">{escape(text)}</a>'


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
