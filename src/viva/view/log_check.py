"""Damage of a run's logs, found by the digests that its checkpoints keep of them.

Every byte is read once: a check that goes on after the run has written more reads what is new. What was written after
the last checkpoint of a run that is not over has no digest yet, and is not judged.
"""

import hashlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from viva.conversation.protocol import counted
from viva.run.files import naming
from viva.run.log import INDEX, read_index

_CONFIG = "config.json"
_BLOCK = 1 << 18
_REMEDY = (
    "Put it back from a copy; to use what is left as it is, delete checkpoints.jsonl in a copy of the folder"
)


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Goal:
    """The state of one log at one checkpoint."""

    size: int
    digest: str
    next_step: int
    is_end: bool
    """Whether the run was complete."""


@dataclass(slots=True, kw_only=True)
class _Progress:
    """Reading of one log."""

    offset: int = 0
    lines: int = 0
    """Line breaks so far."""
    hash: _Hash = field(default_factory=hashlib.sha256)
    sound: list[_Goal] = field(default_factory=list[_Goal])
    sound_lines: int = 0
    """Lines up to the last of these."""
    problem: str | None = None


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
        found = {
            name: progress.problem
            for name, progress in self._progress.items()
            if progress.problem is not None
        }
        return found if self._index_problem is None else {INDEX: self._index_problem, **found}

    def advance(self, budget_s: float | None = None) -> bool:
        """Read what was not read yet until the time is up; whether all was compared that can be."""
        deadline = None if budget_s is None else time.monotonic() + budget_s
        self._read_index()
        for name, goals in self._goals.items():
            progress = self._progress.setdefault(name, _Progress())
            pending = [goal for goal in goals if goal not in progress.sound]
            if progress.problem is not None:
                continue
            if pending and pending[0].size < progress.offset:  # the run went back, and on from there
                progress = self._progress[name] = _Progress()
                pending = goals
            for goal in pending:
                if not self._reach(name, progress, goal, deadline):
                    return False
                if progress.problem is not None:
                    break
        return True

    def _reach(self, name: str, progress: _Progress, goal: _Goal, deadline: float | None) -> bool:
        """Read up to a checkpoint's size and compare; ``False`` if the time is up before."""
        path = self._folder / name
        if progress.offset < goal.size and path.exists():
            with naming(path), path.open("rb") as file:
                file.seek(progress.offset)
                while block := file.read(min(_BLOCK, goal.size - progress.offset)):
                    progress.hash.update(block)
                    progress.offset += len(block)
                    progress.lines += block.count(b"\n")
                    if deadline is not None and time.monotonic() > deadline:
                        return False
        if progress.hash.hexdigest() != goal.digest:
            progress.problem = self._told(name, progress, goal)
        elif goal.is_end and not _goes_on(path, goal):
            progress.problem = (
                f"{name} is damaged or was changed: the run was over after {counted(goal.next_step, 'step')}, and "
                f"what stands from line {progress.lines + 1} on is none of a later step. {_REMEDY}"
            )
        else:
            progress.sound.append(goal)
            progress.sound_lines = progress.lines
        return True

    def _told(self, name: str, progress: _Progress, goal: _Goal) -> str:
        path, first = self._folder / name, progress.sound_lines + 1
        start = progress.sound[-1].size if progress.sound else 0
        if not path.exists():
            where = "it is gone"
        else:
            torn = _unreadable(path, start, goal.size)
            if torn is not None:
                where = f"line {progress.sound_lines + torn} cannot be read"
            elif progress.offset < goal.size:
                where = f"lines from line {progress.lines + 1} on are gone"
            else:
                last = max(progress.lines, first)
                where = f"line {first}" if first == last else f"one of the lines {first} to {last}"
                where += " is not as it was written"
        return f"{name} is damaged or was changed since step {goal.next_step}: {where}. {_REMEDY}"

    def _read_index(self) -> None:
        """Read the checkpoints again if the run wrote others."""
        path = self._folder / INDEX
        try:
            stat = path.stat()
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
        if goals and not (self._folder / _CONFIG).exists():
            problems.append(f"{_CONFIG}, which stood beside it, is gone")
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


def check_log(folder: Path, name: str) -> None:
    """Compare one log with the run's checkpoints; a `ValueError` names file and line of what is damaged."""
    check = LogCheck(folder, (name,))
    check.advance()
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


def _row(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; ``None`` if it is none, or not UTF-8."""
    try:
        row: object = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", row) if isinstance(row, dict) else None
