"""Answers to the page's requests, as values ready for JSON: the same for a server and for a report."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from viva.judging.records import Transcript
from viva.run.secrets import printable
from viva.view.conversation import conversation_payload, text_at, token_payload
from viva.view.entries import Entry, Query, count_strategies, page_of, select
from viva.view.files import Row, read_evaluations
from viva.view.judgement import JudgeCounts, sum_counts
from viva.view.run_index import RunIndex


class NotFoundError(LookupError):
    """There is no such run or conversation."""


def run_answer(run: RunIndex, name: str, *, is_complete: bool) -> dict[str, object]:
    """A run's description, and how far it was read."""
    model = run.config.get("model_name")
    model = printable(model) if isinstance(model, str) else ""
    is_path = model.startswith(("/", "~", "."))  # which stands whole among the options
    return {
        "name": name,
        "kind": run.kind,
        "model": Path(model).name if is_path else model,
        "version": run.version,
        "steps": run.num_steps,
        "conversations": len(run.entries),
        "is_complete": is_complete,
        "progress": run.progress,
        "damaged": run.damaged,
        "problems": [printable(problem) for problem in run.problems],
        "config": {
            printable(key): printable(
                value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            )
            for key, value in sorted(run.config.items())
        },
    }


def list_answer(run: RunIndex, query: Query, page: int, size: int) -> dict[str, object]:
    """One page of the conversations that match."""
    return _page(run, select(run.entries.values(), query), page, size)


def _page(run: RunIndex, found: Sequence[Entry], page: int, size: int) -> dict[str, object]:
    return {
        "total": len(found),
        "page": page,
        "size": size,
        "rows": rows_of(run, page_of(found, page, size)),
        "strategies": count_strategies(run.entries.values()),
    }


def rows_of(run: RunIndex, entries: Iterable[Entry]) -> list[dict[str, object]]:
    """Rows of a list of conversations."""
    return [{**asdict(entry), "has_tokens": run.has_tokens(entry.step, entry.group)} for entry in entries]


def conversation_answer(
    run: RunIndex, step: int, group: int, query: Query, *, max_tokens: int | None = None
) -> dict[str, object]:
    """One conversation, with its tokens where they were kept, and its neighbours among those that match.

    With `max_tokens`, turns lose their tokens behind so many, and contexts their middle. Raises `NotFoundError` if
    there is no such conversation, and `ValueError` if a line of a file is damaged.
    """
    transcript = Transcript.parse(f"step {step}, group {group}", _line(run, step, group))
    tokens = run.tokens(step, group)
    found = [(entry.step, entry.group) for entry in select(run.entries.values(), query)]
    at = found.index((step, group)) if (step, group) in found else None
    return {
        **conversation_payload(transcript),
        "tokens": None if tokens is None else token_payload(tokens, transcript.record, max_tokens),
        "previous": found[at - 1] if at else None,
        "next": found[at + 1] if at is not None and at + 1 < len(found) else None,
    }


def text_answer(run: RunIndex, step: int, group: int, ref: str) -> dict[str, object]:
    """One whole text of a conversation; `NotFoundError` without the conversation, `ValueError` without the text."""
    return {"text": text_at(_line(run, step, group), ref)}


def _line(run: RunIndex, step: int, group: int) -> Row:
    row = run.transcript(step, group)
    if row is None:
        raise NotFoundError(f"this run has no conversation {group} in step {step}")
    return row


def judge_answer(run: RunIndex, query: Query, page: int, size: int) -> dict[str, object]:
    """Figures about the judge over all conversations that match, by step, and where to look."""
    found = select(run.entries.values(), query)
    telling = [entry for entry in found if entry.judged.flips or entry.judged.cycles]
    by_step: dict[int, list[JudgeCounts]] = {}
    for entry in sorted(found, key=lambda entry: entry.step):
        by_step.setdefault(entry.step, []).append(entry.judged)
    return _page(run, telling, page, size) | {
        "totals": asdict(sum_counts(entry.judged for entry in found)),
        "steps": [{"step": step, **asdict(sum_counts(counts))} for step, counts in by_step.items()],
    }


def evaluations_answer(runs: Sequence[RunIndex], names: Sequence[str]) -> list[dict[str, object]]:
    """Results that ``viva eval`` wrote into the runs' folders, and those that were given themselves."""
    return [
        {"name": name, "results": read_evaluations(run.folder)} for run, name in zip(runs, names, strict=True)
    ]


MAX_POINTS = 1500


_OPEN_SECTIONS = (
    "test",
    "test/judged",
    "correct",
    "truth",
    "reward",
    "credit",
    "judge",
    "sign",
    "alarm",
    "parse",
    "agents",
)
"""Sections shown unfolded."""

_GROUPS = (
    (
        "learning",
        ("test", "correct", "truth", "gain", "revision", "run", "test/judged", "test/conversation", "optim"),
    ),
    ("rewards", ("reward", "credit", "agents", "advantage")),
    ("judge health", ("judge", "sign", "alarm", "parse", "critiques")),
    ("ratios per strategy", ("experts",)),
    ("speed", ("time", "rollout")),
)
"""Sections of every group, in order; all other sections make the group "more"."""

_NESTED = ("test/conversation", "test/judged")
"""Prefixes under which a whole set of metrics stands again: a section of its own."""

_JOINT_CHARTS: dict[str, tuple[str, str]] = {
    "correct/best": ("right answers in the first and the last round", "last, of the highest score"),
    "correct/final": ("right answers in the first and the last round", "last"),
    "correct/first": ("right answers in the first and the last round", "first"),
    "critiques/dropped": ("critiques of an agent", "left out"),
    "critiques/given": ("critiques of an agent", "given"),
    "critiques/received": ("critiques of an agent", "received"),
    "gain/mean": ("gain of a solution", "all"),
    "gain/paid": ("gain of a solution", "what of it is paid"),
    "revision/changed": ("revise or defend", "changed"),
    "revision/says_defend": ("revise or defend", "says defend"),
    "revision/says_revise": ("revise or defend", "says revise"),
}
"""Metrics of one scale that say more in one chart: metric -> (chart, curve)."""

_SERIES: tuple[tuple[re.Pattern[str], str, str, str], ...] = (
    (re.compile(r"(rank_correlation|reward_truth_gap)"), "truth", r"\1", r"\1"),
    (re.compile(r"agent_(\d+)/(.+)"), "agents", r"\2", r"agent \1"),
    (re.compile(r"flip/(right|wrong)_to_(right|wrong)"), "truth", "what revising does", r"\1 to \2"),
    (re.compile(r"parse/(ok|repaired|unstructured)"), "parse", "how replies were read", r"\1"),
    (re.compile(r"parse/(\w+)/(ok|repaired|unstructured)"), "parse", r"\1", r"\2"),
    (re.compile(r"reward/(max|mean|min)"), "reward", "highest, mean and lowest", r"\1"),
    (re.compile(r"credit/(\w+)/(max|mean|min)"), "credit", r"\1: highest, mean and lowest", r"\2"),
    (re.compile(r"credit/(\w+)/std"), "credit", "spread", r"\1"),
    (re.compile(r"judge/(?:preference_(A|B)|(tie|invalid))_rate"), "judge", "verdicts", r"\1\2"),
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


def curve_layout(keys: Iterable[str]) -> list[dict[str, object]]:
    """Groups of sections of charts: names only."""
    places = chart_places(keys)
    return [
        {"name": name, "sections": [_section(title, places[title]) for title in titles]}
        for name, titles in group_titles(places)
    ]


def _section(title: str, charts: dict[str, list[tuple[str, str]]]) -> dict[str, object]:
    return {
        "title": printable(title),
        "open": title in _OPEN_SECTIONS,
        "charts": [
            {
                "title": printable(chart),
                "curves": [{"key": key, "name": printable(name)} for key, name in members],
            }
            for chart, members in charts.items()
        ],
    }


def curve_points(run: RunIndex, keys: Sequence[str]) -> dict[str, object]:
    """Points and bands of some metrics, by name; those the run does not have are left out."""
    found: dict[str, object] = {}
    for key in keys:
        points = run.points(key)
        if not points:
            continue
        kept = thin(points, MAX_POINTS)
        widths = run.half_widths(key)
        found[key] = {
            "count": len(points),
            "steps": [step for step, _ in kept],
            "values": [value for _, value in kept],
            "band": [widths.get(step, 0.0) for step, _ in kept] if widths else None,
        }
    return found


def chart_places(keys: Iterable[str]) -> dict[str, dict[str, list[tuple[str, str]]]]:
    """Metrics by the section and chart that draw them, in order of names, each with the name of its curve.

    Those that are the band of another metric are left out.
    """
    known = set(keys)
    grouped: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for key in sorted(known, key=_natural):
        if key.removesuffix("_stderr") in known and key.endswith("_stderr"):
            continue
        section, chart, name = _place(key)
        grouped.setdefault(section, {}).setdefault(chart, []).append((key, name))
    return dict(sorted(grouped.items()))


def group_titles(titles: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Groups of sections by what they are about, each with its sections in order."""
    known = list(titles)
    placed = {title for _, members in _GROUPS for title in members}
    groups = [*_GROUPS, ("more", tuple(title for title in known if title not in placed))]
    found = [(name, [title for title in members if title in known]) for name, members in groups]
    return [(name, members) for name, members in found if members]


def _place(key: str) -> tuple[str, str, str]:
    """(section, chart, curve) of a metric."""
    for outer in _NESTED:
        if key.startswith(f"{outer}/"):
            section, chart, name = _place(key.removeprefix(f"{outer}/"))
            return outer, f"{section}/{chart}", name
    section, _, rest = key.partition("/")
    if key in _JOINT_CHARTS:
        return section, *_JOINT_CHARTS[key]
    for pattern, family, chart, name in _SERIES:
        if found := pattern.fullmatch(key):
            return family, found.expand(chart), found.expand(name)
    return (section, rest, rest) if rest else ("run", key, key)


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Order of names in which agent_10 comes after agent_9."""
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in re.split(r"(\d+)", key)]


def thin(points: Sequence[tuple[int, float]], max_points: int) -> list[tuple[int, float]]:
    """At most about ``max_points`` points that keep the curve's outline.

    Of each run of neighbours the first, lowest, highest and last point stay, so no spike disappears.
    """
    if len(points) <= max_points:
        return list(points)
    size = -(-4 * len(points) // max_points)
    kept: list[tuple[int, float]] = []
    for start in range(0, len(points), size):
        run = points[start : start + size]
        lowest = min(run, key=lambda point: point[1])
        highest = max(run, key=lambda point: point[1])
        kept += sorted({run[0], lowest, highest, run[-1]})
    return kept
