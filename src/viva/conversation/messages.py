"""Words of messages to users: a name that may be meant in place of an unknown one."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question behind a full stop, with the known name that is nearest; empty where none is near."""
    close = get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def unknown(noun: str, name: str, allowed: Iterable[str], *, also: str = "") -> str:
    """A sentence about a name that is none of the allowed ones; `also` continues their list."""
    names = list(allowed)
    return f"unknown {noun} {name!r}; allowed: {', '.join(names)}{also}.{did_you_mean(name, names)}"
