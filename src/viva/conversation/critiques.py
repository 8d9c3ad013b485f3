"""Readers of free text: a solution that was revised or defended, critiques with named targets.

None raises for what a model wrote, and all take time linear in it.
"""

import re
from collections import Counter
from dataclasses import dataclass

from viva.conversation.protocol import Reading, View
from viva.conversation.records import Critique, CritiqueReply, ReplyStatus, Revision

_START = r"[ \t]*+(?:(?:[-+•>]|\*(?=\s)|\d{1,2}[.)])[ \t]*+)?+(?:\#{1,6}[ \t]*+)?+[*_]{0,3}+"
"""Bullet or number, heading and emphasis that a line may begin with."""
_HEADER = re.compile(
    rf"""{_START}
    (?:
        (?: (?i:critique|criticism|review|feedback|remarks?|comments?)[ \t]++(?i:of|on|for|to)
          | (?i:to) )
        [ \t]++ (?:(?i:the|solution|agent|proposal)[ \t]++)*+ ["'(*_]{{0,3}}+ (?P<named>\w{{1,20}}+)
      | (?:(?i:solution|agent|proposal)[ \t]++)?+ (?P<bare>[A-Z])
    )
    ["')*_]{{0,4}}+ [ \t]*+ : [*_]{{0,3}}+
    """,
    re.X,
)
"""``Critique of B:`` and looser forms. After "Critique of" or "To", any name is a target; without these words only
a known letter is, for "Note:" and "Q:" may stand in a critique."""
_DECISION = re.compile(
    rf"""^{_START}
    (?: (?i:decision|(?:i|we)(?:[ \t]++will)?+)[ \t]*+:?+[ \t]*+ [*_]{{0,3}}+ )?+
    (?: (?P<revise>(?i:revis(?:e|ed|ion)))\b | (?P<defend>(?i:defen(?:d|ded|s[ei]ng|[cs]e)))\b )
    (?: [ \t]++(?i:my|the|solution)\b )*+
    ["')*_]{{0,4}}+ (?: [ \t]*+:[*_]{{0,3}}+ | [ \t]++-[ \t] | [.]?+[ \t\r]*+$ )
    """,
    re.X | re.M,
)
"""``Revise:`` or ``Defend:`` at the beginning of a line, and looser forms; a sentence that begins so is none."""


def read_revision(text: str, view: View) -> Reading:
    """The solution after the first line that begins with ``Revise:`` or ``Defend:`` (or looser forms).

    Returns:
        Status ``ok`` if the reply begins with that marker; ``repaired`` if other text comes first (it is left out)
        or there is no marker (the whole text is the solution); ``unstructured`` if the solution is empty.
    """
    found = _DECISION.search(text)
    solution = text[found.end() :].strip() if found is not None else text.strip()
    if found is None:
        decision = "unstated"
    else:
        decision = "revise" if found["revise"] is not None else "defend"
    leads = found is not None and not text[: found.start()].strip()
    status = ReplyStatus.OK if leads else ReplyStatus.REPAIRED
    return Reading(
        response=Revision(solution=solution, decision=decision),
        status=status if solution else ReplyStatus.UNSTRUCTURED,
        strategy="text" if found is None else "marker",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """A line that names the target of what follows it."""

    name: str
    start: int
    stop: int


def read_critiques(text: str, view: View) -> Reading:
    """The critiques of a reply, each from the header that names its target to the next header.

    Ranges are of the text as given, from the beginning of the header to the last visible character. What stands
    before the first header belongs to no critique.

    Returns:
        A `CritiqueReply`. Status ``ok`` if all that was written counts, ``unstructured`` if nothing does.
    """
    headers = _headers(text, view)
    stops = [*(header.start for header in headers[1:]), len(text)][: len(headers)]
    critiques: dict[int, Critique] = {}
    dropped: Counter[str] = Counter()
    for header, stop in zip(headers, stops, strict=True):
        body = text[header.stop : stop].strip()
        target = view.letters.get(header.name)
        if target is None:
            dropped["unknown_alias"] += 1
        elif target == view.agent_id:
            dropped["own"] += 1
        elif target in critiques:
            dropped["repeated_target"] += 1
        elif not body:
            dropped["empty"] += 1
        else:
            end = header.start + len(text[header.start : stop].rstrip())
            critiques[target] = Critique(target=target, text=body, start=header.start, stop=end)
    status = ReplyStatus.REPAIRED if dropped or text[: _begin(headers)].strip() else ReplyStatus.OK
    return Reading(
        response=CritiqueReply(critiques=tuple(critiques.values()), dropped=dict(dropped)),
        status=status if critiques else ReplyStatus.UNSTRUCTURED,
        strategy="headers",
    )


def _begin(headers: list[_Header]) -> int:
    return headers[0].start if headers else 0


def _headers(text: str, view: View) -> list[_Header]:
    letters = view.letters
    headers: list[_Header] = []
    start = 0
    for line in text.splitlines(keepends=True):
        found = _HEADER.match(line)
        if found is not None and (found["named"] is not None or found["bare"] in letters):
            name: str = found["named"] if found["named"] is not None else found["bare"]
            name = name.upper() if len(name) == 1 else name
            headers.append(_Header(name=name, start=start, stop=start + found.end()))
        start += len(line)
    return headers
