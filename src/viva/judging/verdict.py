"""From a judge's reply to its verdict.

Only what is marked as the verdict counts: the ``preference`` field of a JSON object, a ``<preference>`` tag, or a
reply that is nothing but the label. Prose is never searched for letters: "A is worse; B is better" names no winner
here.
"""

import re

from viva.conversation.json_objects import FoundObject, ObjectScanner
from viva.conversation.reply import fenced_objects, whole_object
from viva.judging.comparison import Outcome

__all__ = ["parse_verdict"]

_FIELDS = ("reasoning", "preference")
_TAG = re.compile(r"<preference>([^<]*+)</preference>", re.I | re.A)
_OUTCOMES = {
    label: outcome
    for outcome in (Outcome.A, Outcome.B, Outcome.TIE)
    for label in (outcome.lower(), f"solution {outcome}".lower())
}


def parse_verdict(text: str) -> Outcome:
    """Read a judge's reply, whatever it is; linear in its length.

    Args:
        text: The decoded reply without end-of-turn token and thinking.

    Returns:
        ``Outcome.INVALID`` if no verdict is marked, the marked one is no label, or two of them disagree.
    """
    scanner = ObjectScanner(text, _FIELDS, "preference")
    labels = [found.fields["preference"] for found in _objects(scanner)]
    if not labels:
        labels = _TAG.findall(text) or [text.strip().strip("\"'`*.")]
    outcomes = {_OUTCOMES.get(label.strip().lower(), Outcome.INVALID) for label in labels}
    return outcomes.pop() if len(outcomes) == 1 else Outcome.INVALID


def _objects(scanner: ObjectScanner) -> list[FoundObject]:
    """Objects that may hold the verdict: the reply itself, else those in fences, else those in the text."""
    if (whole := whole_object(scanner)) is not None:
        return [whole]
    if fenced := list(fenced_objects(scanner)):
        return fenced
    found: list[FoundObject] = []
    place = 0
    while (one := scanner.first(place)) is not None:
        found.append(one)
        place = one.end
    return found
