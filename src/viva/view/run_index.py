"""A run's files, indexed as they grow: metrics as columns, and of every conversation an entry with its place.

Nothing else of a run is held in memory; a conversation is read from the disk when somebody looks at it.
"""

import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from viva.view.entries import Entry, entry_of
from viva.view.lines import GrowingFile
from viva.view.log_check import LogCheck
from viva.view.run_files import (
    CONFIG_FILE,
    METRICS_FILE,
    TOKENS_FILE,
    Curves,
    metric_series,
    numbers,
    parse_line,
    transcripts_path,
)
from viva.view.series import Series
from viva.view.sources import kind_of, options_of

__all__ = ["RunIndex"]

_MEASURING = ("test/", "time/")
"""How metrics of an evaluation begin."""


class RunIndex:
    """One run, or a result of ``viva eval`` with its conversations. Not for several threads at once: the caller locks.

    Args:
        folder: The run's, or a result file, or a folder of results.

    Raises:
        ValueError: If it is none of these.
    """

    def __init__(self, folder: Path) -> None:
        self.kind = kind_of(folder)
        self.folder = folder
        self.config: dict[str, Any] = options_of(folder)
        self._config_time = self._time_of_config()
        self.damaged: dict[str, int] = {}
        """Lines that could not be read, by file; they are left out."""
        self._check = LogCheck(folder)
        self.entries: dict[tuple[int, int], Entry] = {}
        """By (step, group)."""
        self.generation = 0
        """Counts how often a file was cut back, so that a page knows when to forget what it has."""
        self.num_steps = 0
        """Steps that trained something; an evaluation after the last one is none."""
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self._tokens: dict[tuple[int, int], int] = {}
        self._metrics_file = GrowingFile(folder / METRICS_FILE)
        self._transcripts_file = GrowingFile(transcripts_path(folder))
        self._tokens_file = GrowingFile(folder / TOKENS_FILE)

    def refresh(self, budget_s: float) -> bool:
        """Read what is new and stop when the time is up: metrics first, conversations last, then their digests.

        Returns:
            Whether everything that the files hold was read.
        """
        deadline = time.monotonic() + budget_s
        self._refresh_config()
        parts: tuple[tuple[GrowingFile, Callable[[int, dict[str, Any]], None], Callable[[], None]], ...] = (
            (self._metrics_file, self._add_metrics, self._forget_metrics),
            (self._tokens_file, self._add_tokens, self._tokens.clear),
            (self._transcripts_file, self._add_transcript, self.entries.clear),
        )
        for file, add, forget in parts:
            name = file.path.name
            try:
                if file.was_cut_back():
                    forget()
                    self.damaged.pop(name, None)
                    self.generation += 1
                for offset, line in file.new_lines():
                    try:
                        add(offset, parse_line(line))
                    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError):
                        self.damaged[name] = self.damaged.get(name, 0) + 1
                    if time.monotonic() > deadline:
                        return False
            except OSError:  # not allowed, or gone meanwhile: nobody may wait for it
                self.damaged.setdefault(name, 1)
        try:
            return self._check.advance(max(0.0, deadline - time.monotonic()))
        except OSError:
            return True

    @property
    def problems(self) -> list[str]:
        """Files that are not as the run's checkpoints remember them, in words."""
        return list(self._check.problems.values())

    @property
    def version(self) -> str:
        """Changes whenever there is something new."""
        files = (self._metrics_file, self._transcripts_file, self._tokens_file)
        numbers_of_files = (self.generation, self._config_time, *(file.offset for file in files))
        return ".".join(str(number) for number in numbers_of_files)

    @property
    def progress(self) -> float:
        """Share of the transcripts that was read, in bytes."""
        size = self._transcripts_file.size
        return min(1.0, self._transcripts_file.offset / size) if size else 1.0

    @property
    def metrics(self) -> list[str]:
        """Names of all metrics."""
        return list(self._columns)

    def series(self, key: str) -> Series | None:
        """A metric as a curve, with its 95 % band where there is one; ``None`` if the run does not have it."""
        if key not in self._columns:
            return None
        curves: Curves = {
            name: tuple(zip(*self._columns[name], strict=True))
            for name in (key, f"{key}_stderr")
            if name in self._columns
        }
        return metric_series(curves, key, name=key)

    def transcript(self, step: int, group: int) -> dict[str, Any] | None:
        """One conversation as it stands in the file; ``None`` if there is none."""
        entry = self.entries.get((step, group))
        return None if entry is None else parse_line(self._transcripts_file.line_at(entry.offset))

    def tokens(self, step: int, group: int) -> dict[str, Any] | None:
        """The tokens of one conversation as they stand in the file; ``None`` if they were not kept."""
        offset = self._tokens.get((step, group))
        return None if offset is None else parse_line(self._tokens_file.line_at(offset))

    def has_tokens(self, step: int, group: int) -> bool:
        """Whether the tokens of a conversation were kept."""
        return (step, group) in self._tokens

    def _time_of_config(self) -> int:
        try:
            return (self.folder / CONFIG_FILE).stat().st_mtime_ns
        except OSError:  # there is none, or none any more
            return 0

    def _refresh_config(self) -> None:
        """Read the options again if the file is another one: a run may be resumed with others."""
        if (changed := self._time_of_config()) == self._config_time:
            return
        self._config_time = changed
        try:
            self.config = options_of(self.folder)
            self.damaged.pop(CONFIG_FILE, None)
        except (OSError, ValueError):
            self.damaged[CONFIG_FILE] = 1

    def _add_metrics(self, _: int, row: dict[str, Any]) -> None:
        step = row["step"]
        if not isinstance(step, int) or isinstance(step, bool) or step.bit_length() > 63:
            raise TypeError(f"a step is a whole number; got {step!r}")
        values_of_step = numbers(row)
        for key, value in values_of_step.items():
            steps, values = self._columns.setdefault(key, (array("q"), array("d")))
            if steps and step < steps[-1]:
                continue  # a curve is a function of the step, and steps only rise
            if steps and step == steps[-1]:
                values[-1] = value
            else:
                steps.append(step)
                values.append(value)
        if any(not key.startswith(_MEASURING) for key in values_of_step):
            self.num_steps = max(self.num_steps, step + 1)

    def _forget_metrics(self) -> None:
        self.num_steps = 0
        self._columns.clear()

    def _add_transcript(self, offset: int, row: dict[str, Any]) -> None:
        entry = entry_of(offset, row)
        self.entries[entry.step, entry.group] = entry

    def _add_tokens(self, offset: int, row: dict[str, Any]) -> None:
        self._tokens[int(row["step"]), int(row["group"])] = offset
