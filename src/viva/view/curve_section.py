"""Curves as HTML: every metric of one run or two, in groups, with the values behind every point."""

import re
from collections.abc import Mapping

from viva.view.chart import draw_chart
from viva.view.chart_places import Chart, Section, group_titles, sections
from viva.view.markup import data, escape
from viva.view.run_files import Curves

__all__ = ["curves_html"]


def curves_html(runs: Mapping[str, Curves]) -> str:
    """The section of the page; nothing without curves.

    Args:
        runs: Curves by the name of their run; those of the second are dashed.
    """
    found = {section.title: section for section in sections(runs)}
    parts = [
        f"<h3>{escape(name.capitalize())}</h3>" + "".join(_section(found[title]) for title in titles)
        for name, titles in group_titles(found)
    ]
    if not parts:
        return ""
    second = " The second run is dashed." if len(runs) > 1 else ""
    return (
        '<section id="curves"><h2>Curves</h2><p class="muted">Point at a line for its values; bands are 95 % '
        f"intervals; the title of a chart is a link to it.{second}</p>"
        '<p class="lines"><label><input type="radio" name="lines" class="measured" checked>as measured</label> '
        '<label><input type="radio" name="lines" class="smoothed">smoothed</label></p>'
        f"{''.join(parts)}</section>"
    )


def _section(section: Section) -> str:
    is_open = " open" if section.is_open else ""
    figures = "".join(_figure(section, chart) for chart in section.charts)
    return (
        f'<details class="group"{is_open}><summary>{escape(section.title)}</summary>'
        f'<div class="charts">{figures}</div>{_numbers(section)}</details>'
    )


def _figure(section: Section, chart: Chart) -> str:
    title = f"{section.title}: {chart.title}"
    place = "chart-" + re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return (
        f'<figure id="{place}"><figcaption><a href="#{place}">{escape(chart.title)}</a></figcaption>'
        f"{draw_chart(chart.series, label=title)}</figure>"
    )


def _numbers(section: Section) -> str:
    """First, last, lowest and highest value of every curve of a section."""
    rows: list[str] = []
    has_twins = any(len(set(chart.keys)) < len(chart.keys) for chart in section.charts)
    for chart in section.charts:
        for key, series in zip(chart.keys, chart.series, strict=True):
            values = [y for _, y in series.points]
            cells = "".join(f"<td>{data(v)}</td>" for v in (values[0], values[-1], min(values), max(values)))
            name = f"{series.name.partition(': ')[0]}: {key}" if has_twins else key
            rows.append(f'<tr><th scope="row">{escape(name)}</th><td>{len(values)}</td>{cells}</tr>')
    heads = "".join(
        f'<th scope="col">{head}</th>' for head in ("points", "first", "last", "lowest", "highest")
    )
    table = f'<tr><th scope="col">metric</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody>'
    return (
        '<details class="numbers"><summary>Numbers</summary>'
        f'<div class="scroll"><table><thead>{table}</table></div></details>'
    )
