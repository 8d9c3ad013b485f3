"""Text of models and users made safe and readable inside HTML.

Nothing that comes from a file reaches the page except through `escape` (or a function that calls it).
"""

import html
import math

from viva.run.secrets import printable, without_secrets

__all__ = [
    "MAX_TEXT_CHARS",
    "card",
    "clip",
    "data",
    "escape",
    "format_number",
    "mark",
    "text_block",
    "visible",
]

MAX_TEXT_CHARS = 6000
"""Longer texts lose their middle; the page says how much."""

_KEPT_HEAD = 4500
_KEPT_TAIL = 1000


def escape(text: str) -> str:
    """Text as HTML that shows it and does nothing else.

    Markup characters (both quotes among them) become entities; control characters, characters that change
    the writing direction and halves of surrogate pairs become visible signs.
    """
    return html.escape(visible(text), quote=True)


def visible(text: str) -> str:
    """Text without credentials whose control characters and the like are visible signs; markup stays what it is."""
    return printable(text)


def clip(text: str) -> tuple[str, int, str]:
    """Head of a text, number of characters left out after it, and tail; a short text is all head.

    Credentials are hidden here: half of one would not be known.
    """
    text = without_secrets(text)
    if len(text) <= MAX_TEXT_CHARS:
        return text, 0, ""
    return text[:_KEPT_HEAD], len(text) - _KEPT_HEAD - _KEPT_TAIL, text[-_KEPT_TAIL:]


def text_block(text: str) -> str:
    """A text of any length as a ``<pre>`` block; the middle of a long one is left out, with its length."""
    head, left_out, tail = clip(text)
    cut = f'<span class="cut">[{left_out:,} characters left out]</span>' if left_out else ""
    return f"<pre>{escape(head)}{cut}{escape(tail)}</pre>"


def format_number(value: float) -> str:
    """A number for people: four significant digits, no needless zeros."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        digits = 0 if float(value).is_integer() else max(0, 3 - math.floor(math.log10(abs(value))))
        text = f"{value:,.{digits}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    if abs(value) >= 1e5 and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def data(value: float, text: str | None = None) -> str:
    """A number with its exact value in the markup, shown as ``text``."""
    shown = format_number(value) if text is None else text
    return f'<data value="{value!r}">{escape(shown)}</data>'


def mark(is_right: bool) -> str:
    """Right or wrong, for the eye and for a screen reader."""
    return (
        '<span class="mark right">\u2713 right</span>'
        if is_right
        else '<span class="mark wrong">\u2717 wrong</span>'
    )


def card(title: str, value: str, below: str = "") -> str:
    """A number with its name; value and what stands below are HTML."""
    return (
        f'<div class="card"><p class="name">{escape(title)}</p><p class="value">{value}</p>'
        f'<p class="muted">{below}</p></div>'
    )
