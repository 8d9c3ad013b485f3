"""``importance_sampling``: stored sampling logprobs straight into the token-wise loss."""

from dataclasses import dataclass
from typing import ClassVar

from viva.experts.estimators.base import Baseline, Estimator, Need

__all__ = ["ImportanceSampling"]


@dataclass(frozen=True, kw_only=True)
class ImportanceSampling(Estimator):
    """Weight 1, anchor ``log q(y_t | x_sample)``: the loss makes it ``p_theta(y_t | x_train) / q(y_t | x_sample)``.

    The plan of the system: weights that need no scoring pass (the loop makes one for the figures), one ratio for
    staleness and context gap. The ratio is per token, so past
    tokens count as they were sampled: exact only where the contexts are equal. Nothing is truncated. Do not
    combine it with a clipping loss: clipping the whole ratio drops what should be unlearnt and keeps what should be
    imitated (see docs/estimators.md).
    """

    name: ClassVar[str] = "importance_sampling"
    needs: ClassVar[frozenset[Need]] = frozenset()
    is_unbiased: ClassVar[bool] = False
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline.STRATUM, Baseline.PROMPT_UNION)
    anchors_at_sampling: ClassVar[bool] = True
