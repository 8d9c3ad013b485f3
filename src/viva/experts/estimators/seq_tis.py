"""``seq_tis``: the ratio of whole completions, cut from above."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from viva.experts.estimators.base import (
    Baseline,
    Estimator,
    Need,
    Sample,
    Weights,
    constant_weights,
    total_context_gap,
)

__all__ = ["SequenceTIS"]


@dataclass(frozen=True, kw_only=True)
class SequenceTIS(Estimator):
    """Weight ``min(W, cap)`` with ``W = exp(sum_t l_t)`` for every token, anchor ``p_old``.

    Truncated importance sampling (Ionides 2008) on sequences. Truncation makes ``E_q[w grad log p]`` differ from zero:
    subtracting a plain group mean would then add a bias along it, strong enough to reverse the update. Therefore the
    weighted mean is the only baseline.

    Raises:
        ValueError: If `cap` is not a finite number of 1 or more.
    """

    cap: float = 5.0

    name: ClassVar[str] = "seq_tis"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.OLD_LOGPROBS})
    is_unbiased: ClassVar[bool] = False
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline.WEIGHTED,)

    def __post_init__(self) -> None:
        """Check the cap."""
        if not (math.isfinite(self.cap) and self.cap >= 1):
            raise ValueError(f"seq_tis: cap must be a finite number of 1 or more; got {self.cap}")

    def weights(self, samples_N: Sequence[Sample]) -> list[Weights]:
        """Truncated sequence ratios."""
        log_cap = math.log(self.cap)
        logs_N = [total_context_gap(sample) for sample in samples_N]
        return [
            Weights(
                weights_T=constant_weights(sample, math.exp(min(log, log_cap))),
                clipped_T=np.full(len(sample), log > log_cap),
            )
            for sample, log in zip(samples_N, logs_N, strict=True)
        ]
