"""The log files of a run, and the rule that stops it when the reward has left the truth.

``metrics.jsonl``, ``transcripts.jsonl`` and, if it keeps any, samples and tokens are append-only. A checkpoint records
how long they were, and a resumed run cuts them back to that, so that they never hold a step twice. Everything that
depends on the clock has a key under ``time/``; all other metrics are equal in two runs with the same seed. No line
holds a credential (`viva.run.secrets`): these files are for people, and nothing is trained from them.
"""

import difflib
import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from viva.run.files import naming, read_json_lines
from viva.run.secrets import redacted

_FILES = ("metrics.jsonl", "transcripts.jsonl", "samples.jsonl", "tokens.jsonl")


class RunLog:
    """The log files of a run folder."""

    def __init__(self, folder: Path) -> None:
        self._paths = {name: folder / name for name in _FILES}

    def sizes(self) -> dict[str, int]:
        """Bytes of each file, flushed to the disk."""
        return {name: _synced_size(path) for name, path in self._paths.items()}

    def cut_back(self, sizes: Mapping[str, int]) -> None:
        """Drop everything after a checkpoint.

        Raises:
            ValueError: If a file is shorter than it was at the checkpoint.
        """
        for name, path in self._paths.items():
            size, wanted = path.stat().st_size if path.exists() else 0, sizes.get(name, 0)
            if size < wanted:
                raise ValueError(
                    f"{path} has {size} bytes, fewer than the {wanted} it had at the checkpoint; "
                    "it was changed since. Start anew with behavior_if_exists=delete, or put the file back."
                )
            if size > wanted:
                os.truncate(path, wanted)

    def write_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        transcripts: Iterable[Mapping[str, Any]] = (),
        samples: Iterable[Mapping[str, Any]] = (),
        tokens: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        """Append one step. Keys are sorted, so equal metrics are equal bytes.

        Raises:
            FloatingPointError: If a metric is not a finite number; nothing is written.
        """
        wrong = {name: value for name, value in sorted(metrics.items()) if not math.isfinite(value)}
        if wrong:
            raise FloatingPointError(f"metrics of step {step} must be finite numbers; got {wrong}")
        self._append("transcripts.jsonl", transcripts)
        self._append("samples.jsonl", samples)
        self._append("tokens.jsonl", tokens)
        self._append("metrics.jsonl", [{"step": step, **dict(sorted(metrics.items()))}])

    def metrics(self) -> list[dict[str, float]]:
        """All logged steps, in order."""
        return list(read_json_lines(self._paths["metrics.jsonl"]))

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        lines = [json.dumps(redacted(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
        if lines:
            path = self._paths[name]
            with naming(path), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write("".join(lines))


def _synced_size(path: Path) -> int:
    if not path.exists():
        return 0
    with naming(path), path.open("ab") as file:
        os.fsync(file.fileno())
        return file.tell()


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
        """The message of what crossed its level after the last row; ``None`` if nothing did.

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
