"""From a reply's text to its reflection, evaluation and solution.

Five ways, in this order: the text is a JSON object; there is one in a fence marked ``json``; in a plain fence; the
fields stand in tags (or, a loose form of the first: the object stands among other text; of these two, what begins
first); and else the whole text is the solution. Never raises, and takes time linear in the text.

Why `ObjectScanner` is linear though it tries every place where an object may begin: a reading that meets a place
outside a string settles what begins there, so it is not read again. A character can only be met inside or outside a
string, so it is read a few times at most, whatever the text.
"""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from viva.conversation.protocol import Reading, View
from viva.conversation.records import AgentResponse, ReplyStatus, encodable

_MOST_READINGS = 1000
"""A text in which this many objects were begun and came to nothing is not searched further."""

_SPACES = frozenset(" \t\n\r")
_SPACE = re.compile(r"[ \t\n\r]*+")
_OPENING = re.compile(r'\{[ \t\n\r]*+"[^"\\]*+(?:\\.[^"\\]*+)*+"[ \t\n\r]*+:', re.S)
_STRING = re.compile(r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"', re.S)
_NUMBER = re.compile(r"-?\d++(?:\.\d++)?+(?:[eE][+-]?\d++)?+", re.A)
_WORD = re.compile(r"true|false|null")
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|(.))", re.S)
_RAW_CONTROL = re.compile(r"[\x00-\x1f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundObject:
    """The asked fields of one JSON object in a text."""

    fields: dict[str, str]
    """String and number fields, by asked name; numbers as they were written."""
    start: int
    end: int
    exact: bool
    """Whether all that was read to its end was plain JSON with the asked names, each at most once in an object, as a
    string or number."""


class _Open:
    """An object being read."""

    __slots__ = ("fields", "key", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.fields: dict[str, str] = {}
        self.key = ""  # the asked name whose value comes next; empty for any other


_Stack = list[_Open | None]
"""Open containers, outermost first; ``None`` is an array, of which nothing is kept."""


class _Fault(ValueError):
    """The text is not JSON."""


class ObjectScanner:
    """Finds JSON objects that have a required field which is not blank.

    Only fields of some names are kept. Names are compared without case and surrounding space; a bent name is not exact.
    """

    def __init__(self, text: str, names: Collection[str], required: str) -> None:
        self.text = text
        self._names = frozenset(names)
        self._required = required
        self._settled: set[int] = set()
        self._readings = 0
        self._is_exact = True
        self._fits: dict[int, FoundObject] = {}

    def at(self, start: int) -> FoundObject | None:
        """The object that starts at a position, if one does, it ends, and it has the required field."""
        fresh = start not in self._settled and self._readings < _MOST_READINGS
        if fresh and self.text.startswith("{", start):
            self._read(start)
        return self._fits.get(start)

    def first(self, start: int = 0) -> FoundObject | None:
        """The first such object that starts at or after a position; an outer one before those inside it."""
        while self._readings < _MOST_READINGS and (opening := _OPENING.search(self.text, start)):
            start = opening.start()
            if start not in self._settled:
                fits = self._read(start)
            else:
                fits = [self._fits[start]] if start in self._fits else []
            if fits:
                return min(fits, key=lambda fit: fit.start)
            start += 1
        return None

    def _read(self, start: int) -> list[FoundObject]:
        """Read the object at a position; return it and the objects inside it, as far as they fit."""
        stack: _Stack = []
        fits: list[FoundObject] = []
        self._readings += 1
        self._is_exact = True
        position: int | None = start
        try:
            while position is not None:
                position = self._value(position, stack)
                position = self._after_value(position, stack, fits)
        except _Fault:
            pass  # what is still open fails at the same place when it is read from its own beginning
        self._settled.update(frame.start for frame in stack if frame is not None)
        self._fits |= {fit.start: fit for fit in fits}
        return fits

    def _value(self, position: int, stack: _Stack) -> int:
        """Read down to the first scalar or empty container; return the place where that ends."""
        while True:
            opening = self.text[position : position + 1]
            if opening not in ("{", "["):
                value, end = self._scalar(position)
                self._keep(stack, value)
                return end
            frame = _Open(position) if opening == "{" else None
            stack.append(frame)
            position = self._skip(position + 1)
            if self.text.startswith("]" if frame is None else "}", position):
                return position
            if frame is not None:
                position = self._key(position, frame)

    def _after_value(self, position: int, stack: _Stack, fits: list[FoundObject]) -> int | None:
        """Close what ends here; return where the next value begins, ``None`` if all is closed."""
        while stack:
            frame = stack[-1]
            closer = "]" if frame is None else "}"
            position = self._skip(position)
            if self.text.startswith(closer, position):
                position += 1
                stack.pop()
                if frame is not None:
                    self._close(frame, position, fits)
                self._keep(stack, None)
                continue
            if not self.text.startswith(",", position):
                raise _Fault
            position = self._skip(position + 1)
            if self.text.startswith(closer, position):
                self._is_exact = False  # a comma too many
                continue
            return position if frame is None else self._key(position, frame)
        return None

    def _skip(self, position: int) -> int:
        if self.text[position : position + 1] not in _SPACES:
            return position
        match = _SPACE.match(self.text, position)
        return match.end() if match else position

    def _key(self, position: int, frame: _Open) -> int:
        """Read ``"name" :`` and return where the value begins."""
        if not self.text.startswith('"', position):
            raise _Fault
        raw, position = self._string(position)
        name = raw.strip().lower()
        frame.key = name if name in self._names else ""
        if frame.key and (frame.key != raw or name in frame.fields):
            self._is_exact = False
        position = self._skip(position)
        if not self.text.startswith(":", position):
            raise _Fault
        return self._skip(position + 1)

    def _scalar(self, position: int) -> tuple[str | None, int]:
        """A string or number as text, ``None`` for true, false and null; and where it ends."""
        if self.text.startswith('"', position):
            return self._string(position)
        if match := _NUMBER.match(self.text, position):
            return match.group(), match.end()
        if match := _WORD.match(self.text, position):
            return None, match.end()
        raise _Fault

    def _string(self, position: int) -> tuple[str, int]:
        """A string. Raw line breaks are kept; the backslash of an unknown escape stands for itself."""
        match = _STRING.match(self.text, position)
        if match is None:
            raise _Fault
        raw = match.group(1)
        if _RAW_CONTROL.search(raw):
            self._is_exact = False
        if "\\" not in raw:
            return raw, match.end()
        known = _ESCAPE.sub(_known_escape, raw)
        if known != raw:
            self._is_exact = False
        return json.loads(f'"{known}"', strict=False), match.end()

    def _keep(self, stack: _Stack, value: str | None) -> None:
        frame = stack[-1] if stack else None
        if frame is None or not frame.key:
            return
        if value is None:
            self._is_exact = False
            frame.fields.pop(frame.key, None)
        else:
            frame.fields[frame.key] = value

    def _close(self, frame: _Open, end: int, fits: list[FoundObject]) -> None:
        self._settled.add(frame.start)
        if frame.fields.get(self._required, "").strip():
            fits.append(FoundObject(fields=frame.fields, start=frame.start, end=end, exact=self._is_exact))


def _known_escape(match: re.Match[str]) -> str:
    letter: str | None = match.group(1)
    return match.group() if letter is None or letter in '"\\/bfnrt' else f"\\\\{letter}"


_FIELDS = ("reflection", "evaluation", "solution")
_REQUIRED = "solution"
_JSON_FENCE = re.compile(r"```json(?![\w+-])\s*+", re.I | re.A)
_ANY_FENCE = re.compile(r"```[\w+-]*+\s*+", re.A)


def parse_reply(text: str, view: View | None = None) -> Reading:
    """Read an `AgentResponse`, whatever the text is; the view makes no difference.

    Status ``ok`` only for a JSON object with exactly the asked fields as strings or numbers and nothing around it;
    ``unstructured`` if the whole text had to be taken as the solution; ``repaired`` for anything in between. A field
    of another type than string or number counts as missing. The strategy is ``json``, ``json_fence``, ``fence``,
    ``embedded``, ``xml`` or ``text``.
    """
    del view
    text = encodable(text)
    scanner = ObjectScanner(text, _FIELDS, _REQUIRED)
    if (found := whole_object(scanner)) is not None:
        complete = found.exact and len(found.fields) == len(_FIELDS)
        return _reply(found.fields, ReplyStatus.OK if complete else ReplyStatus.REPAIRED, "json")
    if (found := next(fenced_objects(scanner, json_only=True), None)) is not None:
        return _reply(found.fields, ReplyStatus.REPAIRED, "json_fence")
    if (found := next(fenced_objects(scanner), None)) is not None:
        return _reply(found.fields, ReplyStatus.REPAIRED, "fence")
    tags, tags_start = tagged_fields(text, _FIELDS)
    tagged = bool(tags.get(_REQUIRED))
    found = scanner.first()
    if found is not None and not (tagged and tags_start < found.start):
        return _reply(found.fields, ReplyStatus.REPAIRED, "embedded")
    if tagged:
        return _reply(tags, ReplyStatus.REPAIRED, "xml")
    return _reply({_REQUIRED: text.strip()}, ReplyStatus.UNSTRUCTURED, "text")


def whole_object(scanner: ObjectScanner) -> FoundObject | None:
    """The object that a text is, if it is one."""
    text = scanner.text
    found = scanner.at(len(text) - len(text.lstrip()))
    return found if found is not None and not text[found.end :].strip() else None


def fenced_objects(scanner: ObjectScanner, *, json_only: bool = False) -> Iterator[FoundObject]:
    """Objects that begin right after the opening of a fence, in order.

    A fence ends where its object ends: code with fences of its own may stand in the object's strings.
    """
    for fence in (_JSON_FENCE if json_only else _ANY_FENCE).finditer(scanner.text):
        if (found := scanner.at(fence.end())) is not None:
            yield found


def tagged_fields(text: str, names: tuple[str, ...]) -> tuple[dict[str, str], int]:
    """Text between ``<name>`` and the ``</name>`` that closes it, by name, and where the first such field begins.

    Tags within a field are its text. Of several fields of one name the first counts; a tag that nothing closes, or that
    closes nothing, is text.
    """
    open_tags: dict[str, list[re.Match[str]]] = {name: [] for name in names}
    closing: dict[int, re.Match[str]] = {}
    tags = list(re.finditer(rf"<(/?)({'|'.join(names)})>", text, re.I | re.A))
    for tag in tags:
        stack = open_tags[tag.group(2).lower()]
        if not tag.group(1):
            stack.append(tag)
        elif stack:
            closing[stack.pop().start()] = tag
    fields: dict[str, str] = {}
    begin, end = len(text), 0
    for tag in tags:
        closed_by = closing.get(tag.start())
        if tag.start() >= end and closed_by is not None:
            begin, end = min(begin, tag.start()), closed_by.end()
            fields.setdefault(tag.group(2).lower(), text[tag.end() : closed_by.start()].strip())
    return fields, begin


def _reply(fields: dict[str, str], status: ReplyStatus, strategy: str) -> Reading:
    # an escape such as \ud83d can name half a character, so the fields are checked once more
    clean = {name: encodable(value) for name, value in fields.items()}
    return Reading(response=AgentResponse(**clean), status=status, strategy=strategy)
