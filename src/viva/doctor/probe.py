"""One question to an engine."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from viva.doctor.bench import Bench

__all__ = ["Probe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One question to an engine."""

    name: str
    ask: Callable[[Bench], Awaitable[str]]
    """Returns what to tell of an engine that does it. Raises `WrongAnswerError`, or whatever the engine raises."""
