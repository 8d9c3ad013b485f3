"""The loss's inputs for a batch of samples: estimator's weights times (reward minus baseline) times mixture factor.

The loss ``importance_sampling`` multiplies each advantage by ``exp(p_theta - logprobs)``. Anchored at ``p_old`` it sees
staleness only, so that whatever it clips is staleness (Hilton et al. 2021, arXiv 2110.00641), and the context gap
``l_t`` (see `viva.experts.samples`) is a weight on the advantage.

Baselines: weights of one strategy alone do not make ``E_q[w grad log p]`` zero, so a baseline that looks at the sample
itself, or that differs between strategies, is a bias and can reverse the gradient. The union baselines leave the sample
out and give each stratum its full share of the mixture: their expectation is the same for every sample::

    b_(-i) = sum_s (n_s / N) mean_(j in s, j != i) w_j r_j   /   sum_s (n_s / N) mean_(j in s, j != i) w_j

with ``w = 1`` for ``prompt_union``. Advantages are ``(r_i - b_(-i)) (1 - 1/N)``, which for one stratum of equal weights
is ``r_i - mean(r)``. For ``weighted`` the ratio leaves a difference of order ``1/N^2`` between strata.

Mixtures: with ``n_s`` samples of strategy s among ``N`` and weights ``w_s`` that sum to one, the mixture estimate is
``sum_s w_s mean_(i in s) g_i = (1/N) sum_i f_s(i) g_i`` with the factor ``f_s = w_s N / n_s``, whose mean is one.

Legend: ``_N`` samples of a batch or of one prompt, ``_T`` tokens of a completion. Logprobs are in nats.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from viva.experts.samples import FloatArray, Sample
from viva.rewards.credit import group_advantages

MAX_LOG_WEIGHT = 60.0
"""Weights end at ``exp(60)``: products with an advantage stay finite in the engine's float32."""


class Baseline(StrEnum):
    """The number that is subtracted from a reward."""

    STRATUM = "stratum"
    """The mean over the samples of the same prompt and strategy: the ordinary centring of a group."""
    PROMPT_UNION = "prompt_union"
    """The mean over the other samples of the prompt, whatever their strategy."""
    WEIGHTED = "weighted"
    """As ``PROMPT_UNION``, each sample counting by its weight: an estimate of the policy's own mean reward."""
    NONE = "none"
    """Nothing: the estimator makes its own advantages."""


class Need(StrEnum):
    """An estimator's input beside rewards and sampling logprobs."""

    OLD_LOGPROBS = "old_logprobs_T"
    """One scoring pass: the policy before the update, on the training context."""
    CONTEXT_LOGPROBS = "context_logprobs"
    """One scoring pass for every other context of the prompt."""


def capped_exp(log_weights: FloatArray | float) -> FloatArray:
    """``exp``, cut at `MAX_LOG_WEIGHT`."""
    return np.exp(np.minimum(log_weights, MAX_LOG_WEIGHT))


def constant_weights(sample: Sample, weight: float) -> FloatArray:
    """The same weight for every token, shape [T]."""
    return np.full(len(sample), weight, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWeights:
    """An estimator's weights for one sample."""

    weights_T: FloatArray
    """Factors on the advantage, shape [T], never negative."""
    clipped_T: npt.NDArray[np.bool_]
    """Tokens whose weight was cut."""

    @classmethod
    def constant(cls, sample: Sample, weight: float, *, is_clipped: bool = False) -> "SampleWeights":
        """The same weight for every token of a sample."""
        return cls(weights_T=constant_weights(sample, weight), clipped_T=np.full(len(sample), is_clipped))

    @classmethod
    def of_log(cls, sample: Sample, log_weight: float) -> "SampleWeights":
        """One weight for every token, given its log and cut at `MAX_LOG_WEIGHT`."""
        weight = float(capped_exp(log_weight))
        return cls.constant(sample, weight, is_clipped=log_weight > MAX_LOG_WEIGHT)


def bounded(default: float, *, least: float, above: bool = False) -> Any:
    """An estimator's option that is a finite number of `least` or more, or with `above` greater than it.

    Estimators raise ``ValueError`` for any other.
    """
    return field(default=default, metadata={"least": least, "above": above})


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """Weights and anchors for a batch of samples. Subclasses state formula and source."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[Need]] = frozenset({Need.OLD_LOGPROBS})
    is_unbiased: ClassVar[bool] = False
    """Whether the expected first update is the gradient of expected reward under x_train, whatever the context gap,
    with any constant as baseline. Later updates on the same batch add staleness."""
    baselines: ClassVar[tuple[Baseline, ...]]
    """Allowed baselines; the first is the default."""
    combines_strategies: ClassVar[bool] = False
    """Whether the weights already make one estimate of all strategies, so that mixture weights must not be added."""
    anchors_at_sampling: ClassVar[bool] = False
    """Whether the loss gets the sampling logprobs instead of p_old's, and applies the context gap by itself."""

    def __post_init__(self) -> None:
        """Check the options that have a lowest value, see `bounded`."""
        for each in fields(self):
            if "least" in each.metadata:
                self._check_option(each.name, **each.metadata)

    def _check_option(self, name: str, least: float, *, above: bool) -> None:
        value = getattr(self, name)
        if math.isfinite(value) and (value > least if above else value >= least):
            return
        kind = "positive finite number" if above else "finite number"
        bound = "" if above or least == -math.inf else f" of {least:g} or more"
        raise ValueError(f"{self.name}: {name} must be a {kind}{bound}; got {value}")

    def weights(self, samples_N: Sequence[Sample]) -> list[SampleWeights]:
        """Weights of every sample, in order. The samples have what the estimator `needs`."""
        return [self.weigh(sample) for sample in samples_N]

    def weigh(self, sample: Sample) -> SampleWeights:
        """Weights of one sample, where they do not depend on the others; by default 1."""
        return SampleWeights.constant(sample, 1.0)

    def own_advantages(self, samples_N: Sequence[Sample]) -> list[FloatArray] | None:
        """Advantages of an estimator whose baseline is ``NONE``, each of shape [T]; others return ``None``."""
        return None

    def check(self, samples_N: Sequence[Sample]) -> None:
        """Refuse samples without what the estimator `needs`, by a `ValueError`."""
        if Need.OLD_LOGPROBS in self.needs:
            self._check_each(samples_N, lambda sample: sample.old_T is not None, "old_logprobs_T")

    def _check_each(self, samples_N: Sequence[Sample], is_met: Callable[[Sample], bool], wanted: str) -> None:
        for index, sample in enumerate(samples_N):
            if not is_met(sample):
                raise ValueError(
                    f"{self.name} needs {wanted}; sample {index} (strategy {sample.strategy!r}) does not have it. "
                    "Score the completion in a pass before the update, or use importance_sampling, which needs none."
                )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimate:
    """Inputs of the loss ``importance_sampling`` for one sample; arrays of shape [T]."""

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
    """The baseline asked for, or the estimator's default; `ValueError` if the estimator does not allow it."""
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
    """The loss's inputs for every sample of a batch, in order. No samples give no estimates.

    Baselines and mixtures are per prompt, mixture factors over the whole batch. Without a baseline the estimator's
    default is taken; `mixture` is the relative weight per strategy (see above), without it every sample counts once.

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
    factors = mixture_factors((sample.strategy for sample in samples_N), mixture)
    weights_N = estimator.weights(samples_N)
    advantages_N = _advantages(samples_N, estimator, weights_N, chosen)
    return [
        _estimate(sample, estimator, weights, advantages_T, factors[sample.strategy])
        for sample, weights, advantages_T in zip(samples_N, weights_N, advantages_N, strict=True)
    ]


def _advantages(
    samples_N: Sequence[Sample], estimator: Estimator, weights_N: Sequence[SampleWeights], baseline: Baseline
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
    sample: Sample, estimator: Estimator, weights: SampleWeights, advantages_T: FloatArray, factor: float
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


def _without_self(values_N: FloatArray) -> FloatArray:
    """Sum of the others, for each entry; from both ends, so that a huge entry does not drown the rest."""
    before = np.concatenate([[0.0], np.cumsum(values_N[:-1])])
    after = np.concatenate([np.cumsum(values_N[:0:-1])[::-1], [0.0]])
    return before + after


def _stratified_sums(values_N: FloatArray, strata: Sequence[Sequence[int]]) -> FloatArray:
    """For each sample, the sum over all others with its own stratum scaled up to its full size."""
    totals = [float(values_N[members].sum()) for members in strata]
    sums_N = np.zeros_like(values_N)
    for index, members in enumerate(strata):
        elsewhere = sum(total for other, total in enumerate(totals) if other != index)
        own = _without_self(values_N[members]) * len(members) / max(len(members) - 1, 1)
        sums_N[members] = own + elsewhere
    return sums_N


def _union_advantages(
    rewards_N: FloatArray, weights_N: FloatArray, strata: Sequence[Sequence[int]]
) -> FloatArray:
    count = len(rewards_N)
    if count < 2 or (rewards_N == rewards_N[0]).all():
        return np.zeros(count)
    mass_N = _stratified_sums(weights_N, strata)
    plain_N = _stratified_sums(rewards_N, strata) / _stratified_sums(np.ones(count), strata)
    weighted_N = _stratified_sums(weights_N * rewards_N, strata)
    # where all others weigh nothing there is no weighted mean; their plain mean is the next best
    baselines_N = np.where(mass_N > 0, weighted_N / np.where(mass_N > 0, mass_N, 1.0), plain_N)
    return (rewards_N - baselines_N) * (1 - 1 / count)


def _places(keys: Sequence[Hashable]) -> list[list[int]]:
    """Indices of equal keys, in order of first appearance."""
    places: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        places.setdefault(key, []).append(index)
    return list(places.values())


def centred_rewards(
    samples_N: Sequence[Sample], weights_N: Sequence[float], baseline: Baseline
) -> list[float]:
    """Reward minus baseline of every sample, in order; exactly 0 where all rewards that are compared are equal.

    A sample without company (alone in its stratum or prompt) has advantage 0. The weights, one per sample and not
    negative, matter to ``Baseline.WEIGHTED`` alone.
    """
    if baseline is Baseline.NONE:
        return [sample.reward for sample in samples_N]
    advantages_N = [0.0] * len(samples_N)
    if baseline is Baseline.STRATUM:
        for members in _places([(sample.prompt, sample.strategy) for sample in samples_N]):
            centred = group_advantages([samples_N[index].reward for index in members])
            for index, advantage in zip(members, centred, strict=True):
                advantages_N[index] = advantage
        return advantages_N
    is_weighted = baseline is Baseline.WEIGHTED
    for members in _places([sample.prompt for sample in samples_N]):
        rewards = np.array([samples_N[index].reward for index in members])
        weights = np.array([weights_N[index] if is_weighted else 1.0 for index in members])
        strata = _places([samples_N[index].strategy for index in members])
        for index, advantage in zip(members, _union_advantages(rewards, weights, strata), strict=True):
            advantages_N[index] = float(advantage)
    return advantages_N


def check_mixture(mixture: Mapping[str, float]) -> None:
    """Refuse weights that define no mixture (none, negative, not finite, or all zero) by a `ValueError`."""
    if not mixture:
        raise ValueError(
            "mixture weights must name at least one strategy; leave them out to count every sample once"
        )
    for strategy, weight in sorted(mixture.items()):
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(
                f"the mixture weight of {strategy!r} must be a finite number of 0 or more; got {weight}"
            )
    if not any(mixture.values()):
        raise ValueError(f"one mixture weight must be above 0; got {dict(mixture)}")


def mixture_factors(strategies: Iterable[str], mixture: Mapping[str, float] | None) -> dict[str, float]:
    """``f_s = w_s N / n_s`` by strategy, in the order of names, given that of every sample; 1 without a mixture.

    Weights are scaled to sum to one over the strategies that have samples: one with ``n_s = 0`` leaves its share to the
    others. When only strategies of weight 0 have samples, all factors are 0.

    Raises:
        ValueError: If a strategy has samples but no weight, or the weights define no mixture.
    """
    counts = dict(sorted(Counter(strategies).items()))
    if mixture is None:
        return dict.fromkeys(counts, 1.0)
    check_mixture(mixture)
    if missing := sorted(set(counts) - set(mixture)):
        raise ValueError(
            f"strategy {missing[0]!r} has samples but no mixture weight; weights are given for {sorted(mixture)}. "
            "Give it a weight (0 to measure it without training on it)."
        )
    largest = max(mixture.values())
    # by the largest first: shares of denormal or huge weights are still shares
    scaled = {strategy: mixture[strategy] / largest for strategy in counts}
    total_weight = math.fsum(scaled.values())
    if total_weight == 0:
        return dict.fromkeys(counts, 0.0)
    num_samples = sum(counts.values())
    return {
        strategy: scaled[strategy] / total_weight * num_samples / count for strategy, count in counts.items()
    }
