"""Viva: train language models by letting them argue, judge one another and learn from better versions of themselves."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from viva import rewards
    from viva.conversation.protocol import Protocol, Round, Segment, Sight, View

__all__ = ["Protocol", "Round", "Segment", "Sight", "View", "__version__", "rewards"]

__version__ = "0.1.0"

_PLACES = {
    "Protocol": "viva.conversation.protocol",
    "Round": "viva.conversation.protocol",
    "Segment": "viva.conversation.protocol",
    "Sight": "viva.conversation.protocol",
    "View": "viva.conversation.protocol",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first asked for: ``import viva`` alone is quick."""
    if name == "rewards":
        return import_module("viva.rewards")
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'viva' has no attribute {name!r}; public names: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
