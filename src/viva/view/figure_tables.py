"""What ``viva eval`` measured, as HTML: figures with their intervals, and comparisons."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from viva.view.evaluations import FIGURE_HEADS, read_evaluations
from viva.view.markup import data, escape

__all__ = ["evaluations_html"]


def evaluations_html(sources: Mapping[str, Path]) -> str:
    """The section of the page; nothing without results.

    Args:
        sources: Runs' folders, or results, by their names.
    """
    parts: list[str] = []
    for name, source in sources.items():
        results = read_evaluations(source)
        if results and len(sources) > 1:
            parts.append(f"<h3>{escape(name)}</h3>")
        parts += [_result(result) for result in results]
    return f'<section id="evaluations"><h2>Evaluations</h2>{"".join(parts)}</section>' if parts else ""


def _result(result: Mapping[str, Any]) -> str:
    figures: Mapping[str, Mapping[str, float | None]] = result["figures"]
    columns = [name for name in FIGURE_HEADS if any(name in figure for figure in figures.values())]
    heads = "".join(f'<th scope="col">{FIGURE_HEADS[name]}</th>' for name in columns)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{_number(figure.get(column))}</td>" for column in columns)
        + "</tr>"
        for name, figure in figures.items()
    )
    return (
        f'<details class="group" open><summary>{escape(result["about"] or result["name"])}</summary>'
        f'<p class="muted">{escape(result["kind"])} \u00b7 {escape(result["name"])}.json</p>'
        f'<div class="scroll"><table class="figures"><thead><tr><th scope="col">figure</th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></details>"
    )


def _number(value: float | None) -> str:
    return "\u2013" if value is None else data(value)
