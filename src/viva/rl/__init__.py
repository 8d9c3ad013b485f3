"""Rollouts, datums, the training loop, checkpoints and metrics."""

__all__: list[str] = []
