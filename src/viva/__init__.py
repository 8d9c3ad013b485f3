"""Viva: train language models by letting them argue, judge one another and learn from better versions of themselves."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from viva import rewards
    from viva.api import Run, evaluate, load_run, screen, train, train_async
    from viva.conversation.protocol import Protocol, Round, Segment, Sight, View
    from viva.conversation.records import Conversation
    from viva.conversation.tools import Tool
    from viva.recipes import FailedRunError

__all__ = [
    "Conversation",
    "FailedRunError",
    "Protocol",
    "Round",
    "Run",
    "Segment",
    "Sight",
    "Tool",
    "View",
    "__version__",
    "evaluate",
    "load_run",
    "rewards",
    "screen",
    "train",
    "train_async",
]

__version__ = "0.1.0"

_PLACES = {
    "viva.api": ("Run", "evaluate", "load_run", "screen", "train", "train_async"),
    "viva.conversation.protocol": ("Protocol", "Round", "Segment", "Sight", "View"),
    "viva.conversation.records": ("Conversation",),
    "viva.conversation.tools": ("Tool",),
    "viva.recipes": ("FailedRunError",),
}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first asked for: ``import viva`` alone is quick."""
    if name == "rewards":
        return import_module("viva.rewards")
    for place, names in _PLACES.items():
        if name in names:
            return getattr(import_module(place), name)
    raise AttributeError(f"module 'viva' has no attribute {name!r}; public names: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
