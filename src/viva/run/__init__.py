"""What a run keeps on disk: folder, log, journal, checkpoints, trackers, export."""

__all__: list[str] = []
