"""From samples to the loss's inputs: weights times advantages times the mixture's factors, and the anchor.

Legend: ``_N`` samples of a batch, ``_T`` tokens of a completion.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from viva.experts.estimators.base import Baseline, Estimator, FloatArray, Sample, Weights, capped_exp
from viva.experts.estimators.baselines import centred_rewards
from viva.experts.mixture import mixture_factors, strategy_counts

__all__ = ["Estimate", "choose_baseline", "estimate"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimate:
    """What the loss ``importance_sampling`` is fed for one sample; arrays of shape [T]."""

    advantages_T: FloatArray
    """Weight times advantage times mixture factor."""
    logprobs_T: FloatArray
    """The anchor."""
    weights_T: FloatArray | None
    """Effective weight at p_old on the unweighted advantage: the loss's own ratio included, the mixture factor not.
    ``None`` where only the loss will know it (no scoring pass was made)."""
    clipped_T: npt.NDArray[np.bool_]
    """Tokens whose weight was cut."""
    advantage: float
    """Mean unweighted advantage over the tokens; 0 means no signal."""


def choose_baseline(estimator: Estimator, baseline: Baseline | str | None) -> Baseline:
    """The baseline to use: the one asked for, or the estimator's default.

    Raises:
        ValueError: If the estimator does not allow it.
    """
    if baseline is None:
        return estimator.baselines[0]
    allowed = [str(each) for each in estimator.baselines]
    if str(baseline) not in allowed:
        raise ValueError(
            f"{estimator.name} works with baseline {' or '.join(allowed)}; got {str(baseline)!r}"
        )
    return Baseline(baseline)


def estimate(
    samples_N: Sequence[Sample],
    estimator: Estimator,
    *,
    baseline: Baseline | str | None = None,
    mixture: Mapping[str, float] | None = None,
) -> list[Estimate]:
    """The loss's inputs for every sample, in order. No samples give no estimates.

    Args:
        samples_N: One batch; baselines and mixtures are per prompt, mixture factors over the whole batch.
        estimator: Which.
        baseline: ``None`` takes the estimator's default.
        mixture: Relative weight per strategy (see `viva.experts.mixture`); ``None`` leaves every sample at 1.

    Raises:
        ValueError: If samples lack what the estimator needs, or baseline or mixture do not go with it.
    """
    chosen = choose_baseline(estimator, baseline)
    if estimator.combines_strategies and mixture is not None:
        raise ValueError(
            f"{estimator.name} weighs the strategies itself, by their numbers of samples; mixture weights on top would "
            "bias it. Leave them out and draw more samples from the strategy that should count more."
        )
    estimator.check(samples_N)
    factors = mixture_factors(strategy_counts(sample.strategy for sample in samples_N), mixture)
    weights_N = estimator.weights(samples_N)
    advantages_N = _advantages(samples_N, estimator, weights_N, chosen)
    return [
        _estimate(sample, estimator, weights, advantages_T, factors[sample.strategy])
        for sample, weights, advantages_T in zip(samples_N, weights_N, advantages_N, strict=True)
    ]


def _advantages(
    samples_N: Sequence[Sample], estimator: Estimator, weights_N: Sequence[Weights], baseline: Baseline
) -> list[FloatArray]:
    own_N = estimator.own_advantages(samples_N)
    if own_N is not None:
        return own_N
    means_N = [float(each.weights_T.mean()) if each.weights_T.size else 1.0 for each in weights_N]
    centred_N = centred_rewards(samples_N, means_N, baseline)
    return [
        np.full(len(sample), advantage) if sample.advantages_T is None else sample.advantages_T
        for sample, advantage in zip(samples_N, centred_N, strict=True)
    ]


def _estimate(
    sample: Sample, estimator: Estimator, weights: Weights, advantages_T: FloatArray, factor: float
) -> Estimate:
    logprobs_T = sample.sampling_logprobs_T if estimator.anchors_at_sampling else sample.old_T
    if logprobs_T is None:
        # only a sample that the estimator leaves out has weight 0 and no anchor; any will do
        logprobs_T = sample.sampling_logprobs_T
    effective_T = None if sample.old_T is None else weights.weights_T * capped_exp(sample.old_T - logprobs_T)
    return Estimate(
        advantages_T=weights.weights_T * advantages_T * factor,
        logprobs_T=logprobs_T,
        weights_T=effective_T,
        clipped_T=weights.clipped_T,
        advantage=float(advantages_T.mean()) if advantages_T.size else 0.0,
    )
