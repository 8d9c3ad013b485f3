"""Rollouts, datums, updates, the training loop and its metrics."""
