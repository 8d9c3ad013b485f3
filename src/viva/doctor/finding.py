"""What is found of an engine."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Answer", "Finding", "WrongAnswerError"]

Answer: TypeAlias = Literal["yes", "no", "wrong"]
"""``no``: the engine refuses or fails. ``wrong``: it answers, but not with what the API promises."""


class WrongAnswerError(Exception):
    """The engine answers, but not with what the API promises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What became of one probe."""

    name: str
    answer: Answer
    detail: str
