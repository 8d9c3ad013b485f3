"""Tokens that models read and sample, counted where a model is asked: the same for every engine.

A prompt counts in full for each of its samples, whatever a cache serves of it. An answer taken from a run's journal
counts as it did when it was sampled, so a resumed run has the figures of one that was never stopped.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

Role = Literal["policy", "judge", "scorer"]
"""The reader: the agents that are trained, the judge of solutions, or the scorer of a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens that passed through a model."""

    prompt_tokens: int = 0
    sampled_tokens: int = 0

    @property
    def total(self) -> int:
        """Read and sampled."""
        return self.prompt_tokens + self.sampled_tokens

    def __add__(self, other: Usage) -> Usage:
        """The tokens of both."""
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            sampled_tokens=self.sampled_tokens + other.sampled_tokens,
        )


class Meter:
    """Adds up what is counted, by role."""

    def __init__(self) -> None:
        self.by_role: dict[Role, Usage] = {}

    def add(self, role: Role, usage: Usage) -> None:
        """Count one answer."""
        self.by_role[role] = self.by_role.get(role, Usage()) + usage

    @property
    def total(self) -> Usage:
        """The tokens of all roles."""
        return sum(self.by_role.values(), Usage())


_meters: ContextVar[tuple[Meter, ...]] = ContextVar("viva_token_meters", default=())


@contextmanager
def metering(meter: Meter) -> Generator[None]:
    """Count with one more meter while it lasts, also in tasks that are started meanwhile."""
    token = _meters.set((*_meters.get(), meter))
    try:
        yield
    finally:
        _meters.reset(token)


def count_tokens(role: Role, *, prompt: int, sampled: int) -> None:
    """Count an answer with all meters that there are."""
    for meter in _meters.get():
        meter.add(role, Usage(prompt_tokens=prompt, sampled_tokens=sampled))
