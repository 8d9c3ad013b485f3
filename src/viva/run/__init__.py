"""The files of a run: folder, log, journal, checkpoints, trackers, export."""
