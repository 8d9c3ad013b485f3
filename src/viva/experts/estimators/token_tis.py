"""``token_tis``: token-wise ratios, cut from above."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from viva.experts.estimators.base import Baseline, Estimator, Need, Sample, Weights, context_gap

__all__ = ["TokenTIS"]


@dataclass(frozen=True, kw_only=True)
class TokenTIS(Estimator):
    """Weight ``min(exp(l_t), cap)`` for each token, anchor ``p_old``.

    Truncated importance sampling (Ionides 2008) as used between sampler and trainer by Yao et al. 2025 ("Your efficient
    RL framework secretly brings you off-policy RL training"). Tokens that only the hint made likely weigh nearly
    nothing, tokens that both contexts would say weigh about one. Biased (past tokens count as sampled), but bounded.

    Raises:
        ValueError: If `cap` is not a finite number of 1 or more.
    """

    cap: float = 2.0

    name: ClassVar[str] = "token_tis"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.OLD_LOGPROBS})
    is_unbiased: ClassVar[bool] = False
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline.STRATUM, Baseline.PROMPT_UNION, Baseline.WEIGHTED)

    def __post_init__(self) -> None:
        """Check the cap."""
        if not (math.isfinite(self.cap) and self.cap >= 1):
            raise ValueError(f"token_tis: cap must be a finite number of 1 or more; got {self.cap}")

    def weights(self, samples_N: Sequence[Sample]) -> list[Weights]:
        """Truncated ratios of every sample."""
        log_cap = math.log(self.cap)
        gaps_N = [context_gap(sample) for sample in samples_N]
        return [
            Weights(weights_T=np.exp(np.minimum(gap_T, log_cap)), clipped_T=gap_T > log_cap)
            for gap_T in gaps_N
        ]
