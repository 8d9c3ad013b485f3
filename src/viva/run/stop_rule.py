"""When to stop because the reward has left the truth: watched metrics that must not rise above a stated level.

The metrics are computed on audited prompts, whose answers never enter the reward: ``reward_truth_gap``,
``flip/right_to_wrong``. One step's figure is noisy, so what counts is the mean over the last `WINDOW` logged steps.
Everything is a function of the logged metrics, so a resumed run decides as an uninterrupted one would.
"""

import difflib
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["WATCHED", "WINDOW", "StopRule"]

WATCHED = ("reward_truth_gap", "flip/right_to_wrong")
"""Metrics a rule may name; all are shares in [0, 1], small when all is well."""

WINDOW = 5
"""Steps averaged; the rule says nothing before so many steps have the metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """Levels that must not be crossed.

    Raises:
        ValueError: If there is no level, a metric is not one of `WATCHED`, or a level is not in (0, 1].
    """

    levels: Mapping[str, float]

    def __post_init__(self) -> None:
        """Reject a rule that could never stop, or always would."""
        if not self.levels:
            raise ValueError(f"a stop rule needs at least one level; allowed: {', '.join(WATCHED)}")
        for name, level in self.levels.items():
            if name not in WATCHED:
                close = difflib.get_close_matches(name, WATCHED, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"a stop rule may watch {', '.join(WATCHED)}; got {name!r}{hint}")
            if not (math.isfinite(level) and 0 < level <= 1):
                raise ValueError(f"the level of {name} must be above 0 and at most 1; got {level}")

    def crossed(self, rows: Sequence[Mapping[str, float]]) -> str | None:
        """What crossed its level after the last row, in words; ``None`` if nothing did.

        Args:
            rows: Metrics of all steps so far, in order.
        """
        *_, means = self._window_means(rows)
        for name, mean in means.items():
            if mean > self.levels[name]:
                level = self.levels[name]
                return f"{name} was {mean:.3f} over the last {WINDOW} steps, above its level of {level:g}"
        return None

    def is_best(self, rows: Sequence[Mapping[str, float]]) -> bool:
        """Whether the watched metrics stand lower after the last row than after any row before.

        Compared is the largest share of its level that any metric has reached.
        """
        *before, now = (
            max((mean / self.levels[name] for name, mean in means.items()), default=math.inf)
            for means in self._window_means(rows)
        )
        return now < min(before, default=math.inf)

    def _window_means(self, rows: Sequence[Mapping[str, float]]) -> Iterator[dict[str, float]]:
        """Mean over the window of every metric that fills it: before the first row, and after each; in linear time."""
        windows = {name: deque[float](maxlen=WINDOW) for name in self.levels}
        yield {}
        for row in rows:
            for name, window in windows.items():
                if name in row:
                    window.append(row[name])
            yield {
                name: math.fsum(window) / WINDOW for name, window in windows.items() if len(window) == WINDOW
            }
