"""``seq_is``: the exact ratio of whole completions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from viva.experts.estimators.base import (
    MAX_LOG_WEIGHT,
    Baseline,
    Estimator,
    Need,
    Sample,
    Weights,
    capped_exp,
    constant_weights,
    total_context_gap,
)

__all__ = ["SequenceIS"]


@dataclass(frozen=True, kw_only=True)
class SequenceIS(Estimator):
    """Weight ``W = exp(sum_t l_t)`` for every token of the completion, anchor ``p_old``.

    Importance sampling as in every textbook; the "unbiased" form of the plan. Its variance grows exponentially with
    the gap: already at two nats a handful of samples carry the whole batch. For tests and tiny gaps only, hence
    the refusal. (Weights end at ``exp(60)``, far beyond any use.)

    Raises:
        ValueError: If `max_gap` is not positive; from `check`, if a strategy's mean gap ``E_q[-log W]`` (the divergence
            of q from the policy on the training context, in nats) is above `max_gap` and `force` is not set.
    """

    max_gap: float = 2.0
    force: bool = False

    name: ClassVar[str] = "seq_is"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.OLD_LOGPROBS})
    is_unbiased: ClassVar[bool] = True
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline.WEIGHTED, Baseline.PROMPT_UNION, Baseline.STRATUM)

    def __post_init__(self) -> None:
        """Check the limit."""
        if not self.max_gap > 0:
            raise ValueError(f"seq_is: max_gap must be positive (nats); got {self.max_gap}")

    def weights(self, samples_N: Sequence[Sample]) -> list[Weights]:
        """Sequence ratios."""
        logs_N = [total_context_gap(sample) for sample in samples_N]
        return [
            Weights(
                weights_T=constant_weights(sample, float(capped_exp(log))),
                clipped_T=np.full(len(sample), log > MAX_LOG_WEIGHT),
            )
            for sample, log in zip(samples_N, logs_N, strict=True)
        ]

    def check(self, samples_N: Sequence[Sample]) -> None:
        """Refuse large gaps."""
        super().check(samples_N)
        gaps: dict[str, list[float]] = {}
        for sample in samples_N:
            gaps.setdefault(sample.strategy, []).append(-total_context_gap(sample))
        for strategy, values in sorted(gaps.items()):
            gap = math.fsum(values) / len(values)
            if gap > self.max_gap and not self.force:
                raise ValueError(
                    f"seq_is: strategy {strategy!r} has a mean context gap of {gap:.2f} nats, at most {self.max_gap} "
                    "are allowed: beyond that a few samples carry all the weight. Use balance or token_tis, "
                    "or set force=True to see for yourself."
                )
