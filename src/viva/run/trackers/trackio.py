"""Metrics to Trackio: a local data base that ``trackio show`` opens, or what its environment variables name."""

from collections.abc import Mapping
from typing import Any

from viva.run.trackers.base import TrackedRun

__all__ = ["Trackio"]


class Trackio:
    """Logs to one Trackio run; a resumed run goes on in the same one."""

    takes_back = False

    def __init__(self, run: TrackedRun) -> None:
        import trackio  # pyright: ignore[reportMissingImports] - an optional extra

        self._run: Any = trackio.init(
            project=run.project,
            # runs are told apart by their names alone, and folders of different runs may have one name
            name=f"{run.name}-{run.run_id}",
            config=dict(run.config),
            resume="allow",
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep one step."""
        self._run.log(dict(metrics), step=step)

    def close(self, exit_code: int = 0) -> None:
        """Write out what is pending; Trackio does not keep how a run ended."""
        del exit_code
        self._run.finish()
