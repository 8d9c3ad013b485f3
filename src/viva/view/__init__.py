"""A run as a local web page: curves, conversations, credit on tokens and verdicts, live from the run's own files."""
