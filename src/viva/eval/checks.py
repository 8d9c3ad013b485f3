"""Ways to tell whether an answer is right, and what an answer says when answers vote.

``math``: the final answer is read and compared as a number or expression (`viva.eval.answers`). ``exact``: the final
answer, or the whole reply, is the known answer letter for letter. ``choice``: the letter of one of several options.
``module:FUNCTION`` or ``path.py:FUNCTION``: the user's own, from the reply and the known answer to ``True`` or
``False``.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from viva.eval.answers import answer_key, is_correct, marked_answer
from viva.selfplay.user_code import is_target, load_target

__all__ = ["CHECKS", "AnswerCheck", "find_check"]

_OPENING = "([{*$\"'` \n\t"
_WRAPS = ("\\textbf{", "\\text{", "\\mathbf{", "\\mathrm{", "\\(", "\\[")
_NOUN = re.compile(r"(?:the )?(?:option|choice|letter)\b[ :]*", re.IGNORECASE)
_BRACKETED = re.compile(r"[(\[]([A-Z])[)\]]")
_DASH = re.compile(r"[A-Z]\s+-\s+(?![A-Z]\b)")
_LAST_LINE = re.compile(r"\**([A-Z])\**(?:[).:]|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCheck:
    """One way to tell."""

    name: str
    """What selects it on a command line."""
    is_right: Callable[[str, str], bool]
    """From a reply and the known answer."""
    vote: Callable[[str], str | None]
    """What a reply answers; equal texts are one vote. ``None``: nothing that could be counted."""
    refuses: Callable[[str], str | None] = lambda answer: None
    """What is wrong with a known answer, if it could never be met."""


def find_check(name: str) -> AnswerCheck:
    """The check of a name.

    Raises:
        ValueError: If there is none, or the user's code is not there.
    """
    if name in CHECKS:
        return CHECKS[name]
    if not is_target(name):
        raise ValueError(
            f"grader must be one of {', '.join(CHECKS)}, or your own as module:FUNCTION or path.py:FUNCTION; "
            f"got {name!r}"
        )
    function = load_target(name)
    if not callable(function):
        raise ValueError(f"grader={name} is no function; it must take a reply and the known answer")

    def is_right(text: str, answer: str) -> bool:
        told: object = function(text, answer)
        if not isinstance(told, bool | np.bool_):
            raise ValueError(f"grader={name} must return True or False; got {told!r}")
        return bool(told)

    return AnswerCheck(name=name, is_right=is_right, vote=answer_key)


def _is_exact(text: str, answer: str) -> bool:
    wanted = _spaced(answer)
    return bool(wanted) and wanted in (_spaced(text), _spaced(marked_answer(text) or ""))


def _exact_vote(text: str) -> str | None:
    return _spaced(marked_answer(text) or text) or None


def _spaced(text: str) -> str:
    return " ".join(text.split())


def _is_choice(text: str, answer: str) -> bool:
    return _choice(text) == _leading_letter(answer)


def _refuse_choice(answer: str) -> str | None:
    if _leading_letter(answer) is not None:
        return None
    return f"grader=choice needs known answers that begin with a letter, like B or (B); got {answer!r:.80}"


def _choice(text: str) -> str | None:
    """The letter in the last box or behind the last "answer is".

    Without such a mark: a reply of one letter, the last capital letter in brackets, or the one that the last line
    begins with.
    """
    marked = marked_answer(text)
    if marked is not None:
        return _leading_letter(marked)
    bare = text.strip("*.()[]: \n\t")
    if len(bare) == 1 and bare.isascii() and bare.isalpha():
        return bare.upper()
    bracketed = _BRACKETED.findall(text)
    if bracketed:
        return str(bracketed[-1])
    found = _LAST_LINE.match(text.strip().rpartition("\n")[2].strip())
    return found.group(1) if found else None


def _leading_letter(text: str) -> str | None:
    """A letter by itself at the beginning, behind brackets, emphasis and words like "option".

    A small letter before a further word is a word (``a number``), and none before a sign is an option (``x = 5``,
    ``A - B``); a dash between a capital letter and what it stands for is no sign (``B - 12 apples``).
    """
    text = text.lstrip(_OPENING)
    text = text[noun.end() :] if (noun := _NOUN.match(text)) else text
    for wrap in ("", *_WRAPS):
        text = text.removeprefix(wrap).lstrip(_OPENING)
    letter, following, rest = text[:1], text[1:2], text[1:].lstrip()
    if not (letter.isascii() and letter.isalpha()) or following.isalnum() or following in ("'", "\u2019"):
        return None
    is_sign = rest[:1] in tuple("=+-^_/<>") and not _DASH.match(text)
    if is_sign or (letter.islower() and following == " " and rest[:1].isalpha()):
        return None
    return letter.upper()


CHECKS: dict[str, AnswerCheck] = {
    check.name: check
    for check in (
        AnswerCheck(name="math", is_right=is_correct, vote=answer_key),
        AnswerCheck(name="exact", is_right=_is_exact, vote=_exact_vote),
        AnswerCheck(name="choice", is_right=_is_choice, vote=_choice, refuses=_refuse_choice),
    )
}
"""By name."""
