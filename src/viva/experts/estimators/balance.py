"""``balance``: one estimate of all strategies, each completion weighed against everything that could have drawn it."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
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
)

__all__ = ["Balance"]


@dataclass(frozen=True, kw_only=True)
class Balance(Estimator):
    """Weight ``w = p_old(y | x_train) / sum_c (n_c / N) q_c(y)`` for every token, over the contexts c of the prompt.

    The balance heuristic of multiple importance sampling (Veach and Guibas 1995), also known as the deterministic
    mixture (Hesterberg 1995; Owen and Zhou 2000): unbiased for the samples of a prompt taken together, and with an
    on-policy share a the weights never exceed 1/a. Where the gap is tens of nats the hinted samples' weights
    vanish and what is left is the on-policy share: safe, but then the hints teach nothing (see the diagnostics).

    Every completion is scored under the other contexts of its prompt; a context that is itself sampled (feedback)
    counts as it was realised. The on-policy context needs no scoring beyond ``old_logprobs_T``. The weights are the
    mixture: no further mixture weights. A baseline per stratum would break unbiasedness and is not offered. The
    ``weighted`` baseline, being a ratio, leaves a bias of order 1/N^2 and takes away most of the variance;
    ``prompt_union`` is exactly unbiased and, where hints succeed more often than the policy, very noisy.
    """

    name: ClassVar[str] = "balance"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.OLD_LOGPROBS, Need.CONTEXT_LOGPROBS})
    is_unbiased: ClassVar[bool] = True
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline.WEIGHTED, Baseline.PROMPT_UNION)
    combines_strategies: ClassVar[bool] = True

    def weights(self, samples_N: Sequence[Sample]) -> list[Weights]:
        """Mixture ratios."""
        contexts = _contexts(samples_N)
        on_policy = _on_policy_contexts(samples_N)
        weights_N: list[Weights] = []
        for sample in samples_N:
            log = self._log_weight(sample, contexts[sample.prompt], on_policy)
            weights_N.append(
                Weights(
                    weights_T=constant_weights(sample, float(capped_exp(log))),
                    clipped_T=np.full(len(sample), log > MAX_LOG_WEIGHT),
                )
            )
        return weights_N

    @staticmethod
    def _log_weight(
        sample: Sample, counts: Counter[str], on_policy: frozenset[tuple[Hashable, str]]
    ) -> float:
        assert sample.old_T is not None  # check() has seen to it
        old = float(sample.old_T.sum())
        logs: list[float] = []
        for context, count in sorted(counts.items()):
            if context == sample.context_name:
                scored = float(sample.sampling_logprobs_T.sum())
            elif context in sample.context_logprobs:
                scored = float(sample.context_logprobs[context].sum())
            else:
                assert (sample.prompt, context) in on_policy
                scored = old
            logs.append(math.log(count / counts.total()) + scored)
        top = max(logs)
        return old - top - math.log(math.fsum(math.exp(log - top) for log in logs))

    def check(self, samples_N: Sequence[Sample]) -> None:
        """Every sample needs its score under every other context of its prompt."""
        super().check(samples_N)
        contexts = _contexts(samples_N)
        on_policy = _on_policy_contexts(samples_N)
        for index, sample in enumerate(samples_N):
            for context in sorted(contexts[sample.prompt]):
                is_known = context == sample.context_name or context in sample.context_logprobs
                if not is_known and (sample.prompt, context) not in on_policy:
                    raise ValueError(
                        f"balance needs context_logprobs of every context of a prompt; sample {index} (strategy "
                        f"{sample.strategy!r}) has no score under {context!r}. Score it there, or use token_tis."
                    )


def _contexts(samples_N: Sequence[Sample]) -> dict[Hashable, Counter[str]]:
    """Per prompt, how many samples were drawn under each realised context."""
    counts: dict[Hashable, Counter[str]] = {}
    for sample in samples_N:
        counts.setdefault(sample.prompt, Counter())[sample.context_name] += 1
    return counts


def _on_policy_contexts(samples_N: Sequence[Sample]) -> frozenset[tuple[Hashable, str]]:
    """Prompts and contexts that draw from p_old itself."""
    return frozenset((sample.prompt, sample.context_name) for sample in samples_N if sample.on_policy)
