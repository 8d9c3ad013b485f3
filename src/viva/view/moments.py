"""Means, spreads and correlations of values that come one conversation at a time and are not kept."""

import math
from collections.abc import Sequence

__all__ = ["Spread", "WithinCorrelation"]


class Spread:
    """Mean and standard deviation of a stream of numbers (Welford, 1962)."""

    def __init__(self) -> None:
        self.count = 0
        self._mean = 0.0
        self._squares = 0.0

    def add(self, value: float) -> None:
        """Count one more."""
        self.count += 1
        before = value - self._mean
        self._mean += before / self.count
        self._squares += before * (value - self._mean)

    @property
    def mean(self) -> float | None:
        """``None`` without values."""
        return self._mean if self.count else None

    @property
    def deviation(self) -> float | None:
        """Of the values themselves (population); ``None`` without values."""
        return math.sqrt(self._squares / self.count) if self.count else None


class WithinCorrelation:
    """Pearson's correlation of two values, each less its mean over the conversation.

    This is what training sees of a reward, for its baseline is such a mean. That some problems are easier, and all
    values of their conversations higher, adds nothing to it.
    """

    def __init__(self) -> None:
        self.count = 0
        """Pairs of values in conversations with at least two of them; a lone pair says nothing."""
        self._xx = 0.0
        self._xy = 0.0
        self._yy = 0.0

    def add(self, pairs: Sequence[tuple[float, float]]) -> None:
        """Count the pairs of one conversation."""
        if len(pairs) < 2:
            return
        self.count += len(pairs)
        xs, ys = (_centred([pair[side] for pair in pairs]) for side in (0, 1))
        self._xx += math.fsum(x * x for x in xs)
        self._xy += math.fsum(x * y for x, y in zip(xs, ys, strict=True))
        self._yy += math.fsum(y * y for y in ys)

    @property
    def value(self) -> float | None:
        """In [-1, 1]; ``None`` if one of the two never varies within a conversation."""
        if self._xx == 0.0 or self._yy == 0.0:
            return None
        return max(-1.0, min(1.0, self._xy / math.sqrt(self._xx * self._yy)))


def _centred(values: list[float]) -> list[float]:
    """Exact zeros where all values are equal."""
    if len(set(values)) == 1:
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]
