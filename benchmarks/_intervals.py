"""95 % intervals over a few runs, each with a seed of its own: of a mean, of a share, and of a number of events."""

import math
import statistics
from collections.abc import Sequence

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
T_95 |= {
    10: 2.228,
    11: 2.201,
    12: 2.179,
    13: 2.160,
    14: 2.145,
    15: 2.131,
    16: 2.120,
    17: 2.110,
    18: 2.101,
    19: 2.093,
}
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


def wilson(hits: int, count: int) -> tuple[float, float]:
    """Wilson's interval of a share (Journal of the American Statistical Association 22, 1927)."""
    z, share = 1.959964, hits / count
    centre = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (centre - half) / (1 + z * z / count), (centre + half) / (1 + z * z / count)


def poisson(events: int) -> tuple[float, float]:
    """The exact interval of an expected number of events (Garwood, Biometrika 28, 1936)."""
    from scipy.stats import chi2

    return (float(chi2.ppf(0.025, 2 * events)) / 2 if events else 0.0), float(
        chi2.ppf(0.975, 2 * events + 2)
    ) / 2
