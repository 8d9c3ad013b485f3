"""The judge over all conversations of a run, as HTML: both orders, flips, cycles, agreement, and where to look."""

from collections.abc import Collection, Mapping, Sequence

from viva.view.chart import draw_chart
from viva.view.entries import Entry
from viva.view.judge_summary import JudgeTotals, judge_by_step, judge_totals, telling
from viva.view.markup import card, data, escape
from viva.view.series import Series

__all__ = ["judge_html"]

_MAX_ROWS = 30

_LABELS = ("what is shown first wins", "what is shown second wins", "neither")

_SHARES = (
    ("share of flips", "flips", "pairs"),
    ("agreement with known answers", "agreeing", "decidable"),
)


def judge_html(runs: Mapping[str, Sequence[Entry]], shown: Mapping[tuple[str, int, int], str]) -> str:
    """The section of the page; nothing where nothing was judged.

    Args:
        runs: Entries of all conversations, by the name of their run.
        shown: Of the conversations of the page, by run, step and group: the place that a link leads to.
    """
    judged = {name: entries for name, entries in runs.items() if _is_judged(judge_totals(entries))}
    if not judged:
        return ""
    parts = [
        (f"<h3>{escape(name)}</h3>" if len(runs) > 1 else "") + _one(name, entries, shown)
        for name, entries in judged.items()
    ]
    return f'<section id="judge"><h2>Judge</h2>{"".join(parts)}{_by_step(judged)}</section>'


def _is_judged(totals: JudgeTotals) -> bool:
    return bool(totals.pairs or totals.cycles or totals.decidable or any(totals.orders))


def _one(name: str, entries: Sequence[Entry], shown: Mapping[tuple[str, int, int], str]) -> str:
    totals = judge_totals(entries)
    cards = (
        card("conversations", data(totals.conversations)),
        card("verdicts that flip with the order", *_share(totals.flips, totals.pairs)),
        card("cycles", data(totals.cycles)),
        card("preferences that agree with known answers", *_share(totals.agreeing, totals.decidable)),
    )
    places = {where[1:]: place for where, place in shown.items() if where[0] == name}
    return f'<div class="cards">{"".join(cards)}</div>{_orders(totals)}{_list(telling(entries), places)}'


def _share(part: int, whole: int) -> tuple[str, str]:
    if not whole:
        return "none to count", ""
    return data(part / whole, f"{100 * part / whole:.1f} %"), f"{part:,} of {whole:,}"


def _orders(totals: JudgeTotals) -> str:
    """Every pair judged in both orders: who wins by merit changes places."""
    if not any(totals.orders):
        return ""
    heads = "".join(f'<th scope="col">{label}</th>' for label in _LABELS)
    rows = "".join(
        f'<tr><th scope="row">{label}</th>{"".join(_cell(totals, row, column) for column in range(3))}</tr>'
        for row, label in enumerate(_LABELS)
    )
    return (
        '<div class="scroll"><table class="orders"><caption>Pairs by their verdicts in both orders</caption>'
        f'<thead><tr><th scope="col">one order \u2193 \u00b7 the other \u2192</th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _cell(totals: JudgeTotals, row: int, column: int) -> str:
    flip = ' <span class="flip">flips</span>' if row == column and row < 2 else ""
    return f"<td>{data(totals.orders[3 * row + column])}{flip}</td>"


def _list(entries: Collection[Entry], places: Mapping[tuple[int, ...], str]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{entry.step}</th><td>{entry.group}</td><td>{_question(entry, places)}</td>'
        f"<td>{entry.num_flips} of {entry.num_pairs}</td><td>{entry.num_cycles}</td>"
        f"<td>{entry.num_agreeing} of {entry.num_decidable}</td></tr>"
        for entry in list(entries)[:_MAX_ROWS]
    )
    if not rows:
        return ""
    heads = "".join(
        f'<th scope="col">{head}</th>'
        for head in ("step", "group", "question", "flips", "cycles", "agreeing")
    )
    more = f'<p class="muted">The first {_MAX_ROWS} of them.</p>' if len(entries) > _MAX_ROWS else ""
    return (
        f"<details><summary>Conversations with flips or cycles: {data(len(entries))}</summary>{more}"
        f'<div class="scroll"><table class="telling"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
        "</div></details>"
    )


def _question(entry: Entry, places: Mapping[tuple[int, ...], str]) -> str:
    text = escape(entry.question or "(no question recorded)")
    place = places.get((entry.step, entry.group))
    return text if place is None else f'<a href="#{place}">{text}</a>'


def _by_step(runs: Mapping[str, Sequence[Entry]]) -> str:
    steps = {name: judge_by_step(entries) for name, entries in runs.items()}
    figures: list[str] = []
    for title, part, whole in _SHARES:
        drawn = [
            Series(
                name=name if len(steps) > 1 else title,
                points=tuple(
                    (step, getattr(totals, part) / getattr(totals, whole))
                    for step, totals in by_step.items()
                    if getattr(totals, whole)
                ),
                colour=0,
                is_dashed=number > 0,
            )
            for number, (name, by_step) in enumerate(steps.items())
        ]
        if any(series.points for series in drawn):
            figures.append(
                f"<figure><figcaption>{title}</figcaption>{draw_chart(drawn, label=title)}</figure>"
            )
    return f'<div class="charts">{"".join(figures)}</div>' if figures else ""
