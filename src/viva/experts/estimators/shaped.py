"""``shaped``: ratios bent so that unlikely tokens of good samples still teach."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from viva.experts.estimators.base import Baseline, Estimator, Need, Sample, Weights, context_gap

__all__ = ["Shaped"]


@dataclass(frozen=True, kw_only=True)
class Shaped(Estimator):
    """Weight ``rho_t / (rho_t + gamma)`` with ``rho_t = exp(l_t)``, anchor ``p_old``; weight 1 for on-policy samples.

    Policy shaping of LUFFY (Yan et al. 2025, arXiv 2504.14945), which puts p_theta itself in the place of the ratio
    because its experts' probabilities are unknown; ours are known. Below ``gamma`` the weight falls like the ratio,
    above it the weight is nearly one. The paper centres over all samples of a prompt (``prompt_union``); the default
    is ``stratum``, where failures under the same hint cancel the hint's style.

    Raises:
        ValueError: If `gamma` is not a positive finite number.
    """

    gamma: float = 0.1

    name: ClassVar[str] = "shaped"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.OLD_LOGPROBS})
    is_unbiased: ClassVar[bool] = False
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline.STRATUM, Baseline.PROMPT_UNION, Baseline.WEIGHTED)

    def __post_init__(self) -> None:
        """Check gamma."""
        if not (math.isfinite(self.gamma) and self.gamma > 0):
            raise ValueError(f"shaped: gamma must be a positive finite number; got {self.gamma}")

    def weights(self, samples_N: Sequence[Sample]) -> list[Weights]:
        """Shaped ratios of every sample; ``sigmoid(l_t - log gamma)`` is the formula without overflow."""
        return [
            Weights(
                weights_T=np.ones(len(sample)) if sample.on_policy else self._shape(sample),
                clipped_T=np.zeros(len(sample), dtype=np.bool_),
            )
            for sample in samples_N
        ]

    def _shape(self, sample: Sample) -> np.ndarray:
        return np.exp(-np.logaddexp(0.0, math.log(self.gamma) - context_gap(sample)))
