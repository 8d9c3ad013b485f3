"""Which curves there are, in groups, and their points, thinned to what a screen can show."""

from collections.abc import Iterable, Sequence
from typing import Any

from viva.view.chart_places import chart_places, group_titles, is_open_section
from viva.view.markup import visible
from viva.view.run_index import RunIndex
from viva.view.series import thin

__all__ = ["MAX_POINTS", "curve_layout", "curve_points"]

MAX_POINTS = 1500


def curve_layout(keys: Iterable[str]) -> list[dict[str, Any]]:
    """Groups of sections of charts: names only."""
    places = chart_places(keys)
    return [
        {"name": name, "sections": [_section(title, places[title]) for title in titles]}
        for name, titles in group_titles(places)
    ]


def _section(title: str, charts: dict[str, list[tuple[str, str]]]) -> dict[str, Any]:
    return {
        "title": visible(title),
        "open": is_open_section(title),
        "charts": [
            {
                "title": visible(chart),
                "curves": [{"key": key, "name": visible(name)} for key, name in members],
            }
            for chart, members in charts.items()
        ],
    }


def curve_points(run: RunIndex, keys: Sequence[str]) -> dict[str, Any]:
    """Points and bands of some metrics, by name; those the run does not have are left out."""
    found: dict[str, Any] = {}
    for key in keys:
        series = run.series(key)
        if series is None:
            continue
        kept = thin(series.points, MAX_POINTS)
        widths = dict(zip((step for step, _ in series.points), series.band or (), strict=False))
        found[key] = {
            "steps": [step for step, _ in kept],
            "values": [value for _, value in kept],
            "band": [widths[step] for step, _ in kept] if series.band else None,
        }
    return found
