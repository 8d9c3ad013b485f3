"""Scores become rewards, rewards become per-token advantages."""

from viva.credit.group import group_advantages
from viva.credit.spans import token_ranges
from viva.credit.streams import GroupCredit, SpanCredit, stream_advantages

__all__ = ["GroupCredit", "SpanCredit", "group_advantages", "stream_advantages", "token_ranges"]
