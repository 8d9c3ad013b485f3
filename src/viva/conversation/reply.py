"""From a reply's text to its reflection, evaluation and solution.

Five ways, in this order: the text is a JSON object; there is one in a fence marked ``json``; in a plain fence; the
fields stand in tags (or, a loose form of the first: the object stands among other text; of these two, what begins
first); and else the whole text is the solution. Never raises, and takes time linear in the text.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from viva.conversation.json_objects import FoundObject, ObjectScanner
from viva.conversation.records import AgentResponse, ReplyStatus

__all__ = ["ParsedReply", "Strategy", "fenced_objects", "parse_reply", "tagged_fields", "whole_object"]

Strategy = Literal["json", "json_fence", "fence", "embedded", "xml", "text"]
"""Which way a reply was read."""

_FIELDS = ("reflection", "evaluation", "solution")
_REQUIRED = "solution"
_JSON_FENCE = re.compile(r"```json(?![\w+-])\s*+", re.I | re.A)
_ANY_FENCE = re.compile(r"```[\w+-]*+\s*+", re.A)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """A reply that was read."""

    response: AgentResponse
    status: ReplyStatus
    strategy: Strategy


def parse_reply(text: str) -> ParsedReply:
    """Read a reply, whatever it is.

    Args:
        text: The decoded reply without end-of-turn token and thinking (see
            `viva.conversation.rendering.read_reply`).

    Returns:
        Status ``ok`` only for a JSON object with exactly the asked fields as strings or numbers and nothing
        around it; ``unstructured`` if the whole text had to be taken as the solution; ``repaired`` for
        anything in between. A field of another type than string or number counts as missing.
    """
    text = _encodable(text)
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


def _reply(fields: dict[str, str], status: ReplyStatus, strategy: Strategy) -> ParsedReply:
    # an escape such as \ud83d can name half a character, so the fields are checked once more
    clean = {name: _encodable(value) for name, value in fields.items()}
    return ParsedReply(response=AgentResponse(**clean), status=status, strategy=strategy)


def _encodable(text: str) -> str:
    """Half characters cannot be stored or tokenized; they become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
