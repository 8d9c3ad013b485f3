"""Rewards of the bench that have no name in the package."""

from viva.rewards import serl

JUDGED = serl(length_band=None)
"""Copeland scores by the policy's own label probabilities, without control of length."""
