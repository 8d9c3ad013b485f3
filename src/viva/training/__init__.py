"""Rollouts, datums, updates, the training loop and its metrics."""

__all__: list[str] = []
