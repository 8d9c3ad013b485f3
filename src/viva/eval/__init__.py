"""Measuring a policy: direct answers, conversations, and what two checkpoints differ in.

The names are imported on first use, so that reading stored figures does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from viva.eval.answers import is_correct
    from viva.eval.conversations import ConversationEvaluator
    from viva.eval.direct import DirectEvaluator

__all__ = ["ConversationEvaluator", "DirectEvaluator", "is_correct"]

_HOME = {
    "ConversationEvaluator": "viva.eval.conversations",
    "DirectEvaluator": "viva.eval.direct",
    "is_correct": "viva.eval.answers",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
