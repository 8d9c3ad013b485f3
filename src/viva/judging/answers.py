"""Reading the final answer out of a solution, and grading it.

Where the answer stands, in this order: the last ``\\boxed{...}``; else between the last ``<answer>`` and ``</answer>``;
else what follows the last "answer is", "####" or "Answer:"; else the last number; else the whole text. Checks (option
``grader``):

``math``
    A known answer that is a number is met by numbers of equal value only (``x = 9`` answers 9, ``8+1`` does not); any
    other by an equal normalised text or an equal expression (`viva.judging.expressions`). Problems of reasoning-gym
    are graded by their family's own scorer, see `viva.judging.reasoning_gym`; the other checks see their plain answers.
``exact``
    The final answer, or the whole reply, is the known answer letter for letter.
``choice``
    The letter of one of several options.
``module:FUNCTION`` or ``path.py:FUNCTION``
    The user's own, from the reply and the known answer to ``True`` or ``False``.

All scanners are linear in the text.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from viva.judging.expressions import FUNCTIONS, same_expression, without_name
from viva.judging.reasoning_gym import find_problem, plain_answer

_BOXED = "\\boxed{"
_TAG = "<answer>"
_MARKERS = ("answer is", "####", "answer:")
_AROUND = " \t\n.*\"'`"
_DIGITS = frozenset("0123456789")
_NUMBER_PARTS = _DIGITS | frozenset(".,/")
_NUMBER = re.compile(r"\.?[0-9][0-9.,/]*")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{([^{}]{1,100})\}\{([^{}]{1,100})\}")
_FUNCTIONS = rf"\b(?:{'|'.join(sorted(FUNCTIONS | {'sec', 'csc', 'ln'}))})\b"
_VARIABLE = re.compile(
    r"[0-9](?:[abinxyz]{1,3}\b| [nxyz]\b)"  # 2xy, 3i, 2 x
    r"|(?:^|[-+/*($]) ?[A-Za-z] ?[-\u2212/] ?[0-9]"  # x - 3, x/2
    r"|[0-9] ?[-\u2212/] ?[A-Za-z] ?(?:$|[-+/*),.;$])"  # 2 - x, 2/x
    rf"|\b[A-Za-z]_?[0-9]|{_FUNCTIONS}|[\u03c0\u221a]"  # x2, pi/2
)
_COUNTS = "hundred|thousand|(?:m|b|tr)illion|dozen"
"""Words that stand for numbers."""
_WORDS = re.compile(
    rf"(?<=[0-9]) (?!{_FUNCTIONS}|{_COUNTS})"
    r"[A-Za-z]{2,20}(?:[ /][A-Za-z]{1,20}){0,4}$"
)
"""A unit in plain words behind a number, such as `` km/h``."""
_MINUS = ("-", "\u2212")
_ENDS = (*")]}%!\u00b0", *_MINUS)
"""Ends of a term, behind which a minus is a difference, a range or a dash."""
_CURRENCIES = ("$", "\u20ac", "\u00a3")
_UNITS = ("^\\circ", "^{\\circ}", "\u00b0", "\\%", "%", "\\$", *_CURRENCIES, "\\,", "\\!")
_MEASURE = re.compile(
    r"\\(?:text|textrm|mathrm|mbox)\{\s{0,4}"
    rf"(?!\s|[a-fi-kn-rt-z]\s{{0,4}}\}}|{_COUNTS})"
    r"[^{}\d]{1,40}\}(?:\^(?:\d|\{\d\}))?$"
)
"""A unit in letters behind a number, such as ``\\text{ cm}^2``; variables and words for numbers are none."""


def is_correct(text: str, answer: str) -> bool:
    """Whether the final answer of `text` equals `answer`.

    A known answer may be a worked solution (GSM8K writes ``... #### 72``): what follows its mark counts. One that names
    a problem of reasoning-gym is met where its scorer gives 1.
    """
    problem = find_problem(answer)
    if problem is not None:
        return problem.is_right(_answer_like(problem.answer, text))
    given, wanted = extract_answer(text), _known_answer(answer)
    if given is None or wanted is None:
        return False
    return same_answer(given, wanted) or _normalise(given) == _normalise(answer)


def same_answer(given: str, wanted: str) -> bool:
    """Whether a final answer, as `extract_answer` gives it, is another one: an equal number, text or expression."""
    given_value, wanted_value = _value(given), _value(wanted)
    if given_value is not None and wanted_value is not None:
        return given_value == wanted_value
    if _normalise(given) == _normalise(wanted):
        return True
    return wanted_value is None and same_expression(given, wanted)


def extract_answer(text: str) -> str | None:
    """The final answer as written, or ``None`` if the text is empty."""
    marked = _marked(text)
    if marked is not None:
        return marked
    return _last_number(text) or text.strip() or None


def answer_key(text: str) -> str | None:
    """One spelling for the final answers that are equal as numbers, or as texts but for letter case, spaces and units.

    Equal expressions in different forms (``x/2`` and ``0.5x``) have different keys. ``None`` for an empty text.
    """
    given = extract_answer(text)
    if given is None:
        return None
    value = _value(given)
    return _normalise(given) or None if value is None else str(value)


def answer_groups(solutions: Sequence[str]) -> list[int | None]:
    """A number for each solution, equal where their answers are; ``None`` for a solution without an answer."""
    leaders: list[str] = []
    number_of: dict[str, int] = {}
    keys = [answer_key(text) for text in solutions]
    for key, text in zip(keys, solutions, strict=True):
        if key is None or key in number_of:
            continue
        answer = extract_answer(text) or key
        known = [
            number
            for number, leader in enumerate(leaders)
            if same_answer(answer, leader) or same_answer(leader, answer)
        ]
        number_of[key] = known[0] if known else len(leaders)
        if not known:
            leaders.append(answer)
    return [None if key is None else number_of[key] for key in keys]


def marked_answer(text: str) -> str | None:
    """The text in the last box, else in the last tag, else behind the last mark such as "answer is", else ``None``."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    return _tagged(text) or _after_marker(text) or None


def _answer_like(wanted: str, text: str) -> str:
    """The answer of a reply, read as one of the form of `wanted`: a number, a line, or several lines.

    It is what is marked; else the last number, where a number is wanted; else the whole reply. Stops and quotes around
    it are left out where the wanted one has none.
    """
    marked = marked_answer(text)
    if set(wanted) <= _NUMBER_PARTS | {"-"} and _value(wanted) is not None:
        found = _last_number(text) if marked is None else _only_number(marked)
    else:
        found = _lines_after_marker(text) if "\n" in wanted and _tagged(text) is None else marked
    told = (found or marked or text).strip()
    is_bare = wanted.strip(_AROUND) == wanted
    return told.strip(_AROUND) if wanted and is_bare else told


def _tagged(text: str) -> str | None:
    start = text.rfind(_TAG)
    return None if start < 0 else text[start + len(_TAG) :].partition("</answer>")[0].strip()


def _known_answer(answer: str) -> str | None:
    marked = _marked(answer)
    if marked is not None:
        return marked
    return _only_number(answer) or answer.strip() or None


def _marked(text: str) -> str | None:
    """The marked answer; behind a mark, of a short answer with one number, that number."""
    marked = marked_answer(text)
    if marked is None or _last_boxed(text) is not None:
        return marked
    return _only_number(marked) or marked


def _last_boxed(text: str) -> str | None:
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    depth = 1
    for index in range(start + len(_BOXED), len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start + len(_BOXED) : index]
    return None


def _after_marker(text: str) -> str | None:
    rest = _lines_after_marker(text)
    return None if rest is None else rest.split("\n", 1)[0].strip(" .*").strip()


def _lines_after_marker(text: str) -> str | None:
    lowered = text.lower()
    if len(lowered) != len(text):  # a few capital letters change length; positions would not fit
        lowered = text
    end = max((lowered.rfind(marker) + len(marker) for marker in _MARKERS if marker in lowered), default=-1)
    return None if end < 0 else text[end:].lstrip(" :\t\n*")


def _numbers(text: str) -> list[str]:
    """Numbers as written, in order: digits with separators, a leading minus, a fraction slash."""
    found: list[str] = []
    for number in _NUMBER.finditer(text):
        sign = "-" if _is_sign(text, _before_currency(text, number.start()) - 1) else ""
        found.append(sign + number[0].rstrip(".,/"))
    return found


def _before_currency(text: str, place: int) -> int:
    """The place of the currency, if one stands before a number, else the number's own."""
    if text[max(place - 1, 0) : place] not in _CURRENCIES:
        return place
    return place - 1 - (text[max(place - 2, 0) : place - 1] == "\\")


def _is_sign(text: str, place: int) -> bool:
    """Whether a character is a minus that belongs to the number behind it: ``*-5*``, but not ``7-5`` or ``7--5``."""
    if place < 0:
        return False
    before = text[max(place - 1, 0) : place]
    return text[place] in _MINUS and not before.isalnum() and before not in _ENDS


def _only_number(text: str) -> str | None:
    """The number that a short answer is: ``72 apples`` is 72, but ``x - 3`` or ``(3, 4)`` stay as they are."""
    numbers = _numbers(text)
    return numbers[0] if len(numbers) == 1 and not _is_expression(text) else None


def _is_expression(text: str) -> bool:
    return any(mark in text for mark in ("=", "^", "\\", "(", "+", "*")) or bool(_VARIABLE.search(text))


def _last_number(text: str) -> str | None:
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def _value(answer: str) -> Fraction | None:
    """The number an answer stands for, or ``None``."""
    text = _WORDS.sub("", _MEASURE.sub("", _strip_units(answer)))
    text = (without_name(text) if "=" in text else text).replace(" ", "")
    if fraction := _FRACTION.fullmatch(text):
        text = "{}{}/{}".format(*fraction.groups())
    whole, _, denominator = text.partition("/")
    numerator, divisor = _decimal(whole), _decimal(denominator) if denominator else Fraction(1)
    return numerator / divisor if numerator is not None and divisor else None


def _decimal(text: str) -> Fraction | None:
    if not text or len(text) > 100 or not set(text) <= _DIGITS | set("+-.,"):
        return None
    head, comma, tail = text.partition(",")
    if comma and not (_are_thousands(tail) and len(head.lstrip("+-")) <= 3):
        return None
    try:
        return Fraction(Decimal(text.replace(",", "")))
    except (InvalidOperation, ValueError):
        return None


def _are_thousands(tail: str) -> bool:
    groups = tail.split(".", 1)[0].split(",")
    return all(len(group) == 3 for group in groups)


def _strip_units(text: str) -> str:
    for unit in _UNITS:
        text = text.replace(unit, "")
    text = text.replace("\u2212", "-").replace("{,}", ",")
    return text.strip().rstrip(".")


def _normalise(answer: str) -> str:
    return "".join(_strip_units(answer).casefold().split())


_OPENING = "([{*$\"'` \n\t"
_WRAPS = ("\\textbf{", "\\text{", "\\mathbf{", "\\mathrm{", "\\(", "\\[")
_NOUN = re.compile(r"(?:the )?(?:option|choice|letter)\b[ :]*", re.IGNORECASE)
_BRACKETED = re.compile(r"[(\[]([A-Z])[)\]]")
_DASH = re.compile(r"[A-Z]\s+-\s+(?![A-Z]\b)")
_LAST_LINE = re.compile(r"\**([A-Z])\**(?:[).:]|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCheck:
    """One way to grade replies."""

    name: str
    """Its name on the command line."""
    is_right: Callable[[str, str], bool]
    """From a reply and the known answer."""
    vote: Callable[[str], str | None]
    """The answer of a reply; equal texts are one vote. ``None``: nothing that could be counted."""
    group: Callable[[Sequence[str]], list[int | None]] | None = None
    """Numbers of several replies, equal where their answers are; without one, as `vote` tells."""
    refuses: Callable[[str], str | None] = lambda answer: None
    """A message about a known answer that could never be met."""

    def votes(self, texts: Sequence[str]) -> list[str | None]:
        """The answers of replies to one question; where the answers are equal, so are the texts."""
        if self.group is None:
            return [self.vote(text) for text in texts]
        numbers = self.group(texts)
        votes = {number: self.vote(texts[numbers.index(number)]) for number in set(numbers)}
        return [votes[number] for number in numbers]


def _is_exact(text: str, answer: str) -> bool:
    wanted = _spaced(plain_answer(answer))
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
        AnswerCheck(name="math", is_right=is_correct, vote=answer_key, group=answer_groups),
        AnswerCheck(name="exact", is_right=_is_exact, vote=_exact_vote),
        AnswerCheck(name="choice", is_right=_is_choice, vote=_choice, refuses=_refuse_choice),
    )
}
