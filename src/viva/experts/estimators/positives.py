"""``positives``: keep what succeeded and imitate it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from viva.experts.estimators.base import (
    Baseline,
    Estimator,
    FloatArray,
    Need,
    Sample,
    constant_weights,
)

__all__ = ["Positives"]


@dataclass(frozen=True, kw_only=True)
class Positives(Estimator):
    """Weight 1, advantage 1 for finished samples with a reward above `threshold`, 0 for all others; anchor ``p_old``.

    The filter of STaR (Zelikman et al. 2022, arXiv 2203.14465) and ReST-EM (Singh et al. 2023, arXiv 2312.06585):
    maximum likelihood on successes. Learns fastest where the policy hardly ever succeeds by itself, and learns
    whatever the hint put into successful answers, also what earns nothing (its style). There is no contrast that
    could take that away again, so watch the leak rate.

    Raises:
        ValueError: If `threshold` is not a finite number.
    """

    threshold: float = 0.0

    name: ClassVar[str] = "positives"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.OLD_LOGPROBS})
    is_unbiased: ClassVar[bool] = False
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline.NONE,)

    def __post_init__(self) -> None:
        """Check the threshold."""
        if not math.isfinite(self.threshold):
            raise ValueError(f"positives: threshold must be a finite number; got {self.threshold}")

    def own_advantages(self, samples_N: Sequence[Sample]) -> list[FloatArray]:
        """One or zero."""
        return [
            constant_weights(sample, float(sample.finished and sample.reward > self.threshold))
            for sample in samples_N
        ]
