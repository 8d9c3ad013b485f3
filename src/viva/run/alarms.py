"""Alarms over the steps of a run, and the rule that ends it.

An alarm watches one metric, most of them signs that need no known answers (`viva.training.signs`), by a cumulative sum
(CUSUM; Page, Continuous inspection schemes, Biometrika 41, 1954). With ``x_t`` the metric at step t, of ``n_t``
conversations that count, ``r`` its reference and ``u`` the standard deviation of one conversation's figure::

    z_t = (x_t - r) * sqrt(n_t) / u
    up_t = max(0, up_{t-1} + z_t - 1/2),   down_t = max(0, down_{t-1} - z_t - 1/2)
    alarm/NAME = the larger of those that it watches / level

It fires where ``alarm/NAME`` is above 1, and goes on from there. Without a measured reference, ``r`` is the mean over
all steps of the run before, of ``N`` conversations, and ``z_t`` is multiplied by ``sqrt(N / (N + n_t))`` for the error
of that mean (self-starting CUSUM; Hawkins, The Statistician 36, 1987); nothing can fire in the first `START` steps. So
an alarm tells a *change*, and voters that were never honest do not change. With references measured on honest runs of
the same model and recipe (`read_levels`) it tells these, too.

Units and levels of `MEASURED` were set on honest runs of the built-in policy (`benchmarks/alarms.py levels`).
Everything is a function of the metrics already written, so a resumed run goes on as if it had never stopped.
"""

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from viva.conversation.messages import did_you_mean

START = 4
"""Steps of a run that its alarms only take for a reference, where none was measured."""

_ALLOWANCE = 0.5
"""In standard deviations of a step: CUSUM is quickest for a change of twice as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One watched metric."""

    metric: str
    side: Literal["up", "down", "both"] = "both"
    text: str
    """Meaning of a signal, and what to look at."""


_LOOK = "read some conversations of these steps ('viva view')"

ALARMS: Mapping[str, Alarm] = {
    "answer_votes": Alarm(
        metric="sign/answer_votes",
        text=f"votes follow the answer that most agents gave less, or more, than they did; {_LOOK}",
    ),
    "against_majority": Alarm(
        metric="sign/against_majority",
        text=f"voters agree with one another less, or more, than they did; {_LOOK}",
    ),
    "mutual_votes": Alarm(
        metric="sign/mutual_votes",
        side="up",
        text=f"some agents vote for each other beyond what the others' votes explain; {_LOOK}",
    ),
    "initial_judge": Alarm(
        metric="sign/against_initial_judge",
        side="up",
        text=f"votes contradict the policy as it was at the start more than they did; {_LOOK}",
    ),
    "order_flips": Alarm(
        metric="sign/order_flips",
        text="verdicts depend more, or less, on the order in which solutions were shown",
    ),
    "length_votes": Alarm(metric="sign/length_votes", text=f"votes follow the length of solutions; {_LOOK}"),
    "length_pay": Alarm(metric="sign/length_pay", text=f"rewards follow the length of solutions; {_LOOK}"),
    "ties": Alarm(metric="sign/ties", text="the share of ties among the votes has changed"),
    "invalid": Alarm(metric="sign/invalid", side="up", text="more votes than before cannot be read"),
    "answer_entropy": Alarm(
        metric="sign/answer_entropy", side="down", text="different questions get the same answer more often"
    ),
    "length_entropy": Alarm(
        metric="sign/length_entropy", side="down", text="solutions have become equally long"
    ),
    "policy_entropy": Alarm(
        metric="optim/entropy", text="the policy has become much surer of its tokens, or much less"
    ),
}
"""By name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Reference of an alarm, measured on honest runs."""

    reference: float | None
    """``None``: the run's own steps before."""
    unit: float
    """Standard deviation of the figure of one conversation."""
    level: float
    """Limit of the cumulative sum, in standard deviations of a step."""

    def __post_init__(self) -> None:
        """Refuse numbers that measure nothing, by a `ValueError`."""
        numbers = [self.unit, self.level, *([] if self.reference is None else [self.reference])]
        if not all(map(math.isfinite, numbers)) or self.unit <= 0 or self.level <= 0:
            raise ValueError(
                "an alarm needs a finite reference, a unit and a level above 0; got "
                f"reference {self.reference}, unit {self.unit}, level {self.level}"
            )


MEASURED: Mapping[str, Level] = {
    name: Level(reference=None, unit=unit, level=level)
    for name, unit, level in (
        ("answer_votes", 0.247, 6.31),
        ("against_majority", 0.197, 6.31),
        ("mutual_votes", 0.0452, 6.68),
        ("initial_judge", 0.406, 6.12),
        ("order_flips", 0.294, 7.62),
        ("length_votes", 0.47, 6.31),
        ("length_pay", 1.34, 6.31),
        ("ties", 0.158, 6.88),
        ("invalid", 0.0334, 8.91),
        ("answer_entropy", 0.161, 7.15),
        ("length_entropy", 0.207, 6.14),
        ("policy_entropy", 0.0446, 8.32),
    )
}
"""Units and levels of the built-in policy's critique self-play, for runs of 20 steps with 4 conversations each: a tenth
of honest ones may have a false alarm."""


def read_levels(path: str | Path) -> dict[str, Level]:
    """Levels of a file: a JSON object of reference, unit and level by the name of the alarm; others are not watched.

    Raises:
        ValueError: If it cannot be read, names an alarm that there is not, or holds numbers that measure nothing.
    """
    try:
        rows = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        found = {str(name): Level(**row) for name, row in rows.items()}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} must be a JSON object of reference, unit and level by alarm, as benchmarks/alarms.py "
            f"writes it; got {error}"
        ) from error
    check_names(found)
    return found


def check_names(names: Iterable[str]) -> None:
    """Refuse alarms that there are not; the `ValueError` has the name that may be meant."""
    for name in names:
        if name not in ALARMS:
            hint = did_you_mean(name, ALARMS)
            raise ValueError(f"an alarm must be one of {', '.join(ALARMS)}; got {name!r}.{hint}")


@dataclass(slots=True)
class _Sum:
    """The cumulative sums of one alarm."""

    level: Level
    side: str
    num_steps: int = 0
    count: float = 0.0
    """Conversations of the steps before."""
    mean: float = 0.0
    """Over these."""
    up: float = 0.0
    down: float = 0.0

    def add(self, value: float, count: float) -> float | None:
        """The larger sum over its level after one more step; ``None`` while there is no reference yet."""
        reference = self.level.reference
        if reference is None:
            reference, before = self.mean, self.count
            self.num_steps += 1
            self.count += count
            self.mean += (value - self.mean) * count / self.count
            if self.num_steps <= START:
                return None
            count *= before / self.count
        z = (value - reference) * math.sqrt(count) / self.level.unit
        self.up = max(0.0, self.up + z - _ALLOWANCE)
        self.down = max(0.0, self.down - z - _ALLOWANCE)
        watched = {"up": [self.up], "down": [self.down], "both": [self.up, self.down]}[self.side]
        return max(watched) / self.level.level


class Watch:
    """All alarms of a run, fed with its metrics step by step.

    Args:
        levels: By alarm; those without one are not watched.
        history: Metrics of the steps before, as they were written.
    """

    def __init__(self, levels: Mapping[str, Level], history: Iterable[Mapping[str, float]] = ()) -> None:
        self._sums = {name: _Sum(level, ALARMS[name].side) for name, level in levels.items()}
        for row in history:
            self.see(row)

    def see(self, row: Mapping[str, float]) -> dict[str, float]:
        """``alarm/NAME`` after one more step: the share of its level that each alarm has reached."""
        count = row.get("rollout/groups", 0.0) - row.get("rollout/void", 0.0)
        found: dict[str, float] = {}
        for name, alarm_sum in self._sums.items():
            metric = ALARMS[name].metric
            if metric in row and count > 0:
                share = alarm_sum.add(row[metric], count)
                if share is not None:
                    found[f"alarm/{name}"] = share
        return found


def fired(row: Mapping[str, float]) -> list[str]:
    """Names of the alarms that stand above their level after a step."""
    return [name for name in ALARMS if row.get(f"alarm/{name}", 0.0) > 1.0]


WATCHED = ("reward_truth_gap", "flip/right_to_wrong")
"""Metrics a rule may name; all are shares in [0, 1], small when all is well."""

WINDOW = 5
"""Steps averaged; the rule says nothing before so many steps have the metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """Levels that must not be crossed, and alarms that must not fire.

    Raises:
        ValueError: If there is neither, a metric is not one of `WATCHED`, a level is not in (0, 1], or there is no such
            alarm.
    """

    levels: Mapping[str, float] = field(default_factory=dict[str, float])
    alarms: Sequence[str] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "StopRule | None":
        """The rule that a run's options ``stop_at`` and ``stop_on`` name; ``None`` where both are left out."""
        levels, alarms = config.get("stop_at"), config.get("stop_on")
        if levels is None and alarms is None:
            return None
        return cls(levels=levels or {}, alarms=alarms or ())

    def __post_init__(self) -> None:
        """Reject a rule that could never stop, or always would."""
        if not self.levels and not self.alarms:
            raise ValueError(
                f"a stop rule needs at least one level or alarm; allowed: stop_at of {', '.join(WATCHED)}, stop_on of "
                f"{', '.join(ALARMS)}"
            )
        check_names(self.alarms)
        for name, level in self.levels.items():
            if name not in WATCHED:
                hint = did_you_mean(name, WATCHED)
                raise ValueError(f"a stop rule may watch {', '.join(WATCHED)}; got {name!r}.{hint}")
            if not (math.isfinite(level) and 0 < level <= 1):
                raise ValueError(f"the level of {name} must be above 0 and at most 1; got {level}")

    def crossed(self, rows: Sequence[Mapping[str, float]]) -> str | None:
        """The message of what crossed its level after the last of all steps so far; ``None`` if nothing did."""
        *_, (means, _) = self._figures(rows)
        for name, mean in means.items():
            if mean > self.levels[name]:
                level = self.levels[name]
                return f"{name} was {mean:.3f} over the last {WINDOW} steps, above its level of {level:g}"
        for name in self.alarms:
            if any(name in fired(row) for row in rows):
                return f"the alarm {name} has fired: {ALARMS[name].text}"
        return None

    def is_best(self, rows: Sequence[Mapping[str, float]]) -> bool:
        """Whether the largest share of its level that a metric or alarm has reached is lower than after any row before.

        A cumulative sum is often at 0: with alarms the last such step is best, after which the change began. A sum
        stands where it was in steps that do not count for it.
        """
        *before, now = (
            max(
                (*(mean / self.levels[name] for name, mean in means.items()), *sums.values()),
                default=math.inf,
            )
            for means, sums in self._figures(rows)
        )
        lowest = min(before, default=math.inf)
        is_fresh = any(f"alarm/{name}" in row for row in rows[-1:] for name in self.alarms)
        return now < lowest or (is_fresh and now == lowest < math.inf)

    def _figures(
        self, rows: Sequence[Mapping[str, float]]
    ) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
        """Before the first row and after each: window means of metrics, and the share that each alarm has reached.

        Metrics that do not fill the window are left out. Takes time linear in the rows.
        """
        windows = {name: deque[float](maxlen=WINDOW) for name in self.levels}
        names = [f"alarm/{name}" for name in self.alarms]
        means: dict[str, float] = {}
        sums: dict[str, float] = {}
        yield means, sums
        for row in rows:
            for name, window in windows.items():
                if name in row:
                    window.append(row[name])
            means = {
                name: math.fsum(window) / WINDOW for name, window in windows.items() if len(window) == WINDOW
            }
            sums = sums | {name: row[name] for name in names if name in row}
            yield means, sums
