"""Ready-made training runs: ``viva train RECIPE key=value ...`` runs one; and the errors that end a run."""


class RefusedRunError(ValueError):
    """A run that cannot begin: a mistake in its options, or an engine that refuses them. Nothing was computed."""


class FailedRunError(RuntimeError):
    """A run that ended with an error after it had begun; the message says how to go on."""
