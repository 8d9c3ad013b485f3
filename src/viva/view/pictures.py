"""What a review was worth, drawn: V before and after with error bars, and critiques as arrows to their targets."""

from viva.view.markup import escape, format_number
from viva.view.recorded import RecordedConversation

__all__ = ["arrows_svg", "critique_place", "scores_svg"]

_WIDTH, _LEFT, _RIGHT, _ROW = 460, 80, 20, 34
_NUM_COLOURS = 6


def scores_svg(record: RecordedConversation) -> str:
    """V before and after review by agent, with one standard error; nothing if nothing was scored."""
    scores = record.scores
    if not scores.final:
        return ""
    height = 26 + _ROW * len(scores.final)
    parts = [
        f'<line class="grid" x1="{_x(tick):.1f}" y1="4" x2="{_x(tick):.1f}" y2="{height - 20}"/>'
        f'<text class="tick" x="{_x(tick):.1f}" y="{height - 6}" text-anchor="middle">{tick:g}</text>'
        for tick in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    told: list[str] = []
    for row, (agent, after) in enumerate(sorted(scores.final.items())):
        y, before = 16 + _ROW * row, scores.initial.get(agent)
        parts.append(
            f'<text class="tick" x="{_LEFT - 10}" y="{y + 8}" text-anchor="end">agent {agent}</text>'
        )
        if before is not None:
            parts.append(_bar(before, scores.initial_error.get(agent), y, "before"))
            told.append(f"agent {agent}: {format_number(before)} before, {format_number(after)} after")
        parts.append(_bar(after, scores.final_error.get(agent), y + 10, "after"))
    return (
        '<figure class="worth"><figcaption>V before and after review, with one standard error</figcaption>'
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape("; ".join(told))}">'
        f'{"".join(parts)}</svg><p class="muted"><i class="before"></i> before <i class="after"></i> after</p>'
        "</figure>"
    )


def _x(score: float) -> float:
    return _LEFT + min(1.0, max(0.0, score)) * (_WIDTH - _LEFT - _RIGHT)


def _bar(value: float, error: float | None, y: float, name: str) -> str:
    whisker = ""
    if error is not None:
        ends = f'x1="{_x(value - error):.1f}" y1="{y}" x2="{_x(value + error):.1f}" y2="{y}"'
        whisker = f'<line class="whisker {name}" {ends}/>'
    return f'{whisker}<circle class="score {name}" cx="{_x(value):.1f}" cy="{y}" r="4.5"></circle>'


def critique_place(anchor: str, author: int, target: int, round_index: int) -> str:
    """Id of a critique's text on the page; ``anchor`` is that of the conversation."""
    return f"{anchor}-critique-{author}-{target}-{round_index}"


def arrows_svg(record: RecordedConversation, anchor: str) -> str:
    """Agents side by side, an arc from author to target for every critique, which leads to its text."""
    said = [
        (turn.agent_id, critique.target, turn.round_index)
        for turn in record.turns
        for critique in turn.response.critiques or ()
    ]
    ids = record.agent_ids
    known = [each for each in said if each[0] in ids and each[1] in ids]
    if not known:
        return ""
    base = 40 + 22 * len(ids)
    arcs = "".join(_arc(ids, base, anchor, *each) for each in known)
    agents = "".join(
        f'<circle class="agent" cx="{_at(ids, agent)}" cy="{base}" r="13"></circle>'
        f'<text class="who" x="{_at(ids, agent)}" y="{base + 4}" text-anchor="middle">{agent}</text>'
        for agent in ids
    )
    return (
        '<figure class="worth"><figcaption>Critiques, from author to target</figcaption>'
        f'<svg class="chart" viewBox="0 0 {100 + 90 * (len(ids) - 1)} {base + 20}" role="group" '
        f'aria-label="critiques">{arcs}{agents}</svg></figure>'
    )


def _at(ids: list[int], agent: int) -> int:
    return 50 + 90 * ids.index(agent)


def _arc(ids: list[int], base: int, anchor: str, author: int, target: int, round_index: int) -> str:
    one, other = _at(ids, author), _at(ids, target)
    shift = -6 if author < target else 6
    top = base - 26 - abs(other - one) * 0.28 - (0 if author < target else 14)
    end, tip = other + shift, base - 15
    colour = f"c{ids.index(author) % _NUM_COLOURS}"
    said = f"critique of agent {target} by agent {author}"
    return (
        f'<a href="#{critique_place(anchor, author, target, round_index)}" aria-label="{said}">'
        f'<path class="line {colour}" d="M{one - shift} {base - 14}C{one} {top:.1f} {other} {top:.1f} {end} {tip - 6}">'
        f'</path><path class="head" d="M{end - 4} {tip - 8}L{end + 4} {tip - 8}L{end} {tip}Z"></path>'
        f"<title>agent {author} \u2192 agent {target}</title></a>"
    )
