"""Damage of a run's logs, found by the digests that its checkpoints keep of them.

Every byte is read once: a check that goes on after the run has written more reads what is new. What was written after
the last checkpoint of a run that is not over has no digest yet, and is not judged.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from viva.conversation.messages import counted
from viva.run.files import CONFIG_FILE, INDEX, naming, parse_line
from viva.run.log import read_index

_BLOCK = 1 << 18
_REMEDY = (
    "Put it back from a copy; to use what is left as it is, delete checkpoints.jsonl in a copy of the folder"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Goal:
    """The state of one log at one checkpoint."""

    size: int
    digest: str
    next_step: int
    is_end: bool
    """Whether the run was complete."""


class _Progress:
    """Reading of one log."""

    def __init__(self) -> None:
        self.offset = 0
        self.lines = 0
        """Line breaks so far."""
        self.hash = hashlib.sha256()
        self.sound: list[_Goal] = []
        self.sound_lines = 0
        """Lines up to the last of these."""
        self.problem: str | None = None


class LogCheck:
    """Comparison of a run's logs, all that have digests or some by name, with its checkpoints, if it has any."""

    def __init__(self, folder: Path, names: tuple[str, ...] | None = None) -> None:
        self._folder = folder
        self._names = names
        self._version: tuple[int, int] | None = None
        self._goals: dict[str, list[_Goal]] = {}
        self._progress: dict[str, _Progress] = {}
        self._index_problem: str | None = None

    @property
    def problems(self) -> dict[str, str]:
        """Damage that was found so far, in words, by the file's name."""
        found = {INDEX: self._index_problem, **{name: each.problem for name, each in self._progress.items()}}
        return {name: problem for name, problem in found.items() if problem is not None}

    def advance(self) -> Iterator[None]:
        """Compare all that can be compared and was not yet; after every block that is read, the caller may stop."""
        self._read_index()
        for name, goals in self._goals.items():
            progress = self._progress.setdefault(name, _Progress())
            pending = [goal for goal in goals if goal not in progress.sound]
            if pending and pending[0].size < progress.offset:  # the run went back, and on from there
                progress = self._progress[name] = _Progress()
                pending = goals
            for goal in pending:
                if progress.problem is None:
                    yield from self._reach(name, progress, goal)

    def _reach(self, name: str, progress: _Progress, goal: _Goal) -> Iterator[None]:
        """Read up to a checkpoint's size and compare."""
        path = self._folder / name
        if progress.offset < goal.size and path.exists():
            with naming(path), path.open("rb") as file:
                file.seek(progress.offset)
                while block := file.read(min(_BLOCK, goal.size - progress.offset)):
                    progress.hash.update(block)
                    progress.offset += len(block)
                    progress.lines += block.count(b"\n")
                    yield
        if progress.hash.hexdigest() != goal.digest:
            where = _where(path, progress, goal)
            progress.problem = (
                f"{name} is damaged or was changed since step {goal.next_step}: {where}. {_REMEDY}"
            )
        elif goal.is_end and not _goes_on(path, goal):
            progress.problem = (
                f"{name} is damaged or was changed: the run was over after {counted(goal.next_step, 'step')}, and "
                f"what stands from line {progress.lines + 1} on is none of a later step. {_REMEDY}"
            )
        else:
            progress.sound.append(goal)
            progress.sound_lines = progress.lines

    def _read_index(self) -> None:
        """Read the checkpoints again if the run wrote others."""
        try:
            stat = (self._folder / INDEX).stat()
        except OSError:  # no checkpoint was written yet, or they were taken away
            self._version, self._goals, self._progress, self._index_problem = None, {}, {}, None
            return
        if self._version == (stat.st_mtime_ns, stat.st_size):
            return
        self._version = (stat.st_mtime_ns, stat.st_size)
        index = read_index(self._folder)
        goals: dict[str, set[_Goal]] = {}
        for _, one in index.checkpoints:
            for name, digest in one.log_digests.items():
                goal = _Goal(
                    size=one.log_sizes[name], digest=digest, next_step=one.next_step, is_end=one.final
                )
                goals.setdefault(name, set()).add(goal)
        problems = [f"line {number}: {text}" for number, text in sorted(index.damage.items())]
        if index.is_empty:
            problems.append("it is empty")
        if goals and not (self._folder / CONFIG_FILE).exists():
            problems.append(f"{CONFIG_FILE}, which stood beside it, is gone")
        self._index_problem = (
            f"{INDEX} is damaged, so the logs cannot be compared with it: {'; '.join(problems)}. {_REMEDY}"
            if problems
            else None
        )
        self._goals = {
            name: sorted(found, key=lambda goal: (goal.size, goal.next_step))
            for name, found in sorted(goals.items())
            if self._names is None or name in self._names
        }
        self._progress = {
            name: progress
            for name, progress in self._progress.items()
            if progress.problem is None and name in self._goals
        }


def _where(path: Path, progress: _Progress, goal: _Goal) -> str:
    """The place of the damage that keeps a log from a checkpoint's digest."""
    first = progress.sound_lines + 1
    if not path.exists():
        return "it is gone"
    torn = _unreadable(path, progress.sound[-1].size if progress.sound else 0, goal.size)
    if torn is not None:
        return f"line {progress.sound_lines + torn} cannot be read"
    if progress.offset < goal.size:
        return f"lines from line {progress.lines + 1} on are gone"
    last = max(progress.lines, first)
    where = f"line {first}" if first == last else f"one of the lines {first} to {last}"
    return f"{where} is not as it was written"


def check_log(folder: Path, name: str) -> None:
    """Compare one log with the run's checkpoints; a `ValueError` names file and line of what is damaged."""
    check = LogCheck(folder, (name,))
    for _ in check.advance():
        pass
    if check.problems:
        raise ValueError(f"{folder}: {'; '.join(check.problems.values())}.")


def _goes_on(path: Path, goal: _Goal) -> bool:
    """Whether nothing stands behind the end of a run, or a step that it was resumed for."""
    if not path.exists() or path.stat().st_size <= goal.size:
        return True
    with path.open("rb") as file:
        file.seek(goal.size)
        line = file.readline()
    step = (_row(line) or {}).get("step")
    return isinstance(step, int) and step >= goal.next_step


def _unreadable(path: Path, start: int, stop: int) -> int | None:
    """The first line between two bytes that is no JSON object, counted from 1; ``None`` if all are."""
    with path.open("rb") as file:
        file.seek(start)
        number = 0
        while file.tell() < stop and (line := file.readline()):
            number += 1
            if _row(line) is None:
                return number
    return None


def _row(line: bytes) -> dict[str, object] | None:
    """The JSON object of a line; ``None`` if it is none, or not UTF-8."""
    try:
        line.decode("utf-8")  # `parse_line` forgives what is no text
        return parse_line(line)
    except ValueError:
        return None
