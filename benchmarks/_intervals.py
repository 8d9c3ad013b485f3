"""95 % intervals over a few runs, each with a seed of its own: of a mean, of a share, and of a number of events."""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % interval of Student's t; without width for a single value."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, mean, mean
    half = float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)
    return mean, mean - half, mean + half


def interval(values: Sequence[float], *, scale: float = 1.0, digits: int = 1) -> str:
    """`mean_interval` as text; one value alone has none."""
    mean, *ends = (f"{scale * value:+.{digits}f}" for value in mean_interval(values))
    return mean if len(values) < 2 else f"{mean} ({' to '.join(ends)})"


def wilson(hits: int, count: int) -> tuple[float, float]:
    """Wilson's interval of a share (Journal of the American Statistical Association 22, 1927)."""
    z, share = 1.959964, hits / count
    centre = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (centre - half) / (1 + z * z / count), (centre + half) / (1 + z * z / count)


def poisson(events: int) -> tuple[float, float]:
    """The exact interval of an expected number of events (Garwood, Biometrika 28, 1936)."""
    low, high = stats.chi2.ppf((0.025, 0.975), (2 * events, 2 * events + 2)) / 2
    return (float(low) if events else 0.0), float(high)
