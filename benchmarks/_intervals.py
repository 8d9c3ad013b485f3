"""Intervals of a mean over a few runs, each with a seed of its own."""

import statistics
from collections.abc import Sequence

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Student's t, two-sided, 95 %, by degrees of freedom."""


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean."""
    return T_95[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5


def interval(values: Sequence[float], *, scale: float = 1.0, digits: int = 1) -> str:
    """Mean with its 95 % interval; one value alone has none."""
    mean = scale * statistics.mean(values)
    if len(values) < 2:
        return f"{mean:+.{digits}f}"
    half = scale * half_width(values)
    return f"{mean:+.{digits}f} ({mean - half:+.{digits}f} to {mean + half:+.{digits}f})"
