"""Scores become rewards, rewards become per-token advantages."""

from viva.credit.group import group_advantages

__all__ = ["group_advantages"]
