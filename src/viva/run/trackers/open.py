"""Open a run's trackers, so that each of them gets every step once.

A run that is resumed repeats the steps since its last checkpoint, with the same results. What a tracker has been given
is kept in ``trackers.json``: it is not given the same step again, unless it takes back what is repeated; and one that
missed steps (it was added later, or the run was killed at a bad moment) is given them from ``metrics.jsonl``.
"""

import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from viva.run.files import read_json, write_json
from viva.run.folder import RunFolder
from viva.run.trackers.base import TrackedRun, Tracker
from viva.run.trackers.choice import CONSOLE, TrackerChoice
from viva.run.written import note_written

__all__ = ["MEMORY", "OpenTracker", "open_trackers"]

MEMORY = "trackers.json"

_REFUSED = 2
"""Exit code of a run that cannot begin."""
_IN_FOLDER = ("tensorboard", "wandb")
"""Trackers that keep files in a folder of the run's, which has their name."""


class _Memory:
    """``trackers.json``: the run's id for trackers, and which step each of them is to get next."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / MEMORY
        stored: dict[str, Any] = read_json(self._path) if self._path.exists() else {}
        # an identity, no result: two runs of equal options must not meet in one data base
        self.run_id: str = stored.get("run_id") or secrets.token_hex(4)
        self._next_steps: dict[str, int] = stored.get("next_steps", {})
        # before a tracker sees the id: a run that dies before its first step goes on under the same one
        self._write()

    def next_step(self, name: str) -> int:
        return self._next_steps.get(name, 0)

    def remember(self, name: str, next_step: int) -> None:
        self._next_steps[name] = max(next_step, self.next_step(name))
        self._write()

    def _write(self) -> None:
        content = {"run_id": self.run_id, "next_steps": dict(sorted(self._next_steps.items()))}
        write_json(self._path, content)


class OpenTracker:
    """A tracker with a memory; a `viva.training.loop.MetricSink`."""

    def __init__(self, name: str, tracker: Tracker, memory: _Memory) -> None:
        self._name = name
        self._tracker = tracker
        self._memory = memory

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand on one step, if the tracker does not have it."""
        if self._tracker.takes_back or step >= self._memory.next_step(self._name):
            self._tracker.log(step, metrics)
            self._memory.remember(self._name, step + 1)

    def catch_up(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Hand on what was missed of the steps that are over."""
        missed_from = self._memory.next_step(self._name)
        for row in rows:
            step = int(row["step"])
            if step >= missed_from:
                self(step, {name: value for name, value in row.items() if name != "step"})

    def close(self, exit_code: int = 0) -> None:
        """Write out what is pending, and tell how the run ended."""
        self._tracker.close(exit_code)


def open_trackers(
    choices: Sequence[TrackerChoice], folder: RunFolder, *, next_step: int | None = 0
) -> tuple[OpenTracker, ...]:
    """Open all trackers but the console, and let them catch up with the run's log.

    Args:
        choices: From `viva.run.trackers.choice.choose_trackers`.
        folder: The run's, its log cut back to where the run goes on.
        next_step: The step at which the run goes on, or begins; ``None`` if it has nothing left to do.

    Raises:
        ValueError: If a tracker cannot start.
    """
    chosen = [choice for choice in choices if choice.name != CONSOLE]
    if not chosen:
        return ()
    memory = _Memory(folder.path)
    config = read_json(folder.path / "config.json")
    opened: list[OpenTracker] = []
    with ExitStack() as cleanup:
        for choice in chosen:
            run = TrackedRun(
                folder=folder.path,
                run_id=memory.run_id,
                project=choice.project,
                run_name=choice.run_name,
                config=config,
                next_step=next_step,
            )
            place = folder.path / choice.name
            if choice.name in _IN_FOLDER and not place.exists():
                note_written([place], as_folder=True)
            tracker = OpenTracker(choice.name, _open(choice.name, run), memory)
            cleanup.callback(tracker.close, _REFUSED)
            tracker.catch_up(folder.log.metrics())
            opened.append(tracker)
        cleanup.pop_all()
    return tuple(opened)


def _open(name: str, run: TrackedRun) -> Tracker:
    """Start a tracker.

    Raises:
        ValueError: If it cannot start.
    """
    try:
        return _start(name, run)
    except (OSError, RuntimeError, httpx.HTTPError) as error:
        raise ValueError(
            f"trackers={name} cannot start: {type(error).__name__}: {error}. See to it, or leave it out of trackers."
        ) from error


def _start(name: str, run: TrackedRun) -> Tracker:
    if name == "tensorboard":
        from viva.run.trackers.tensorboard import TensorBoard

        return TensorBoard(run)
    if name == "trackio":
        from viva.run.trackers.trackio import Trackio

        return Trackio(run)
    from viva.run.trackers.wandb import WeightsAndBiases

    return WeightsAndBiases(run)
