"""Metrics to Weights & Biases. ``WANDB_MODE=offline`` keeps them in the run's folder for ``wandb sync``."""

import sys
from collections.abc import Mapping
from typing import Any

from viva.run.trackers.base import TrackedRun

__all__ = ["WeightsAndBiases"]


class WeightsAndBiases:
    """Logs to one W&B run; a resumed run goes on in the same one.

    Only options and metrics are sent: no source code, console text, package list, host name or machine statistics.

    Raises:
        ValueError: If the package refuses to start, as without a login.
    """

    takes_back = False

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # pyright: ignore[reportMissingImports] - an optional extra

        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            host="undisclosed",
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        told_by = sys.excepthook
        try:
            self._run: Any = wandb.init(
                project=run.project,
                name=run.name,
                id=run.run_id,
                resume="allow",
                config=dict(run.config),
                dir=str(run.folder),
                settings=settings,
            )
        except wandb.Error as error:
            raise ValueError(
                f"trackers=wandb cannot start: {error} Log in with 'wandb login', or set WANDB_MODE=offline."
            ) from error
        finally:
            # that of wandb prints tracebacks with the secrets in them; `close` tells it the exit code
            sys.excepthook = told_by

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one step."""
        self._run.log(dict(metrics), step=step)

    def close(self, exit_code: int = 0) -> None:
        """Send what is pending and end the W&B run; with another exit code than 0 it is shown as failed."""
        self._run.finish(exit_code=exit_code)
