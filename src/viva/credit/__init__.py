"""Scores become rewards, rewards become per-token advantages."""

from viva.credit.group import group_advantages
from viva.credit.review import ReviewScores, ReviewVotes, score_review
from viva.credit.review_rules import PRESETS, ReviewRules, review_rules
from viva.credit.spans import token_ranges
from viva.credit.streams import GroupCredit, SpanCredit, stream_advantages

__all__ = [
    "PRESETS",
    "GroupCredit",
    "ReviewRules",
    "ReviewScores",
    "ReviewVotes",
    "SpanCredit",
    "group_advantages",
    "review_rules",
    "score_review",
    "stream_advantages",
    "token_ranges",
]
