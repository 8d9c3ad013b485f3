"""Measuring a policy: direct accuracy, and the conversation's own metrics on held-out prompts."""

from viva.eval.answers import is_correct
from viva.eval.conversations import ConversationEvaluator
from viva.eval.direct import DirectEvaluator

__all__ = ["ConversationEvaluator", "DirectEvaluator", "is_correct"]
