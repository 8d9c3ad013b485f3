"""What a review was worth, as HTML: scores before and after, every reward stream, and who ranked whom where."""

from collections.abc import Mapping, Sequence
from typing import Any

from viva.judging.ballots import Item, Preference, Tie
from viva.view.markup import data, escape, mark, visible
from viva.view.payload import rankings_payload
from viva.view.recorded import RecordedConversation, RecordedScores

__all__ = ["marks", "rankings_html", "scores_html", "vote_text"]

_Vote = Preference | Tie


def scores_html(record: RecordedConversation) -> str:
    """Per agent: V before and after with standard errors, right or wrong, rewards; nothing if nothing was scored."""
    if not record.scores.final and not record.streams:
        return ""
    agents = sorted({*record.scores.initial, *record.scores.final, *record.streams})
    streams = list(dict.fromkeys(name for by_name in record.streams.values() for name in by_name))
    graded = record.correct is not None or record.correct_initial is not None
    heads = ["V before", "V after", "change", *(["right or wrong"] if graded else []), *streams]
    rows: list[str] = []
    for agent in agents:
        cells = _score_cells(record.scores, agent)
        if graded:
            cells.append(marks(record, agent))
        cells += [_number(record.streams.get(agent, {}).get(name), signed=False) for name in streams]
        shown = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f'<tr><th scope="row">agent {agent}</th>{shown}</tr>')
    columns = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    rules = ", ".join(f"{name}={value}" for name, value in sorted(record.rules.items()))
    return (
        '<h4>Scores and rewards</h4><p class="muted">V is the Bradley-Terry score of a solution in [0, 1], '
        f"with one standard error.{escape(f' Rules: {rules}.') if rules else ''}</p>"
        f'<div class="scroll"><table class="scores"><thead><tr><td></td>{columns}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def marks(record: RecordedConversation, agent: int) -> str:
    """Whether an agent's solution is right: before and after revision, where both are known."""
    shown = [
        mark(correct[agent])
        for correct in (record.correct_initial, record.correct)
        if correct is not None and agent in correct
    ]
    both = " \u2192 ".join(shown)
    return f'<span class="marks">{both}</span>' if shown else ""


def _score_cells(scores: RecordedScores, agent: int) -> list[str]:
    before, after = scores.initial.get(agent), scores.final.get(agent)
    change = None if before is None or after is None else after - before
    return [
        _with_error(before, scores.initial_error.get(agent)),
        _with_error(after, scores.final_error.get(agent)),
        _number(change, signed=True),
    ]


def _number(value: float | None, *, signed: bool) -> str:
    if value is None:
        return '<span class="muted">none</span>'
    return data(value, f"{value:+.2f}" if signed else f"{value:.2f}")


def _with_error(value: float | None, error: float | None) -> str:
    shown = _number(value, signed=False)
    return shown if error is None else f"{shown} \u00b1 {data(error, f'{error:.2f}')}"


def rankings_html(record: RecordedConversation) -> str:
    """A matrix of votes for every kind of ranking that was asked for, in order of the rounds."""
    told = {ranking["segment"]: ranking for ranking in rankings_payload(record)}
    votes: dict[str, list[tuple[int, _Vote]]] = {}
    for turn in record.turns:
        if turn.response.preferences is not None:
            found = votes.setdefault(turn.segment, [])
            found += [(turn.agent_id, vote) for vote in turn.response.preferences]
    tables = "".join(
        f"<div>{_matrix(segment, cast)}{_amount(told[visible(segment)])}</div>"
        for segment, cast in votes.items()
        if cast
    )
    if not tables:
        return ""
    return (
        '<h4>Who prefers whom</h4><p class="muted">In each cell, the agents that rank the row above the column; '
        f'"=" those that call it a tie.</p><div class="matrices">{tables}</div>'
    )


def _amount(ranking: Mapping[str, Any]) -> str:
    """What the votes of one kind amount to."""
    cycles = "; ".join(" > ".join([*cycle, cycle[0]]) for cycle in ranking["cycles"]) or "none"
    right, count = ranking["agreement"]["right"], ranking["agreement"]["of"]
    agrees = f"; {right} of {count} preferences agree with the known answers" if count else ""
    return f'<p class="muted">Cycles: {escape(cycles)}{agrees}.</p>'


def _matrix(segment: str, cast: Sequence[tuple[int, _Vote]]) -> str:
    items = sorted({item for _, vote in cast for item in _items(vote)}, key=_order)
    heads = "".join(f'<th scope="col">{_name(item)}</th>' for item in items)
    rows = "".join(
        f'<tr><th scope="row">{_name(above)}</th>{"".join(_voters(cast, above, below) for below in items)}</tr>'
        for above in items
    )
    return (
        f'<div class="scroll"><table class="matrix"><caption>{escape(segment)}</caption>'
        f"<thead><tr><td></td>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _voters(cast: Sequence[tuple[int, _Vote]], above: Item, below: Item) -> str:
    if above == below:
        return '<td class="none"></td>'
    wins = [str(voter) for voter, vote in cast if vote == Preference(above, below)]
    ties = [f"={voter}" for voter, vote in cast if vote == Tie(above, below)]
    return f"<td>{' '.join(wins + ties)}</td>"


def vote_text(vote: _Vote) -> str:
    """A vote as a person would write it, such as ``1 > 0`` or ``0 = 2``; not escaped."""
    one, other = _items(vote)
    return f"{_plain(one)} {'>' if isinstance(vote, Preference) else '='} {_plain(other)}"


def _items(vote: _Vote) -> tuple[Item, Item]:
    return (vote.winner, vote.loser) if isinstance(vote, Preference) else (vote.first, vote.second)


def _order(item: Item) -> tuple[int, str]:
    return (item, "") if isinstance(item, int) else (item[1], item[0])


def _plain(item: Item) -> str:
    return str(item) if isinstance(item, int) else f"{item[0]} {item[1]}"


def _name(item: Item) -> str:
    return f"agent {item}" if isinstance(item, int) else escape(_plain(item))
