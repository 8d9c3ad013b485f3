"""A run's files, indexed as they grow: metrics as columns, and of every conversation an entry with its place.

Nothing else of a run is held in memory; a conversation is read from the disk when somebody looks at it. A line that
cannot be read is left out and named; a last line that is torn, since the run was stopped while it wrote, is left out.
"""

import contextlib
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from viva.judging.records import Transcript
from viva.run.files import CONFIG_FILE, METRICS_FILE, TOKENS_FILE, parse_line
from viva.view.entries import Entry, entry_of
from viva.view.files import GrowingFile, Row, kind_of, numbers, options_of, transcripts_path
from viva.view.log_check import LogCheck

Z95 = 1.959963984540054
"""Half-width of a 95 % interval in standard errors (normal approximation)."""

_MEASURING = ("test/", "time/")
"""Beginning of an evaluation's metrics."""

_MAX_PROBLEMS = 20
"""Damaged lines of a file that are named; the others are counted."""

_SLICE_S = 0.02
_PAUSE_S = 0.001
"""A lock that is taken again at once is hardly ever given to those who wait for it."""
_WAIT_S = 0.1
"""Wait of a request, so that of a small run the first answer is the whole one."""

_Add = Callable[[str, int, Row], None]


class RunIndex:
    """One run, or a result of ``viva eval`` with its conversations. Not for several threads at once: the caller locks.

    Raises:
        ValueError: If the path is no run's folder, result file, or folder of results.
    """

    def __init__(self, folder: Path) -> None:
        self.kind = kind_of(folder)
        self.folder = folder
        self.config = options_of(folder)
        self._config_time = self._time_of_config()
        self.damaged: dict[str, int] = {}
        """Lines that could not be read, by file; they are left out."""
        self._damage: dict[str, list[str]] = {}
        self.torn: list[str] = []
        """Files whose last line is torn; known after `finish`."""
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
        self._parts: tuple[tuple[GrowingFile, _Add, Callable[[], None]], ...] = (
            (self._metrics_file, self._add_metrics, self._forget_metrics),
            (self._tokens_file, self._add_tokens, self._tokens.clear),
            (self._transcripts_file, self._add_transcript, self.entries.clear),
        )

    def refresh(self, budget_s: float) -> bool:
        """Read what is new until the time is up: metrics, tokens, conversations, then digests; whether all was read."""
        deadline = time.monotonic() + budget_s
        return all(time.monotonic() <= deadline for _ in self._read_new())

    def finish(self) -> None:
        """Read a run that is not watched to the end, torn last lines included; `OSError` if a file cannot be read."""
        for _ in self._read_new():
            pass
        for file, add, _ in self._parts:
            line = file.rest()
            try:  # whole but for its line break
                self._add(f"{file.path}:{file.num_lines + 1}", add, file.offset, line)
            except ValueError:
                self.torn.append(file.path.name)

    def _read_new(self) -> Iterator[None]:
        """Read what is new; after every line and block, the caller may stop, and go on later."""
        self._refresh_config()
        for file, add, forget in self._parts:
            name = file.path.name
            try:
                if file.was_cut_back():
                    forget()
                    self.damaged.pop(name, None)
                    self._damage.pop(name, None)
                    self.generation += 1
                for offset, line in file.new_lines():
                    try:
                        self._add(f"{file.path}:{file.num_lines}", add, offset, line)
                    except ValueError as error:
                        self._note_damage(file, error)
                    yield
            except OSError:  # not allowed, or gone meanwhile: nobody may wait for it
                self.damaged.setdefault(name, 1)
        with contextlib.suppress(OSError):
            yield from self._check.advance()

    def _add(self, where: str, add: _Add, offset: int, line: bytes) -> None:
        if not line.strip():
            return
        try:
            add(where, offset, parse_line(line))
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ValueError(text if text.startswith(where) else f"{where}: {text}") from error

    def _note_damage(self, file: GrowingFile, error: ValueError) -> None:
        name = file.path.name
        self.damaged[name] = self.damaged.get(name, 0) + 1
        if self.damaged[name] <= _MAX_PROBLEMS:
            self._damage.setdefault(name, []).append(str(error))

    @property
    def problems(self) -> list[str]:
        """Files that are not as the run's checkpoints remember them, and lines that cannot be read, in words."""
        more = [
            f"{name}: {self.damaged[name] - _MAX_PROBLEMS:,} more lines cannot be read"
            for name in self._damage
            if self.damaged[name] > _MAX_PROBLEMS
        ]
        lines = [problem for found in self._damage.values() for problem in found]
        return [*self._check.problems.values(), *lines, *more]

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

    def points(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of a metric with rising steps; none if the run does not have it."""
        return list(zip(*self._columns[key], strict=True)) if key in self._columns else []

    def half_widths(self, key: str) -> dict[int, float]:
        """Half-width of a metric's 95 % interval by step, where its standard error was recorded."""
        return {step: Z95 * error for step, error in self.points(f"{key}_stderr")}

    def transcript(self, step: int, group: int) -> Row | None:
        """One conversation as it stands in the file; ``None`` if there is none."""
        entry = self.entries.get((step, group))
        return None if entry is None else parse_line(self._transcripts_file.line_at(entry.offset))

    def tokens(self, step: int, group: int) -> Row | None:
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

    def _add_metrics(self, _where: str, _offset: int, row: Row) -> None:
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or step.bit_length() > 63:
            raise ValueError(f"every line needs a whole number under 'step'; got {str(step)[:60]!r}")
        values_of_step = numbers(row)
        for key, value in values_of_step.items():
            steps, values = self._columns.setdefault(key, (array("q"), array("d")))
            at = bisect_left(steps, step) if steps and step <= steps[-1] else len(steps)
            if at < len(steps) and steps[at] == step:
                values[at] = value
            else:
                steps.insert(at, step)
                values.insert(at, value)
        if any(not key.startswith(_MEASURING) for key in values_of_step):
            self.num_steps = max(self.num_steps, step + 1)

    def _forget_metrics(self) -> None:
        self.num_steps = 0
        self._columns.clear()

    def _add_transcript(self, where: str, offset: int, row: Row) -> None:
        try:
            entry = entry_of(offset, Transcript.parse(where, row))
        except LookupError as error:
            raise ValueError(f"not a transcript: {error}") from error
        self.entries[entry.step, entry.group] = entry

    def _add_tokens(self, _where: str, offset: int, row: Row) -> None:
        step, group = row.get("step"), row.get("group")
        if not isinstance(step, int) or not isinstance(group, int):
            raise ValueError("not the tokens of a group: it needs whole numbers under 'step' and 'group'")
        self._tokens[step, group] = offset


def read_run(source: str | Path) -> RunIndex:
    """The index of a run, or of a result of ``viva eval``, read to its end.

    Raises:
        ValueError: If it is neither, or its ``config.json`` is damaged; damaged lines are in `RunIndex.problems`.
    """
    run = RunIndex(Path(source))
    if run.kind == "run" and not (run.folder / METRICS_FILE).is_file():
        raise ValueError(
            f"{str(source)!r} has no metrics.jsonl. Give the folder of a run: what was its log_path."
        )
    run.finish()
    return run


class IndexReader:
    """Keeps indexes, behind their lock, up to date while somebody asks, in slices so short that nobody waits long."""

    def __init__(self, runs: Sequence[RunIndex], lock: threading.Lock) -> None:
        self._runs = runs
        self._lock = lock
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._unread = list(runs)

    def go_on(self) -> None:
        """Look for what is new, unless that is under way, and wait a moment for it."""
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._unread = list(self._runs)
                self._thread = threading.Thread(target=self._read, daemon=True)
                self._thread.start()
            thread = self._thread
        thread.join(_WAIT_S)

    def is_complete(self, run: RunIndex) -> bool:
        """Whether all of a run was read that was there when it was last looked at."""
        return all(run is not each for each in self._unread)

    def wait_for(self, run: RunIndex, step: int, group: int) -> None:
        """Wait until a conversation was read, or all was: a link to it may be the first thing that is asked for."""
        while (step, group) not in run.entries and not self.is_complete(run):
            self.go_on()

    def _read(self) -> None:
        while self._unread:
            with self._lock:
                if self._unread[0].refresh(_SLICE_S):
                    del self._unread[0]
            time.sleep(_PAUSE_S)
