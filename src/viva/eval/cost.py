"""The cost of a part of an evaluation, told beside its figures."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from viva.judging.usage import Meter, metering


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Tokens; with the same command they are the same again."""

    sampled_tokens: int
    """By all models that were asked."""
    total_tokens: int
    """Read and sampled, every prompt in full."""


@dataclass(kw_only=True)
class Costs:
    """Costs of an evaluation's parts, by name."""

    tokens: dict[str, Cost] = field(default_factory=dict[str, Cost])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Told, and kept in no file: they depend on the clock."""

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        """Count what is done meanwhile."""
        meter, started = Meter(), time.monotonic()
        with metering(meter):
            yield
        used = meter.total
        self.tokens[name] = Cost(sampled_tokens=used.sampled_tokens, total_tokens=used.total)
        self.seconds[name] = time.monotonic() - started

    def seconds_text(self) -> str:
        """One line."""
        return f"seconds: {', '.join(f'{name} {seconds:.1f}' for name, seconds in self.seconds.items())}"


def cost_lines(costs: Mapping[str, Cost]) -> list[str]:
    """One line of all parts, or none."""
    parts = [
        f"{name} {cost.sampled_tokens:,} tokens sampled, {cost.total_tokens:,} read and sampled"
        for name, cost in costs.items()
    ]
    return [f"cost: {'; '.join(parts)}"] if parts else []
