"""The curves of a run or two, ordered and grouped: sections of charts, important ones first."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from viva.view.run_files import Curves, metric_series
from viva.view.series import Series

__all__ = ["Chart", "Section", "chart_places", "group_titles", "is_open_section", "sections"]

_OPEN_SECTIONS = ("test", "correct", "truth", "reward", "credit", "judge", "parse", "agents")
"""Sections shown unfolded, in this order; all others follow in the order of their names, folded."""

_LAST_SECTION = "time"

_GROUPS = (
    ("learning", ("test", "correct", "truth", "gain", "revision", "run", "test/conversation", "optim")),
    ("rewards", ("reward", "credit", "agents", "advantage")),
    ("judge health", ("judge", "parse", "critiques")),
    ("ratios per strategy", ("experts",)),
    ("speed", ("time", "rollout")),
)
"""Sections of every group, in order; all other sections make the group "more"."""

_NESTED = ("test/conversation",)
"""Prefixes under which a whole set of metrics stands again: one section of its own, folded."""

_SECTIONS = {
    "flip/right_to_wrong": "truth",
    "flip/wrong_to_right": "truth",
    "rank_correlation": "truth",
    "reward_truth_gap": "truth",
}
"""Sections other than the prefix of the name; without a prefix, it is "run"."""

_JOINT_CHARTS: dict[str, tuple[str, str]] = {
    "correct/best": ("right answers in the first and the last round", "last, of the highest score"),
    "correct/final": ("right answers in the first and the last round", "last"),
    "correct/first": ("right answers in the first and the last round", "first"),
    "critiques/dropped": ("critiques of an agent", "left out"),
    "critiques/given": ("critiques of an agent", "given"),
    "critiques/received": ("critiques of an agent", "received"),
    "flip/right_to_wrong": ("what revising does", "right to wrong"),
    "flip/wrong_to_right": ("what revising does", "wrong to right"),
    "gain/mean": ("gain of a solution", "all"),
    "gain/paid": ("gain of a solution", "what of it is paid"),
    "judge/preference_A_rate": ("verdicts", "A"),
    "judge/preference_B_rate": ("verdicts", "B"),
    "judge/tie_rate": ("verdicts", "tie"),
    "judge/invalid_rate": ("verdicts", "invalid"),
    "parse/ok": ("how replies were read", "ok"),
    "parse/repaired": ("how replies were read", "repaired"),
    "parse/unstructured": ("how replies were read", "unstructured"),
    "reward/max": ("highest, mean and lowest", "max"),
    "reward/mean": ("highest, mean and lowest", "mean"),
    "reward/min": ("highest, mean and lowest", "min"),
    "revision/changed": ("revise or defend", "changed"),
    "revision/says_defend": ("revise or defend", "says defend"),
    "revision/says_revise": ("revise or defend", "says revise"),
}
"""Metrics of one scale that say more in one chart: metric -> (chart, curve)."""

_SERIES: tuple[tuple[re.Pattern[str], str, str, str], ...] = (
    (re.compile(r"agent_(\d+)/(.+)"), "agents", r"\2", r"agent \1"),
    (re.compile(r"parse/(\w+)/(ok|repaired|unstructured)"), "parse", r"\1", r"\2"),
    (re.compile(r"credit/(\w+)/(max|mean|min)"), "credit", r"\1: highest, mean and lowest", r"\2"),
    (re.compile(r"credit/(\w+)/std"), "credit", "spread", r"\1"),
    (re.compile(r"judge/(ranking|verdict)/(.+)"), "judge", r"\2 of the rankings", r"\1"),
    (re.compile(r"experts/([^/]+)/(.+)"), "experts", r"\2", r"\1"),
    (
        re.compile(r"judge/revision/(preference_(?:A|B)|tie|invalid)_rate"),
        "judge",
        "revised against initial",
        r"\1",
    ),
)
"""Families of metrics that share charts: name, section, chart, curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart; its curves share a scale."""

    title: str
    series: tuple[Series, ...]
    keys: tuple[str, ...]
    """The metric behind each curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Charts that belong together."""

    title: str
    charts: tuple[Chart, ...]
    is_open: bool


def sections(runs: Mapping[str, Curves]) -> list[Section]:
    """Group the curves by the prefix of their names; the same metric of all agents is one chart, and of all runs, too.

    A metric ``x_stderr`` becomes the 95 % band of ``x``.

    Args:
        runs: Curves by the name of their run, one or two.
    """
    keys = {key for curves in runs.values() for key in curves}
    return [
        Section(
            title=title,
            charts=tuple(_chart(runs, chart, members) for chart, members in charts.items()),
            is_open=is_open_section(title),
        )
        for title, charts in chart_places(keys).items()
    ]


def chart_places(keys: Iterable[str]) -> dict[str, dict[str, list[tuple[str, str]]]]:
    """Where metrics are drawn: by section and chart, in order, each metric and the name of its curve.

    Those that are the band of another metric are left out.
    """
    known = set(keys)
    grouped: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for key in sorted(known, key=_natural):
        if key.removesuffix("_stderr") in known and key.endswith("_stderr"):
            continue
        section, chart, name = _place(key)
        grouped.setdefault(section, {}).setdefault(chart, []).append((key, name))
    return {title: grouped[title] for title in sorted(grouped, key=_section_order)}


def group_titles(titles: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Groups of sections by what they are about, each with its sections in order; every section is in one."""
    known = list(titles)
    placed = {title for _, members in _GROUPS for title in members}
    groups = [*_GROUPS, ("more", tuple(title for title in known if title not in placed))]
    found = [(name, [title for title in members if title in known]) for name, members in groups]
    return [(name, members) for name, members in found if members]


def is_open_section(title: str) -> bool:
    """Whether a section is shown unfolded at first."""
    return title in _OPEN_SECTIONS


def _chart(runs: Mapping[str, Curves], title: str, members: list[tuple[str, str]]) -> Chart:
    found: list[tuple[str, Series]] = []
    for place, (key, name) in enumerate(members):
        for number, (run, curves) in enumerate(runs.items()):
            if key in curves:
                shown = name if len(runs) == 1 else f"{run}: {name}"
                series = metric_series(curves, key, name=shown)
                # with two runs, colours tell metrics apart and dashes the runs
                looks = series if len(runs) == 1 else replace(series, colour=place, is_dashed=number > 0)
                found.append((key, looks))
    return Chart(
        title=title, series=tuple(series for _, series in found), keys=tuple(key for key, _ in found)
    )


def _place(key: str) -> tuple[str, str, str]:
    """(section, chart, curve) of a metric."""
    for outer in _NESTED:
        if key.startswith(f"{outer}/"):
            section, chart, name = _place(key.removeprefix(f"{outer}/"))
            return outer, f"{section}/{chart}", name
    section, _, rest = key.partition("/")
    if key in _JOINT_CHARTS:
        return _SECTIONS.get(key, section), *_JOINT_CHARTS[key]
    for pattern, family, chart, name in _SERIES:
        found = pattern.fullmatch(key)
        if found:
            return family, found.expand(chart), found.expand(name)
    return (section, rest, rest) if rest else (_SECTIONS.get(key, "run"), key, key)


def _section_order(title: str) -> tuple[int, str]:
    if title in _OPEN_SECTIONS:
        return _OPEN_SECTIONS.index(title), title
    return len(_OPEN_SECTIONS) + (title == _LAST_SECTION), title


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Order of names in which agent_10 comes after agent_9."""
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in re.split(r"(\d+)", key)]
