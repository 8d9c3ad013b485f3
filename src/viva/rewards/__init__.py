"""Scores become rewards, rewards become per-token advantages."""

from viva.rewards.group import group_advantages
from viva.rewards.review import ReviewScores, ReviewVotes, score_review
from viva.rewards.review_rules import PRESETS, ReviewRules, review_rules
from viva.rewards.spans import token_ranges
from viva.rewards.streams import GroupCredit, SpanCredit, stream_advantages

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
