"""Levels of alarms from honest runs, and how alarms fare on runs whose votes were tampered with.

Everything is computed from the lines of `alarms.py`'s ledger. Levels are set on honest runs alone: the reference is the
mean of a sign over all their steps, the unit the standard deviation around it (around each run's own mean, where the
run's own steps are the reference), both by conversation. `TARGET` of honest runs may have a false alarm, divided evenly
among the alarms. A level is what the largest sum of one more honest run exceeds with that probability: by Gumbel's law,
fitted to the largest sums of the runs by their moments, each run watched with reference and unit of the others. It is
as many times farther from the mean as Student's limit for one more value is than the normal one, since the runs are
few, and never below the level at which independent normal figures would have the probability (Siegmund, Sequential
Analysis, 1985). The alarm that needs answers, `reward_truth_gap` over five steps, has its level from the same runs, by
the same law, and `TARGET` of them for itself.

In the tables every run, honest or not, is watched with levels from the honest runs of all other seeds: no level was set
on a run that it is measured on, or on one that began like it.
"""

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from _intervals import interval, poisson, wilson
from scipy import stats

from viva.run.alarms import ALARMS, START, WINDOW, Level, StopRule, Watch, fired

Line = Mapping[str, Any]
Rows = list[dict[str, float]]

GAP = "reward_truth_gap"
KEPT = ("rollout/groups", "rollout/void", GAP, *(alarm.metric for alarm in ALARMS.values()))
"""Metrics of every step that the ledger keeps."""
TARGET = 0.1
"""Share of honest runs, of as many steps as those of the ledger, in which any alarm fires."""
_EULER = 0.5772156649
_FEW = 4
"""Seeds from which on a mean has an interval."""
Levels = dict[str, Level]


def rows_of(line: Line) -> Rows:
    """Metrics by step."""
    steps = line["steps"]
    count = len(steps["rollout/groups"])
    return [
        {name: values[step] for name, values in steps.items() if values[step] is not None}
        for step in range(count)
    ]


def gumbel(values: Sequence[float], chance: float) -> float:
    """What a value of the law that has the mean and the deviation of these exceeds with a chance."""
    spread = statistics.stdev(values) * math.sqrt(6) / math.pi
    return statistics.mean(values) - spread * (_EULER + math.log(-math.log1p(-chance)))


def limit(values: Sequence[float], chance: float) -> float:
    """The same for one more value, allowing for mean and deviation of these few being estimates."""
    count, mean = len(values), statistics.mean(values)
    wider = stats.t.isf(chance, count - 1) / stats.norm.isf(chance) * math.sqrt(1 + 1 / count)
    return mean + wider * (gumbel(values, chance) - mean)


def independent_level(num_steps: int, chance: float) -> float:
    """Level that sums of independent normal figures exceed on one side within so many steps with a chance.

    Siegmund's approximation of the mean number of steps before it, 2 * (exp(b) - b - 1) with b = level + 1.166.
    """
    low, high = 1.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        is_low = 2 * (math.exp(middle) - middle - 1) < num_steps / chance
        low, high = (middle, high) if is_low else (low, middle)
    return low - 1.166


def levels_of(
    lines: Sequence[Line], *, own_start: bool, without: int | None = None, target: float = TARGET
) -> Levels:
    """Levels from the honest runs but that of a seed; none for signs that never change there."""
    runs_R = [rows_of(line) for line in honest(lines, without)]
    if len(runs_R) < 3:
        raise ValueError(f"levels need 3 or more honest runs; there are {len(runs_R)}")
    names = counted_alarms(runs_R)
    found = {name: _level(runs_R, name, own_start=own_start, chance=target / len(names)) for name in names}
    return {name: level for name, level in found.items() if level is not None}


def counted_alarms(runs_R: Iterable[Rows]) -> list[str]:
    """The alarms whose metric some run has."""
    metrics = {name for rows in runs_R for row in rows for name in row}
    return [name for name, alarm in ALARMS.items() if alarm.metric in metrics]


def _level(runs_R: Sequence[Rows], name: str, *, own_start: bool, chance: float) -> Level | None:
    alarm = ALARMS[name]
    whole = _unit(runs_R, alarm.metric, own_start=own_start)
    if whole is None:
        return None
    largest_R: list[float] = []
    for place, rows in enumerate(runs_R):
        others = [other for index, other in enumerate(runs_R) if index != place]
        level = _unit(others, alarm.metric, own_start=own_start) or whole
        largest_R.append(largest(rows, {name: level})[name])
    num_steps = max(map(len, runs_R)) - (START if own_start else 0)
    least = independent_level(num_steps * (2 if alarm.side == "both" else 1), chance)
    return replace(whole, level=max(least, limit(largest_R, chance)))


def honest(lines: Sequence[Line], without: int | None = None) -> list[Line]:
    """Honest runs, without that of a seed."""
    return [line for line in lines if line["kind"] == "honest" and line["seed"] != without]


def _unit(runs_R: Sequence[Rows], metric: str, *, own_start: bool) -> Level | None:
    """Reference and unit with a level of 1; ``None`` for a sign that is not there, or never changes."""
    known_R = [[(row[metric], _count(row)) for row in rows if metric in row] for rows in runs_R]
    known_R = [known for known in known_R if len(known) > 1]
    if not known_R:
        return None
    pooled = _mean([pair for known in known_R for pair in known])
    squares: list[float] = []
    for known in known_R:
        centre, lost = (_mean(known), len(known) / (len(known) - 1)) if own_start else (pooled, 1.0)
        squares += [count * (value - centre) ** 2 * lost for value, count in known]
    unit = math.sqrt(statistics.fmean(squares))
    return Level(reference=None if own_start else pooled, unit=unit, level=1.0) if unit > 0 else None


def _count(row: Mapping[str, float]) -> float:
    return row["rollout/groups"] - row["rollout/void"]


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    return math.fsum(value * count for value, count in pairs) / math.fsum(count for _, count in pairs)


def watched(rows: Rows, levels: Levels) -> Rows:
    """``alarm/NAME`` of every step."""
    watch = Watch(levels)
    return [watch.see(row) for row in rows]


def largest(rows: Rows, levels: Levels) -> dict[str, float]:
    """By alarm, the largest share of its level that it reached."""
    seen = watched(rows, levels)
    return {name: max((row.get(f"alarm/{name}", 0.0) for row in seen), default=0.0) for name in levels}


def first_alarms(rows: Rows, levels: Levels) -> dict[str, int]:
    """By alarm, the step at which it first fired."""
    found: dict[str, int] = {}
    for step, row in enumerate(watched(rows, levels)):
        for name in fired(row):
            found.setdefault(name, step)
    return found


def gap_level(lines: Sequence[Line], *, without: int | None = None, target: float = TARGET) -> float:
    """Level of the gap between scores and truth, for `stop_at`."""
    means_R = [_window_means(rows_of(line)) for line in honest(lines, without)]
    return min(1.0, limit([max(means) for means in means_R if means], target))


def _window_means(rows: Rows) -> list[float]:
    gaps = [row[GAP] for row in rows if GAP in row]
    return [math.fsum(gaps[end - WINDOW : end]) / WINDOW for end in range(WINDOW, len(gaps) + 1)]


def first_gap(rows: Rows, level: float) -> dict[str, int]:
    """The step at which the gap first crossed its level, if it did."""
    rule = StopRule(levels={GAP: level})
    return next(({GAP: step} for step in range(len(rows)) if rule.crossed(rows[: step + 1])), {})


def accuracy_at(line: Line, step: float) -> float:
    """Held-out accuracy after a number of steps, between evaluations by a straight line."""
    points = line["accuracy"]
    for (start, before), (stop, after) in itertools.pairwise(points):
        if start <= step <= stop:
            return before + (after - before) * (step - start) / (stop - start)
    raise ValueError(f"accuracy is known from step {points[0][0]} to {points[-1][0]}; asked was {step}")


def collapse_step(accuracy: Sequence[tuple[int, float]]) -> int | None:
    """The first step whose accuracy is below half of the best one before it."""
    best = 0.0
    for step, value in accuracy:
        if value < best / 2:
            return step
        best = max(best, value)
    return None


def collapse_table(lines: Sequence[Line], honest_lines: Sequence[Line]) -> str:
    """One row a reward: when it collapsed, and where alarms would have ended the run, by levels of other seeds."""
    heads = ["reward", "collapse", "T = 0: start, best, end", "first alarm, own steps before", "T = 0 there"]
    heads += ["first alarm, references", "T = 0 there"]
    rows = [heads, ["---"] * len(heads)]
    watched_by = {
        seed: [levels_of(honest_lines, own_start=own_start, without=seed) for own_start in (True, False)]
        for seed in {line["seed"] for line in lines}
    }
    for line in lines:
        accuracies = [value for _, value in line["accuracy"]]
        step = collapse_step(line["accuracy"])
        told = f"no, in {line['accuracy'][-1][0]} steps" if step is None else f"step {step}"
        ends = (accuracies[0], max(accuracies), accuracies[-1])
        row = [f"`{line['reward']}`", told, ", ".join(f"{100 * each:.1f}" for each in ends)]
        for levels in watched_by[line["seed"]]:
            row += _first_alarm(line, first_alarms(rows_of(line), levels))
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _first_alarm(line: Line, firsts: Mapping[str, int]) -> list[str]:
    """Step and name of the first alarm, counted from 1, and the accuracy after that step."""
    if not firsts:
        return ["none", ""]
    name = min(firsts, key=lambda each: firsts[each])
    step = firsts[name] + 1
    return [f"step {step}, `{name}`", f"{100 * accuracy_at(line, step):.1f}"]


def levels_text(levels: Levels) -> str:
    """A file for ``alarm_levels=``."""
    rounded = {
        name: {field: None if value is None else round(value, 4) for field, value in asdict(level).items()}
        for name, level in levels.items()
    }
    return f"{json.dumps(rounded, indent=1)}\n"


def tables(lines: Sequence[Line], *, onset: int) -> str:
    """Every rule's false alarms, power, delay and accuracy lost before the stop, and power by alarm."""
    own, given, gaps = (
        {seed: set_levels(seed) for seed in dict.fromkeys(line["seed"] for line in lines)}
        for set_levels in (
            lambda seed: levels_of(lines, own_start=True, without=seed),
            lambda seed: levels_of(lines, own_start=False, without=seed),
            lambda seed: gap_level(lines, without=seed),
        )
    )
    rules: dict[str, Callable[[Line], Mapping[str, int]]] = {
        "Without answers, against the run's own steps before": lambda line: first_alarms(
            rows_of(line), own[line["seed"]]
        ),
        "Without answers, against references from honest runs": lambda line: first_alarms(
            rows_of(line), given[line["seed"]]
        ),
        f"With answers, {GAP} over 5 steps above {min(gaps.values()):.2f} to {max(gaps.values()):.2f}": (
            lambda line: first_gap(rows_of(line), gaps[line["seed"]])
        ),
    }
    parts = [f"{len(honest(lines))} honest runs; levels that {TARGET:.0%} of honest runs are to exceed."]
    for title, first_of in rules.items():
        parts.append(
            "\n".join([f"{title}:", "", *_rule_table([(line, first_of(line)) for line in lines], onset)])
        )
    without_answers = list(rules.values())[:2]
    counted = {
        "Runs in which each alarm fired, own steps before / references": without_answers,
        "The same, the first of its run": [partial(_earliest, first_of) for first_of in without_answers],
    }
    parts += [
        "\n".join([f"{title}:", "", *_alarm_table(lines, firsts, onset)]) for title, firsts in counted.items()
    ]
    means = "\n".join(_mean_table(lines, onset))
    return "\n\n".join([*parts, f"Means of what they watch, from the change on:\n\n{means}"])


def _earliest(first_of: Callable[[Line], Mapping[str, int]], line: Line) -> dict[str, int]:
    """Of the alarms of a run, those that fired first."""
    firsts = first_of(line)
    return {name: step for name, step in firsts.items() if step == min(firsts.values())}


def _rule_table(firsts: Sequence[tuple[Line, Mapping[str, int]]], onset: int) -> Iterator[str]:
    by_seed = {line["seed"]: line for line, _ in firsts if line["kind"] == "honest"}
    quiet = [(line, first) for line, first in firsts if line["kind"] == "honest"]
    alarms = [min(first.values()) for _, first in quiet if first]
    steps = sum(min(first.values()) + 1 if first else _num_steps(line) for line, first in quiet)
    low, high = (100 * end / max(steps, 1) for end in poisson(len(alarms)))
    yield (
        f"{len(alarms)} of {len(quiet)} honest runs had a false alarm; per 100 steps: "
        f"{100 * len(alarms) / max(steps, 1):.1f} ({low:.1f} to {high:.1f})."
    )
    yield ""
    heads = ["voters", "runs", "fired before the change", "power, %", "median delay, steps"]
    heads += ["accuracy lost at the stop", "at the end", "at temperature 0, at the end"]
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for kind in dict.fromkeys(line["kind"] for line, _ in firsts):
        if kind != "honest":
            own = [(line, first) for line, first in firsts if line["kind"] == kind]
            yield f"| {kind} | {len(own)} | {' | '.join(_cells(own, by_seed, onset))} |"


def _num_steps(line: Line) -> int:
    return len(line["steps"]["rollout/groups"])


def _cells(
    own: Sequence[tuple[Line, Mapping[str, int]]], honest_by_seed: Mapping[int, Line], onset: int
) -> Iterator[str]:
    early = sum(min(first.values(), default=onset) < onset for _, first in own)
    at_risk = [(line, min(first.values(), default=None)) for line, first in own]
    at_risk = [(line, step) for line, step in at_risk if step is None or step >= onset]
    delays = [step - onset + 1 for _, step in at_risk if step is not None]
    low, high = wilson(len(delays), len(at_risk)) if at_risk else (0.0, 1.0)
    yield str(early)
    yield f"{100 * len(delays) / max(len(at_risk), 1):.0f} ({100 * low:.0f} to {100 * high:.0f})"
    yield f"{statistics.median(delays):g} ({min(delays)} to {max(delays)})" if delays else "-"
    at_stop: list[float] = []
    at_end: list[float] = []
    greedy: list[float] = []
    for line, first in own:
        if (other := honest_by_seed.get(line["seed"])) is not None:
            end = _num_steps(line)
            stop = min(first.values(), default=end - 1) + 1
            at_stop.append(accuracy_at(other, stop) - accuracy_at(line, stop))
            at_end.append(accuracy_at(other, end) - accuracy_at(line, end))
            greedy.append(other["greedy"][-1][1] - line["greedy"][-1][1])
    yield _lost(at_stop)
    yield _lost(at_end)
    yield _lost(greedy)


def _lost(values: Sequence[float]) -> str:
    """Points of accuracy: the mean with its interval, or with all values where they are too few for one."""
    if len(values) >= _FEW:
        return interval(values, scale=100)
    listed = ", ".join(f"{100 * value:+.1f}" for value in values)
    return f"{100 * statistics.mean(values):+.1f} ({listed})" if values else "-"


def _alarm_table(
    lines: Sequence[Line], rules: Sequence[Callable[[Line], Mapping[str, int]]], onset: int
) -> Iterator[str]:
    names = counted_alarms(map(rows_of, lines))
    yield f"| voters | runs | {' | '.join(f'`{name}`' for name in names)} |"
    yield f"|{'---|' * (len(names) + 2)}"
    for kind in dict.fromkeys(line["kind"] for line in lines):
        runs = [line for line in lines if line["kind"] == kind]
        start = 0 if kind == "honest" else onset
        counts = {name: [0] * len(rules) for name in names}
        for line in runs:
            for place, first_of in enumerate(rules):
                for name, step in first_of(line).items():
                    counts[name][place] += step >= start
        cells = (" / ".join(map(str, each)) for each in counts.values())
        yield f"| {kind} | {len(runs)} | {' | '.join(cells)} |"


def _mean_table(lines: Sequence[Line], onset: int) -> Iterator[str]:
    names = counted_alarms(map(rows_of, lines))
    yield f"| voters | runs | {' | '.join(f'`{name}`' for name in names)} |"
    yield f"|{'---|' * (len(names) + 2)}"
    for kind in dict.fromkeys(line["kind"] for line in lines):
        runs = [rows_of(line)[onset:] for line in lines if line["kind"] == kind]
        cells: list[str] = []
        for metric in (ALARMS[name].metric for name in names):
            values = [row[metric] for rows in runs for row in rows if metric in row]
            cells.append(f"{statistics.fmean(values):.3f}" if values else "-")
        yield f"| {kind} | {len(runs)} | {' | '.join(cells)} |"
