"""Whether two short answers are the same mathematical expression, by math-verify (which asks sympy).

math-verify is made for whole solutions of well-behaved models. Here it gets short final answers only, and what a policy
in training may write is looked at first: its patterns and sympy's simplification can take minutes on a few
characters, it reads words as products of letters (``apples`` equals ``elppas``), and of an equation it takes one
side (``10=9`` equals 9).
"""

import re
import threading
from typing import Any, cast

__all__ = ["MAX_LENGTH", "same_expression"]

MAX_LENGTH = 200
"""Characters; longer answers are compared as text only."""

_SECONDS = 3
"""A net below the rules of `_is_tame`, which nothing ordinary falls into. It needs the main thread."""

_ASSIGNED = re.compile(r"^\s*([A-Za-z]|\\[a-z]+)\s*=(?!=)")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3,}")
_FUNCTIONS = frozenset({"sin", "cos", "tan", "cot", "log", "exp", "sqrt", "pi"})
_ENDLESS = ("!", "\\sum", "\\prod", "\\int", "\\lim", "\\binom", "**")
_POWER = re.compile(r"\^\s*(?:\{([^{}]*)\}|(\\?\w))")
_BRACKET_POWER = re.compile(r"[)\]}]\s*+\^\s*+\{?+\s*+[0-9]{2}")
_MAX_EXPONENT = 99
_MAX_BRACKETS = 8


def same_expression(given: str, wanted: str) -> bool:
    """Whether a given answer equals the known one as an expression; ``False`` if either is none that can be compared.

    ``x = 5`` counts as ``5``. Never raises for what a model wrote.
    """
    texts = [_without_name(text) for text in (wanted, given)]
    if not all(_is_tame(text) for text in texts):
        return False
    seconds = _SECONDS if threading.current_thread() is threading.main_thread() else 0  # 0: none
    gold, target = (_parsed(text, seconds) for text in texts)
    if not gold or not target:
        return False
    from math_verify import verify

    return bool(verify(gold, target, timeout_seconds=seconds))


def _without_name(text: str) -> str:
    text = text.strip().strip("$").strip()
    return _ASSIGNED.sub("", text, count=1).strip()


def _is_tame(text: str) -> bool:
    """Whether it is a short formula that can be simplified quickly."""
    if not text or len(text) > MAX_LENGTH or "=" in text or "$" in text:
        return False
    if any(mark in text for mark in _ENDLESS) or text.count("(") + text.count("{") > 2 * _MAX_BRACKETS:
        return False
    if _BRACKET_POWER.search(text):
        return False
    bare = _COMMAND.sub(" ", _TEXT.sub(" ", text))
    if set(_WORD.findall(bare)) - _FUNCTIONS:
        return False
    return all(_is_small(exponent or letter) for exponent, letter in _POWER.findall(text)) and (
        len(_POWER.findall(text)) == text.count("^")
    )


def _is_small(exponent: str) -> bool:
    """Whether a power is no tower and no expansion without end."""
    return all(int(digits[:9]) <= _MAX_EXPONENT for digits in re.findall(r"[0-9]+", exponent))


def _parsed(text: str, seconds: int) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    found = parse(f"${text}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=seconds)
    # beside the expression it returns the text, which would make it a comparison of texts
    return [each for each in cast(list[Any], found) if not isinstance(each, str)]
