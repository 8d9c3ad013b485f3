"""Curves as values: points, and optionally the half-width of a band around each."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Z95", "Series", "smooth", "thin"]

Z95 = 1.959963984540054
"""Half-width of a 95 % interval in standard errors (normal approximation)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One named curve.

    Raises:
        ValueError: If the x values do not rise strictly, or the band has another length than the points.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    """(x, y) with strictly rising x; both finite."""
    band: tuple[float, ...] | None = None
    """Half-widths of the interval around each y, in units of y."""
    colour: int | None = None
    """Which of the colours it has; ``None``: that of its place among the curves of its chart."""
    is_dashed: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn."""
        xs = [x for x, _ in self.points]
        if any(left >= right for left, right in itertools.pairwise(xs)):
            raise ValueError(f"series {self.name!r}: x must rise from point to point; got {xs[:20]}")
        if self.band is not None and len(self.band) != len(self.points):
            raise ValueError(
                f"series {self.name!r}: band has {len(self.band)} half-widths for {len(self.points)} points; "
                "give one for each point, or none at all"
            )


def smooth(values: Sequence[float], factor: float) -> list[float]:
    """Exponential smoothing without the bias of its start: each value is a weighted mean of those up to it.

    Args:
        values: In order.
        factor: What the weight of a value falls by with every later one, in [0, 1).
    """
    total = weight = 0.0
    found: list[float] = []
    for value in values:
        total, weight = factor * total + value, factor * weight + 1.0
        found.append(total / weight)
    return found


def thin(points: Sequence[tuple[float, float]], max_points: int) -> list[tuple[float, float]]:
    """At most about ``max_points`` points that keep the curve's outline.

    Of each run of neighbours the first, lowest, highest and last point stay, so no spike disappears.
    """
    if len(points) <= max_points:
        return list(points)
    size = -(-4 * len(points) // max_points)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        run = points[start : start + size]
        lowest = min(run, key=lambda point: point[1])
        highest = max(run, key=lambda point: point[1])
        kept += sorted({run[0], lowest, highest, run[-1]})
    return kept
