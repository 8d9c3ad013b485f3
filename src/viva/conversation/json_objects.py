"""JSON objects in a model's reply: found without recursion, in time linear in the reply.

A reply may be a JSON object, or have one somewhere in it, nested, cut off, or with code full of braces in its
strings. `ObjectScanner` reads objects directly off the text and keeps only the fields that were asked for, so
depth costs nothing but a list entry.

Why it is linear though it tries every place where an object may begin: a reading that meets a place outside a
string settles what begins there, whether it ends well or not, so the place is not read again. A character can
only be met inside or outside a string, so it is read a few times at most, whatever the text.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["FoundObject", "ObjectScanner"]

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
    """Whether it was plain JSON with the asked names: each at most once, as a string or number, nothing
    bent."""


class _Frame:
    """An object or array being read."""

    __slots__ = ("closer", "exact", "fields", "key", "start")

    def __init__(self, start: int, closer: str) -> None:
        self.start = start
        self.closer = closer
        self.fields: dict[str, str] = {}
        self.key = ""  # the asked name whose value comes next; empty for any other
        self.exact = True


class _Fault(ValueError):
    """The text is not JSON."""


class ObjectScanner:
    """Finds JSON objects that have a certain field which is not blank.

    Args:
        text: The reply.
        names: Fields to keep. Names are compared without case and surrounding space; a bent name is not
            exact.
        required: The field that must be there and not blank for an object to count.
    """

    def __init__(self, text: str, names: Collection[str], required: str) -> None:
        self.text = text
        self._names = frozenset(names)
        self._required = required
        self._settled: set[int] = set()
        self._readings = 0
        self._fits: dict[int, FoundObject] = {}
        self._array = _Frame(-1, "]")  # one for all arrays: nothing is kept of them

    def at(self, start: int) -> FoundObject | None:
        """The object that starts at a position, if one does, it ends, and it has the required field."""
        fresh = start not in self._settled and self._readings < _MOST_READINGS
        if fresh and self.text.startswith("{", start):
            self._read(start)
        return self._fits.get(start)

    def first(self, start: int = 0) -> FoundObject | None:
        """The first such object that starts at or after a position; an outer one before those inside it."""
        while self._readings < _MOST_READINGS:
            opening = _OPENING.search(self.text, start)
            if opening is None:
                break
            place = opening.start()
            if place in self._settled:
                fits = [self._fits[place]] if place in self._fits else []
            else:
                fits = self._read(place)
            if fits:
                return min(fits, key=lambda fit: fit.start)
            start = place + 1
        return None

    def _read(self, start: int) -> list[FoundObject]:
        """Read the object at a position; return it and the objects inside it, as far as they fit."""
        stack: list[_Frame] = []
        fits: list[FoundObject] = []
        self._readings += 1
        self._array.exact = True
        position: int | None = start
        try:
            while position is not None:
                position = self._value(position, stack)
                position = self._after_value(position, stack, fits)
        except _Fault:
            pass  # what is still open fails at the same place when it is read from its own beginning
        self._settled.update(frame.start for frame in stack)
        for fit in fits:
            self._fits[fit.start] = fit
        return fits

    def _value(self, position: int, stack: list[_Frame]) -> int:
        """Read down to the first scalar or empty container; return the place where that ends."""
        while True:
            opening = self.text[position : position + 1]
            if opening not in ("{", "["):
                value, end = self._scalar(position, stack[-1])
                self._keep(stack[-1], value)
                return end
            frame = self._array if opening == "[" else _Frame(position, "}")
            stack.append(frame)
            position = self._skip(position + 1)
            if self.text.startswith(frame.closer, position):
                return position
            if frame is not self._array:
                position = self._key(position, frame)

    def _after_value(self, position: int, stack: list[_Frame], fits: list[FoundObject]) -> int | None:
        """Close what ends here; return where the next value begins, ``None`` if all is closed."""
        while stack:
            frame = stack[-1]
            position = self._skip(position)
            if self.text.startswith(frame.closer, position):
                position += 1
                stack.pop()
                if frame is not self._array:
                    self._close(frame, position, fits)
                if stack:
                    self._keep(stack[-1], None)
                    stack[-1].exact &= frame.exact
                continue
            if not self.text.startswith(",", position):
                raise _Fault
            position = self._skip(position + 1)
            if self.text.startswith(frame.closer, position):
                frame.exact = False  # a comma too many
                continue
            return position if frame is self._array else self._key(position, frame)
        return None

    def _skip(self, position: int) -> int:
        if self.text[position : position + 1] not in _SPACES:
            return position
        match = _SPACE.match(self.text, position)
        return match.end() if match else position

    def _key(self, position: int, frame: _Frame) -> int:
        """Read ``"name" :`` and return where the value begins."""
        if not self.text.startswith('"', position):
            raise _Fault
        raw, position = self._string(position, frame)
        name = raw.strip().lower()
        frame.key = name if name in self._names else ""
        if frame.key and (frame.key != raw or name in frame.fields):
            frame.exact = False
        position = self._skip(position)
        if not self.text.startswith(":", position):
            raise _Fault
        return self._skip(position + 1)

    def _scalar(self, position: int, frame: _Frame) -> tuple[str | None, int]:
        """A string or number as text, ``None`` for true, false and null; and where it ends."""
        if self.text.startswith('"', position):
            return self._string(position, frame)
        if match := _NUMBER.match(self.text, position):
            return match.group(), match.end()
        if match := _WORD.match(self.text, position):
            return None, match.end()
        raise _Fault

    def _string(self, position: int, frame: _Frame) -> tuple[str, int]:
        """A string. Raw line breaks are kept; the backslash of an unknown escape stands for itself."""
        match = _STRING.match(self.text, position)
        if match is None:
            raise _Fault
        raw = match.group(1)
        if _RAW_CONTROL.search(raw):
            frame.exact = False
        if "\\" not in raw:
            return raw, match.end()
        known = _ESCAPE.sub(_known_escape, raw)
        if known != raw:
            frame.exact = False
        return json.loads(f'"{known}"', strict=False), match.end()

    def _keep(self, frame: _Frame, value: str | None) -> None:
        if not frame.key:
            return
        if value is None:
            frame.exact = False
            frame.fields.pop(frame.key, None)
        else:
            frame.fields[frame.key] = value

    def _close(self, frame: _Frame, end: int, fits: list[FoundObject]) -> None:
        self._settled.add(frame.start)
        if frame.fields.get(self._required, "").strip():
            fits.append(FoundObject(fields=frame.fields, start=frame.start, end=end, exact=frame.exact))


def _known_escape(match: re.Match[str]) -> str:
    letter: str | None = match.group(1)
    return match.group() if letter is None or letter in '"\\/bfnrt' else f"\\\\{letter}"
