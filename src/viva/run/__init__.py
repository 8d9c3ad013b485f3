"""The files of a run: folder, log, journal, checkpoints, trackers, export."""

__all__: list[str] = []
