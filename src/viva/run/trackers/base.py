"""What a tracker is, and what it is told about the run."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

__all__ = ["TrackedRun", "Tracker"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A run as trackers know it."""

    folder: Path
    run_id: str
    """Made when the run began; a resumed run has the same."""
    project: str
    run_name: str | None = None
    """Given by the user."""
    config: Mapping[str, Any]
    """The options of ``config.json``. Nothing else about program or machine is handed on."""
    next_step: int | None = 0
    """The step at which the run goes on, or begins; ``None`` if it has nothing left to do."""

    @property
    def name(self) -> str:
        """The given one, else the folder's."""
        return self.run_name or self.folder.resolve().name


class Tracker(Protocol):
    """Keeps metrics."""

    @property
    def takes_back(self) -> bool:
        """Whether it forgets, when it is opened for a resumed run, the steps that this run repeats."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep one step."""
        ...

    def close(self, exit_code: int = 0) -> None:
        """Write out what is pending.

        Args:
            exit_code: Of the process whose run this was; 0 if it is complete.
        """
        ...
