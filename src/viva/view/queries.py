"""Which conversations a page shows: filters over the entries, one page at a time."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from viva.view.entries import Entry

__all__ = ["MAX_PAGE_SIZE", "Query", "facets", "page_of", "parse_query", "select"]

MAX_PAGE_SIZE = 200

_ANSWERS: dict[str, Callable[[Entry], bool]] = {
    "right": lambda entry: 0 < entry.num_graded == entry.num_right,
    "mixed": lambda entry: 0 < entry.num_right < entry.num_graded,
    "wrong": lambda entry: entry.num_graded > 0 == entry.num_right,
    "mended": lambda entry: entry.num_mended > 0,
    "spoiled": lambda entry: entry.num_mended < 0,
    "unknown": lambda entry: entry.num_graded == 0,
}

_STATES: dict[str, Callable[[Entry], bool]] = {
    "sound": lambda entry: not entry.is_void and not entry.num_failures,
    "failed": lambda entry: entry.num_failures > 0,
    "void": lambda entry: entry.is_void,
    "flips": lambda entry: entry.num_flips > 0,
    "cycles": lambda entry: entry.num_cycles > 0,
    "disagrees": lambda entry: entry.num_agreeing < entry.num_decidable,
}

_ORDERS: dict[str, Callable[[Entry], float]] = {
    "step": lambda entry: entry.step,
    "-step": lambda entry: -entry.step,
    "reward": lambda entry: math.inf if entry.reward_mean is None else entry.reward_mean,
    "-reward": lambda entry: math.inf if entry.reward_mean is None else -entry.reward_mean,
    "-spread": lambda entry: -((entry.reward_max or 0.0) - (entry.reward_min or 0.0)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What is looked for; ``None`` and empty texts let everything pass."""

    step_from: int | None = None
    step_to: int | None = None
    strategy: str | None = None
    reward_from: float | None = None
    """Of the mean reward."""
    reward_to: float | None = None
    answers: str = ""
    state: str = ""
    text: str = ""
    """Part of the question's beginning, in either case."""
    order: str = "step"

    def __post_init__(self) -> None:
        """Refuse words that mean nothing.

        Raises:
            ValueError: For a word that is not allowed.
        """
        for name, value, allowed in (
            ("answers", self.answers, _ANSWERS),
            ("state", self.state, _STATES),
            ("order", self.order, _ORDERS),
        ):
            if value not in allowed and not (value == "" and name != "order"):
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value[:60]!r}")


def parse_query(given: Mapping[str, str]) -> Query:
    """The query of a request; parameters of other things are left alone, empty ones left out.

    Raises:
        ValueError: If a value is no number, or a word that means nothing.
    """
    values = {name: value for name, value in given.items() if value != ""}
    return Query(
        step_from=_number(values, "step_from", int),
        step_to=_number(values, "step_to", int),
        strategy=values.get("strategy"),
        reward_from=_number(values, "reward_from", float),
        reward_to=_number(values, "reward_to", float),
        answers=values.get("answers", ""),
        state=values.get("state", ""),
        text=values.get("text", ""),
        order=values.get("order", "step"),
    )


def _number(values: Mapping[str, str], name: str, kind: Callable[[str], Any]) -> Any:
    if name not in values:
        return None
    try:
        number = kind(values[name])
        is_finite = math.isfinite(number)
    except (ValueError, OverflowError):
        number, is_finite = None, False
    if not is_finite:
        raise ValueError(f"{name} must be a number; got {values[name][:60]!r}")
    return number


def select(entries: Iterable[Entry], query: Query) -> list[Entry]:
    """The entries that match, in the query's order; ties by step and group."""
    wanted = query.text.casefold()
    found = [
        entry
        for entry in entries
        if (query.step_from is None or entry.step >= query.step_from)
        and (query.step_to is None or entry.step <= query.step_to)
        and (query.strategy is None or entry.strategy == query.strategy)
        and _is_between(entry.reward_mean, query.reward_from, query.reward_to)
        and (not query.answers or _ANSWERS[query.answers](entry))
        and (not query.state or _STATES[query.state](entry))
        and (not wanted or wanted in entry.question.casefold())
    ]
    key = _ORDERS[query.order]
    return sorted(found, key=lambda entry: (key(entry), entry.step, entry.group))


def _is_between(value: float | None, low: float | None, high: float | None) -> bool:
    if low is None and high is None:
        return True
    return value is not None and (low is None or value >= low) and (high is None or value <= high)


def page_of(found: Sequence[Entry], page: int, size: int) -> Sequence[Entry]:
    """One page, counted from 0; empty behind the last one."""
    size = max(1, min(size, MAX_PAGE_SIZE))
    start = max(0, page) * size
    return found[start : start + size]


def facets(entries: Iterable[Entry]) -> dict[str, Any]:
    """What there is to choose from: strategies with their counts, and the range of steps."""
    entries = list(entries)
    counts = Counter(entry.strategy for entry in entries)
    steps = [entry.step for entry in entries]
    return {
        "strategies": [{"name": name, "count": count} for name, count in sorted(counts.items())],
        "steps": [min(steps), max(steps)] if steps else None,
    }
