"""Metrics to event files in the run's folder: ``tensorboard --logdir LOG_PATH``."""

from collections.abc import Mapping

from viva.run.trackers.base import TrackedRun

__all__ = ["FOLDER", "TensorBoard"]

FOLDER = "tensorboard"


class TensorBoard:
    """Writes scalars. TensorBoard hides the earlier values of the steps that a resumed run repeats."""

    takes_back = True

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # pyright: ignore[reportPrivateImportUsage]

        # also from step 0: a run that died before its first checkpoint has left steps that are repeated
        self._writer = SummaryWriter(str(run.folder / FOLDER), purge_step=run.next_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step, and see that it is on the disk."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, exit_code: int = 0) -> None:
        """Close the file, which has no place for how a run ended."""
        del exit_code
        self._writer.close()
