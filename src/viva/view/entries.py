"""Entries of lists of conversations: a small value each instead of the whole text."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from viva.judging.records import Transcript
from viva.run.secrets import printable
from viva.view.judgement import NO_VERDICTS, JudgeCounts, count_verdicts

_QUESTION_CHARS = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of ``transcripts.jsonl``."""

    step: int
    group: int
    offset: int
    """Start of the line, in bytes."""
    strategy: str
    """Search strategy, else the protocol, else empty."""
    question: str
    """Its beginning."""
    has_record: bool
    """Whether what was said was kept."""
    is_void: bool
    void_reason: str | None
    num_failures: int
    num_right: int
    num_graded: int
    """0 if the answer is not known."""
    num_mended: int
    """Right solutions that revision gained, less those that it lost."""
    reward_min: float | None
    reward_mean: float | None
    reward_max: float | None
    judged: JudgeCounts = NO_VERDICTS

    @property
    def share_correct(self) -> float | None:
        """Share of agents whose final solution is right; ``None`` if nobody was graded."""
        return self.num_right / self.num_graded if self.num_graded else None

    @property
    def reward_spread(self) -> float:
        """Highest minus lowest reward: how clearly the judge decided."""
        return (self.reward_max or 0.0) - (self.reward_min or 0.0)


def entry_of(offset: int, transcript: Transcript) -> Entry:
    """The entry of a line of ``transcripts.jsonl``; `ValueError` if a voter voted twice on a pair."""
    record = transcript.record
    rewards = [value for value in transcript.rewards or () if value is not None]
    if record is not None:
        rewards = list(record.rewards.values())
    before, after = ({}, {}) if record is None else (record.correct_initial or {}, record.correct or {})
    return Entry(
        step=transcript.step,
        group=transcript.group,
        offset=offset,
        strategy=printable(transcript.strategy or (record.protocol if record else "")),
        question=printable(record.question[:_QUESTION_CHARS] if record else ""),
        has_record=record is not None,
        is_void=transcript.void,
        void_reason=None if transcript.void_reason is None else printable(transcript.void_reason),
        num_failures=len(record.failures if record and record.failures else transcript.failures),
        num_right=sum(after.values()),
        num_graded=len(after),
        num_mended=sum(after[agent] - before[agent] for agent in before.keys() & after.keys()),
        reward_min=min(rewards, default=None),
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        reward_max=max(rewards, default=None),
        judged=NO_VERDICTS if record is None else count_verdicts(record),
    )


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
    "flips": lambda entry: entry.judged.flips > 0,
    "cycles": lambda entry: entry.judged.cycles > 0,
    "disagrees": lambda entry: entry.judged.agreeing < entry.judged.decidable,
}

_ORDERS: dict[str, Callable[[Entry], float]] = {
    "step": lambda entry: entry.step,
    "-step": lambda entry: -entry.step,
    "reward": lambda entry: math.inf if entry.reward_mean is None else entry.reward_mean,
    "-reward": lambda entry: math.inf if entry.reward_mean is None else -entry.reward_mean,
    "-spread": lambda entry: -entry.reward_spread,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A search; ``None``, empty texts and infinite bounds let everything pass."""

    step_from: float = -math.inf
    step_to: float = math.inf
    strategy: str | None = None
    reward_from: float = -math.inf
    """Bound of the mean reward; what has none passes where there are no bounds."""
    reward_to: float = math.inf
    answers: str = ""
    state: str = ""
    text: str = ""
    """Part of the question's beginning, in either case."""
    order: str = "step"

    def __post_init__(self) -> None:
        """Refuse words that mean nothing, by a `ValueError`."""
        for name, value, allowed in (
            ("answers", self.answers, _ANSWERS),
            ("state", self.state, _STATES),
            ("order", self.order, _ORDERS),
        ):
            if value not in allowed and not (value == "" and name != "order"):
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value[:60]!r}")


_NUMBERS = {"step_from": int, "step_to": int, "reward_from": float, "reward_to": float}


def parse_query(given: Mapping[str, str]) -> Query:
    """The query of a request; parameters of other things are left alone, empty ones left out.

    Raises:
        ValueError: If a value is no number, or a word that means nothing.
    """
    values: dict[str, Any] = {
        field.name: given[field.name] for field in fields(Query) if given.get(field.name, "") != ""
    }
    for name in values.keys() & _NUMBERS.keys():
        try:
            values[name] = _NUMBERS[name](given[name])
            is_finite = math.isfinite(values[name])
        except (ValueError, OverflowError):
            is_finite = False
        if not is_finite:
            raise ValueError(f"{name} must be a number; got {given[name][:60]!r}")
    return Query(**values)


def select(entries: Iterable[Entry], query: Query) -> list[Entry]:
    """The entries that match, in the query's order; ties by step and group."""
    wanted = query.text.casefold()
    found = [
        entry
        for entry in entries
        if query.step_from <= entry.step <= query.step_to
        and (query.strategy is None or entry.strategy == query.strategy)
        and _is_rewarded(entry.reward_mean, query.reward_from, query.reward_to)
        and (not query.answers or _ANSWERS[query.answers](entry))
        and (not query.state or _STATES[query.state](entry))
        and (not wanted or wanted in entry.question.casefold())
    ]
    key = _ORDERS[query.order]
    return sorted(found, key=lambda entry: (key(entry), entry.step, entry.group))


def _is_rewarded(mean: float | None, low: float, high: float) -> bool:
    if mean is None:
        return (low, high) == (-math.inf, math.inf)
    return low <= mean <= high


def page_of(found: Sequence[Entry], page: int, size: int) -> Sequence[Entry]:
    """One page, counted from 0; empty behind the last one."""
    return found[page * size : (page + 1) * size]


def count_strategies(entries: Iterable[Entry]) -> list[dict[str, object]]:
    """Every strategy, by its name, with the number of its conversations."""
    counts = Counter(entry.strategy for entry in entries)
    return [{"name": name, "count": count} for name, count in sorted(counts.items())]


def choose(
    entries: Sequence[Entry], *, with_tokens: Collection[tuple[int, int]] = frozenset()
) -> list[tuple[Entry, str]]:
    """A few telling conversations, each once and with why it is shown, in the order in which they are worth reading.

    Where answers are known, best and worst go by the share of agents whose final solution is right; else by how clearly
    the judge decided (the spread of the rewards). Ties go to the later step, then the earlier group, so the choice is a
    function of the entries alone, which stand in the order of (step, group).
    """
    recorded = [entry for entry in entries if entry.has_record]
    sound = [entry for entry in recorded if not entry.is_void]
    found: list[tuple[Entry, str]] = []
    if sound:
        last = next(entry for entry in sound if entry.step == max(each.step for each in sound))
        found += [
            (sound[0], "the first conversation of the run"),
            (last, "the first conversation of the last step"),
            *_extremes(sound),
        ]
    kept = [entry for entry in sound if (entry.step, entry.group) in with_tokens]
    failed = [entry for entry in recorded if entry.is_void or entry.num_failures]
    found += [(entry, "the last conversation whose tokens were kept") for entry in kept[-1:]]
    for entry in failed[-1:]:
        what = "in which an agent failed" if entry.num_failures else "that was void"
        found.append((entry, f"a conversation {what}"))
    choices: dict[Entry, str] = {}
    for entry, reason in found:
        choices.setdefault(entry, reason)
    return list(choices.items())


def _extremes(sound: Sequence[Entry]) -> list[tuple[Entry, str]]:
    graded = [entry for entry in sound if entry.share_correct is not None]
    if not graded:
        return [
            (_highest(sound, lambda entry: entry.reward_spread), "the judge decided most clearly"),
            (_highest(sound, lambda entry: -entry.reward_spread), "the judge saw the least difference"),
        ]
    mended = _highest(graded, lambda entry: entry.num_mended)
    spoiled = _highest(graded, lambda entry: -entry.num_mended)
    return [
        (_highest(graded, lambda entry: entry.share_correct or 0.0), "the most agents right at the end"),
        (_highest(graded, lambda entry: -(entry.share_correct or 0.0)), "the fewest agents right at the end"),
        *([(mended, "revision mended the most solutions")] if mended.num_mended > 0 else []),
        *([(spoiled, "revision spoiled the most solutions")] if spoiled.num_mended < 0 else []),
    ]


def _highest(entries: Sequence[Entry], value: Callable[[Entry], float]) -> Entry:
    return max(entries, key=lambda entry: (value(entry), entry.step, -entry.group))
