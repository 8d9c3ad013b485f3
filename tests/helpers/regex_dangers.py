"""Which regular expressions can take more than linear time, told from their parsed form.

Three ways to be slow are looked for, on the safe side: a repetition within a repetition, and one beside another that
takes the same characters, whenever they can be given back (possessive ones cannot); and, in a search, a repetition that
may run through places where the pattern could begin anew, with something behind it that may be missing.
"""

import re
from re import _constants as c
from re import _parser as parser

ALPHABET = [chr(code) for code in range(128)] + ["\x85", "\u00e9", "\u2028", "\u0660", "\uff21", "\u0130"]
EVERY = frozenset(ALPHABET)
_REPEATS = (c.MAX_REPEAT, c.MIN_REPEAT, c.POSSESSIVE_REPEAT)
_MANY = 128
"""A repetition that is bounded below this is a constant."""
_CATEGORIES = {
    c.CATEGORY_DIGIT: r"\d",
    c.CATEGORY_NOT_DIGIT: r"\D",
    c.CATEGORY_SPACE: r"\s",
    c.CATEGORY_NOT_SPACE: r"\S",
    c.CATEGORY_WORD: r"\w",
    c.CATEGORY_NOT_WORD: r"\W",
}


def dangers(pattern: re.Pattern[str], *, anchored: bool) -> list[str]:
    """What could make a pattern slow; `anchored` where it is only used with ``match`` and ``fullmatch``."""
    found: list[str] = []
    tree = parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE)
    _walk(list(tree), pattern.flags, found, [], [], anchored, False)
    return found


def _walk(items, flags, found, before, after, anchored, atomic):
    """Look at a sequence that stands between mandatory characters `before` and the items `after`."""
    before = list(before)
    for place, (kind, value) in enumerate(items):
        behind = [*items[place + 1 :], *after]
        if kind in _REPEATS:
            found += _dangers_of(kind, value, flags, before, behind, anchored, atomic)
            inner_atomic = atomic or kind is c.POSSESSIVE_REPEAT
            _walk(list(value[2]), flags, found, before, behind, anchored, inner_atomic)
            if value[0]:
                before.append(_chars(list(value[2]), flags))
            continue
        for inner, inner_flags, inner_atomic in _parts(kind, value, flags):
            _walk(inner, inner_flags, found, before, behind, anchored, atomic or inner_atomic)
        if kind is c.AT and value in (c.AT_BEGINNING, c.AT_BEGINNING_STRING):
            before.append(frozenset("\n") if flags & re.M else frozenset())
        elif kind is c.ASSERT and value[0] < 0:
            before.extend(_first([item], flags) for item in value[1])
        elif not _is_nullable([(kind, value)], flags):
            before.extend(_mandatory(kind, value, flags))


def _dangers_of(kind, value, flags, before, behind, anchored, atomic):
    """What a repetition between mandatory characters `before` and the items `behind` could make slow."""
    _, most, body = value
    if most <= _MANY:
        return []
    found = []
    chars = _chars(list(body), flags)
    gives_back = kind is not c.POSSESSIVE_REPEAT and not atomic
    if gives_back and _is_nested(list(body), flags):
        found.append("a repetition within a repetition")
    if gives_back and _meets_another(behind, chars, flags):
        found.append("a repetition beside another of the same characters")
    is_apart = any(not (other & chars) for other in before)
    if not anchored and not is_apart and not _is_nullable(behind, flags):
        found.append("a repetition that runs through other beginnings")
    return found


def _mandatory(kind, value, flags):
    """Sets of characters of which one must be met each."""
    if kind is c.SUBPATTERN:
        inner = [item for item in value[3] if not _is_nullable([item], flags)]
        return [chars for item in inner for chars in _mandatory(*item, flags)]
    if kind in _REPEATS:
        return [_chars(list(value[2]), flags)] if value[0] else []
    return [_chars([(kind, value)], flags)]


def _parts(kind, value, flags):
    if kind is c.SUBPATTERN:
        _, add, remove, inner = value
        return [(list(inner), (flags | add) & ~remove, False)]
    if kind is c.ATOMIC_GROUP:
        return [(list(value), flags, True)]
    if kind is c.BRANCH:
        return [(list(inner), flags, False) for inner in value[1]]
    if kind in (c.ASSERT, c.ASSERT_NOT):
        return [(list(value[1]), flags, False)]
    return []


def _is_nested(body, flags):
    """Whether a repeated body can be split between its turns in more than one way."""
    if _is_nullable(body, flags):
        return True
    for place, (kind, value) in enumerate(body):
        if kind in _REPEATS and value[1] > _MANY:
            chars = _chars(list(value[2]), flags)
            others = [item for other, item in enumerate(body) if other != place]
            apart = [item for item in others if not _is_nullable([item], flags)]
            if not any(not (_chars([item], flags) & chars) for item in apart):
                return True
        parts = _parts(kind, value, flags)
        if any(_has_many(inner) and _is_nested(inner, inner_flags) for inner, inner_flags, _ in parts):
            return True
    return False


def _has_many(items):
    return any(
        (kind in _REPEATS and (value[1] > _MANY or _has_many(list(value[2]))))
        or any(_has_many(inner) for inner, _, _ in _parts(kind, value, 0))
        for kind, value in items
    )


def _meets_another(behind, chars, flags):
    for kind, value in behind:
        if kind in _REPEATS and value[1] > _MANY and _chars(list(value[2]), flags) & chars:
            return True
        for inner, inner_flags, _ in _parts(kind, value, flags):
            if kind not in (c.ASSERT, c.ASSERT_NOT) and _meets_another(inner, chars, inner_flags):
                return True
        if not _is_nullable([(kind, value)], flags) and not (_first([(kind, value)], flags) & chars):
            return False
    return False


def _is_nullable(items, flags):
    """Whether a sequence matches the empty text; what is asserted may be missing, so it is not empty."""
    for kind, value in items:
        if kind in _REPEATS:
            if value[0] and not _is_nullable(list(value[2]), flags):
                return False
        elif kind is c.BRANCH:
            if not any(_is_nullable(list(inner), flags) for inner in value[1]):
                return False
        elif kind in (c.SUBPATTERN, c.ATOMIC_GROUP):
            if not all(_is_nullable(inner, flags) for inner, _, _ in _parts(kind, value, flags)):
                return False
        elif kind is not c.GROUPREF:
            return False
    return True


def _first(items, flags):
    chars = frozenset()
    for item in items:
        chars |= _chars([item], flags)
        if not _is_nullable([item], flags):
            break
    return chars


def _chars(items, flags):
    """All characters that a sequence may take."""
    chars = frozenset()
    for kind, value in items:
        if kind in _REPEATS:
            chars |= _chars(list(value[2]), flags)
        elif kind is c.LITERAL:
            chars |= _cased({chr(value)}, flags)
        elif kind is c.NOT_LITERAL:
            chars |= EVERY - _cased({chr(value)}, flags)
        elif kind is c.ANY:
            chars |= EVERY if flags & re.S else EVERY - {"\n"}
        elif kind is c.IN:
            chars |= _class(value, flags)
        elif kind is c.GROUPREF:
            chars |= EVERY
        elif kind not in (c.ASSERT, c.ASSERT_NOT):
            for inner, inner_flags, _ in _parts(kind, value, flags):
                chars |= _chars(inner, inner_flags)
    return chars


def _class(members, flags):
    chars = set()
    negated = False
    for kind, value in members:
        if kind is c.NEGATE:
            negated = True
        elif kind is c.LITERAL:
            chars |= _cased({chr(value)}, flags)
        elif kind is c.RANGE:
            chars |= _cased({letter for letter in ALPHABET if value[0] <= ord(letter) <= value[1]}, flags)
        elif kind is c.CATEGORY:
            known = re.compile(_CATEGORIES[value], flags & re.A)
            chars |= {letter for letter in ALPHABET if known.match(letter)}
    return frozenset(EVERY - chars if negated else chars)


def _cased(letters, flags):
    if flags & re.I:
        letters = {other for letter in letters for other in (letter, letter.lower(), letter.upper())}
    return frozenset(letters)
