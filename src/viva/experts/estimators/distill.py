"""``distill``: the policy under the hint teaches the policy without it, on the latter's own samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from viva.experts.estimators.base import (
    Baseline,
    Estimator,
    FloatArray,
    Need,
    Sample,
    Weights,
    constant_weights,
)

__all__ = ["Distill"]


@dataclass(frozen=True, kw_only=True)
class Distill(Estimator):
    """On-policy reverse KL: advantage ``a_t = log p(y_t | x_hint) - log p_old(y_t | x_train)``, anchor ``p_old``.

    Only on-policy samples teach (others get weight 0); no ratio is needed at any gap, and rewards are not used. The
    teacher is the same model under the context named `teacher`, scored on the student's completions: on-policy
    distillation (Agarwal et al. 2024, arXiv 2306.13649) with a privileged self-teacher (OPSD, arXiv 2601.18734;
    SDFT, arXiv 2601.19897). With ``horizon="return"`` a token gets ``sum_(u >= t) a_u``, whose expected update is
    exactly the gradient of ``-KL(p(. | x_train) || p(. | x_hint))``; ``"token"`` keeps ``a_t``: each step's own
    divergence at the states the student visits, biased for the whole and of much lower variance.

    Raises:
        ValueError: If `coefficient` is not a positive finite number or `horizon` has no meaning.
    """

    teacher: str
    coefficient: float = 1.0
    horizon: Literal["token", "return"] = "token"

    name: ClassVar[str] = "distill"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.CONTEXT_LOGPROBS})
    is_unbiased: ClassVar[bool] = False
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline.NONE,)

    def __post_init__(self) -> None:
        """Check the options."""
        if not (math.isfinite(self.coefficient) and self.coefficient > 0):
            raise ValueError(f"distill: coefficient must be a positive finite number; got {self.coefficient}")
        if self.horizon not in ("token", "return"):
            raise ValueError(f"distill: horizon must be 'token' or 'return'; got {self.horizon!r}")

    def weights(self, samples_N: Sequence[Sample]) -> list[Weights]:
        """One for on-policy samples, zero for the others."""
        return [
            Weights(
                weights_T=constant_weights(sample, float(sample.on_policy)),
                clipped_T=np.zeros(len(sample), dtype=np.bool_),
            )
            for sample in samples_N
        ]

    def own_advantages(self, samples_N: Sequence[Sample]) -> list[FloatArray]:
        """Log-ratio of teacher and student, per token."""
        return [
            self._advantages(sample) if sample.on_policy else constant_weights(sample, 0.0)
            for sample in samples_N
        ]

    def _advantages(self, sample: Sample) -> FloatArray:
        assert sample.old_T is not None
        gap_T = self.coefficient * (sample.context_logprobs[self.teacher] - sample.old_T)
        return np.cumsum(gap_T[::-1])[::-1] if self.horizon == "return" else gap_T

    def check(self, samples_N: Sequence[Sample]) -> None:
        """There must be on-policy samples, each with finite scores of the teacher."""
        if samples_N and not any(sample.on_policy for sample in samples_N):
            raise ValueError(
                "distill learns from on-policy samples only, and the batch has none: add the iid strategy"
            )
        student_N = [sample for sample in samples_N if sample.on_policy]
        self._check_each(
            student_N,
            lambda sample: self.teacher in sample.context_logprobs,
            f"context_logprobs[{self.teacher!r}]",
        )
        for sample in student_N:
            if not np.isfinite(sample.context_logprobs[self.teacher]).all():
                raise ValueError(
                    f"distill: the teacher {self.teacher!r} gives a sampled token probability 0; "
                    "score the teacher without truncation (top_p = 1, top_k = -1)"
                )
