"""Words for users: names that may be meant, lists, numbers with their nouns, and tables for the terminal."""

import textwrap
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_LONGEST_LIST = 300
"""Characters."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question behind a full stop, with the known name that is nearest; empty where none is near."""
    close = get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def unknown(noun: str, name: str, allowed: Iterable[str], *, also: str = "") -> str:
    """A sentence about a name that is none of the allowed ones; `also` continues their list."""
    names = list(allowed)
    return f"unknown {noun} {name!r}; allowed: {', '.join(names)}{also}.{did_you_mean(name, names)}"


def listed(names: Iterable[str]) -> str:
    """Names for a message, cut where they are too many."""
    return textwrap.shorten(", ".join(names), _LONGEST_LIST, placeholder=" ...") or "none"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun, which stands in the plural for everything but 1.

    ``plural`` is needed where it is not the noun with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def text_table(rows: Sequence[tuple[str, ...]], *, is_text: bool = False) -> list[str]:
    """Lines of a table for the terminal; all columns but the first stand to the right, unless they are text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place and not is_text else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
