"""Per-strategy off-policy diagnostics (effective sample size, ratio quantiles), a guard, and a recommendation.

Legend: ``_N`` samples of a batch, ``_T`` tokens of a completion. Logprobs are in nats.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np

from viva.experts.estimation import Baseline, Estimate
from viva.experts.estimators import DEFAULT_ESTIMATOR, make_estimator
from viva.experts.samples import FloatArray, Sample, context_gap

QUANTILES = (0.05, 0.5, 0.95)

LIVING_SHARE = 0.1
"""Mean ``balance`` weight of a strategy below which its samples are as good as not drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyDiagnostics:
    """One strategy's part of a batch. Shares and rates are of samples unless tokens are named.

    ``None`` where a figure needs a scoring pass that was not made, or has no samples.
    """

    num_samples: int
    """n_s."""
    num_tokens: int
    reward_mean: float
    reward_mean_stderr: float | None
    """Standard errors are over prompts, see `clustered_stderr`."""
    zero_advantage_share: float
    finish_rate: float
    clipped_share: float
    """Share of tokens whose weight was cut."""
    weight_mean: float | None
    """Mean effective weight per token: far below 1, the strategy's samples count for nothing."""
    effective_sample_size: float | None
    """``(sum w)^2 / (n sum w^2)`` over tokens, between 0 and 1."""
    largest_weight_share: float | None
    """Share of the heaviest sample in the strategy's summed weight."""
    total_gap_mean: float | None
    """Mean of ``log W = log p_old(y | x_train) - log q(y | x_sample)``: minus the divergence of q from the policy."""
    total_gap_mean_stderr: float | None
    total_gap_quantiles: tuple[float, ...] | None
    """`QUANTILES` of ``log W``."""
    token_gap_mean: float | None
    token_gap_quantiles: tuple[float, ...] | None
    """`QUANTILES` of ``l_t``."""
    hint_reliance: float | None
    """Mean ``l_t`` over samples with positive advantage: how much less likely the policy finds a token of what it is
    about to learn once the hint is gone."""
    hint_reliance_stderr: float | None
    self_check: float | None
    """Mean ``|log p - log q|`` of samples that the trainer scored as they were sampled: behind the same context, at the
    same temperature. It should be 0 up to rounding; else template, temperature, weights or alignment are wrong."""

    def metrics(self) -> dict[str, float]:
        """Flat figures; quantiles as ``total_gap_p05`` and so on, unknown ones left out."""
        flat: dict[str, float] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, tuple):
                name = each.name.removesuffix("_quantiles")
                flat |= {
                    f"{name}_p{round(100 * q):02d}": number
                    for q, number in zip(QUANTILES, value, strict=True)
                }
            elif value is not None:
                flat[each.name] = value
        return flat


Diagnostics: TypeAlias = dict[str, StrategyDiagnostics]
"""All strategies of a batch, by name, in the order of the names."""


def flat_metrics(diagnostics: Diagnostics) -> dict[str, float]:
    """``experts/<strategy>/<figure>``."""
    return {
        f"experts/{strategy}/{name}": value
        for strategy, figures in diagnostics.items()
        for name, value in figures.metrics().items()
    }


def effective_sample_size(weights: FloatArray) -> float:
    """``(sum w)^2 / (n sum w^2)`` (Kish 1965): 1 for equal weights, 1/n for a single one, 0 when all are 0."""
    if not weights.size or not weights.max() > 0:
        return 0.0
    scaled = weights / weights.max()
    return float(scaled.sum() ** 2 / (scaled.size * np.square(scaled).sum()))


def clustered_stderr(values_C: Sequence[Sequence[float] | FloatArray]) -> float | None:
    """Standard error of the mean over all values, which are alike within a cluster (samples of one prompt).

    ``sqrt(C / (C - 1) sum_c (sum_(i in c) (v_i - mean))^2) / n``: clusters are independent, what is in them need not be
    (Liang and Zeger 1986). ``None`` with fewer than two clusters that hold anything.
    """
    arrays = [np.asarray(values, dtype=np.float64) for values in values_C if len(values)]
    if len(arrays) < 2:
        return None
    values = np.concatenate(arrays)
    residuals = np.array([float((each - values.mean()).sum()) for each in arrays])
    scale = len(arrays) / (len(arrays) - 1)
    return math.sqrt(scale * float(np.square(residuals).sum())) / values.size


def diagnose(samples_N: Sequence[Sample], estimates_N: Sequence[Estimate]) -> Diagnostics:
    """Figures of every strategy that has samples, by name; `ValueError` if there is not one estimate per sample."""
    if len(samples_N) != len(estimates_N):
        raise ValueError(
            f"diagnose needs one estimate per sample; got {len(estimates_N)} for {len(samples_N)} samples"
        )
    pairs = list(zip(samples_N, estimates_N, strict=True))
    return {
        strategy: _diagnose_strategy([pair for pair in pairs if pair[0].strategy == strategy])
        for strategy in sorted({sample.strategy for sample in samples_N})
    }


def _diagnose_strategy(pairs: Sequence[tuple[Sample, Estimate]]) -> StrategyDiagnostics:
    samples_N = [sample for sample, _ in pairs]
    clipped = np.concatenate([estimate.clipped_T for _, estimate in pairs])
    weights, largest = _weights([estimate for _, estimate in pairs])
    measured_N = samples_N if all(sample.old_T is not None for sample in samples_N) else []
    gaps_N = [context_gap(sample) for sample in measured_N]
    totals, tokens = np.array([gap_T.sum() for gap_T in gaps_N]), _joined(gaps_N)
    learnt_N = [s for s, estimate in pairs if measured_N and estimate.advantage > 0]
    reliance_N = [context_gap(sample) for sample in learnt_N]
    apart = _joined(
        [
            np.abs(s.checked_logprobs_T - s.sampling_logprobs_T)
            for s in samples_N
            if s.checked_logprobs_T is not None
        ]
    )
    return StrategyDiagnostics(
        num_samples=len(pairs),
        num_tokens=int(clipped.size),
        reward_mean=math.fsum(sample.reward for sample in samples_N) / len(pairs),
        reward_mean_stderr=_stderr(samples_N, [np.array([sample.reward]) for sample in samples_N]),
        zero_advantage_share=sum(not estimate.advantages_T.any() for _, estimate in pairs) / len(pairs),
        finish_rate=sum(sample.finished for sample in samples_N) / len(pairs),
        clipped_share=float(clipped.mean()) if clipped.size else 0.0,
        weight_mean=None if weights is None else _mean(weights),
        effective_sample_size=None if weights is None else effective_sample_size(weights),
        largest_weight_share=largest,
        total_gap_mean=_mean(totals),
        total_gap_mean_stderr=_stderr(measured_N, totals[:, None]),
        total_gap_quantiles=_quantiles(totals),
        token_gap_mean=_mean(tokens),
        token_gap_quantiles=_quantiles(tokens),
        hint_reliance=_mean(_joined(reliance_N)),
        hint_reliance_stderr=_stderr(learnt_N, reliance_N),
        self_check=_mean(apart),
    )


def _joined(values_N: Sequence[FloatArray]) -> FloatArray:
    return np.concatenate([np.zeros(0), *values_N])


def _weights(estimates_N: Sequence[Estimate]) -> tuple[FloatArray | None, float | None]:
    """All tokens' weights, and the heaviest sample's share; ``None`` where they are unknown."""
    known_N = [estimate.weights_T for estimate in estimates_N if estimate.weights_T is not None]
    if len(known_N) < len(estimates_N):
        return None, None
    sums = np.array([weights_T.sum() for weights_T in known_N])
    return np.concatenate(known_N), float(sums.max() / sums.sum()) if sums.sum() > 0 else None


def _stderr(samples_N: Sequence[Sample], values_N: Sequence[FloatArray] | FloatArray) -> float | None:
    """Standard error of the mean over all values of all samples; a prompt is a cluster."""
    clusters: dict[Hashable, list[float]] = {}
    for sample, values in zip(samples_N, values_N, strict=True):
        clusters.setdefault(sample.prompt, []).extend(float(value) for value in values)
    return clustered_stderr(list(clusters.values()))


def _mean(values: FloatArray) -> float | None:
    return float(values.mean()) if values.size else None


def _quantiles(values: FloatArray) -> tuple[float, ...] | None:
    return tuple(float(each) for each in np.quantile(values, QUANTILES)) if values.size else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """An estimator's name, its baseline, and why."""

    estimator: str
    baseline: Baseline
    reason: str


def mixes_units(strategies: Sequence[str], conversation_reward: str) -> bool:
    """Whether a run pays conversations in another unit than its other strategies, so that no mean may hold both."""
    return "conversation" in strategies and len(strategies) > 1 and conversation_reward != "verifier"


def recommend(samples_N: Sequence[Sample], *, mixed_units: bool = False) -> Recommendation:
    """The estimator for the regime these samples are in, from the tables of docs/estimators.md.

    ``importance_sampling`` where nothing was swapped; ``balance`` where there are on-policy samples, every completion
    was scored under every context of its prompt, and the swapped samples still carry weight there; else the default.
    With `mixed_units` (see `mixes_units`) nothing but a baseline per strategy is recommended.
    """
    swapped_N = [sample for sample in samples_N if not sample.on_policy]
    if not swapped_N:
        return Recommendation(
            estimator="importance_sampling",
            baseline=Baseline.STRATUM,
            reason="all samples were drawn under the training context",
        )
    if mixed_units:
        return Recommendation(
            estimator=DEFAULT_ESTIMATOR,
            baseline=Baseline.STRATUM,
            reason="rewards of the strategies are in different units, which no other baseline keeps apart",
        )
    if len(swapped_N) == len(samples_N):
        return _default(swapped_N, "there are no on-policy samples to bound the weights of balance")
    balance = make_estimator("balance")
    try:
        balance.check(samples_N)
    except ValueError as missing:
        return _default(swapped_N, f"what balance needs is not there: {missing}")
    shares = _mean_weights(samples_N, [each.weights_T for each in balance.weights(samples_N)])
    shares = {sample.strategy: shares[sample.strategy] for sample in swapped_N}
    if faint := {strategy: share for strategy, share in shares.items() if share < LIVING_SHARE}:
        return _default(swapped_N, f"under balance {_listed(faint)} would count for next to nothing")
    return Recommendation(
        estimator="balance",
        baseline=balance.baselines[0],
        reason=f"it is unbiased, and {_listed(shares)} still count under it",
    )


def _default(swapped_N: Sequence[Sample], reason: str) -> Recommendation:
    """The default, with a baseline that leaves the swapped samples some signal."""
    rewards: dict[tuple[Hashable, str], list[float]] = {}
    for sample in swapped_N:
        rewards.setdefault((sample.prompt, sample.strategy), []).append(sample.reward)
    silent = sum(len(values) for values in rewards.values() if len(set(values)) == 1)
    if 2 * silent <= len(swapped_N):
        return Recommendation(estimator=DEFAULT_ESTIMATOR, baseline=Baseline.STRATUM, reason=reason)
    return Recommendation(
        estimator=DEFAULT_ESTIMATOR,
        baseline=Baseline.PROMPT_UNION,
        reason=f"{reason}; and most swapped samples earn just what the others of their stratum earn",
    )


def _mean_weights(samples_N: Sequence[Sample], weights_N: Sequence[FloatArray]) -> dict[str, float]:
    """Mean sequence weight of every strategy; completions without tokens do not count."""
    own: dict[str, list[float]] = {sample.strategy: [] for sample in samples_N}
    for sample, weights_T in zip(samples_N, weights_N, strict=True):
        if weights_T.size:
            own[sample.strategy].append(float(weights_T[0]))
    return {strategy: math.fsum(values) / max(len(values), 1) for strategy, values in sorted(own.items())}


def _listed(shares: dict[str, float]) -> str:
    return ", ".join(
        f"samples of {strategy!r} (mean weight {share:.2g})" for strategy, share in shares.items()
    )


def check_diagnostics(
    diagnostics: Diagnostics,
    *,
    estimator: str,
    recommendation: Recommendation,
    minimum: float = 0.1,
) -> list[str]:
    """Texts about strategies whose samples an estimator wastes: few carry the weight, or all carry next to none.

    The lowest effective sample size (of 1) and the lowest mean weight that pass are the `minimum`.
    """
    if recommendation.estimator == estimator:
        advice = "draw more samples under the training context, or weaken the hint"
    else:
        advice = f"use {recommendation.estimator} with baseline {recommendation.baseline} ({recommendation.reason})"
    texts: list[str] = []
    for strategy, figures in diagnostics.items():
        if figures.effective_sample_size is None or figures.weight_mean is None:
            continue
        if figures.effective_sample_size < minimum:
            texts.append(
                f"strategy {strategy!r}: the effective sample size under {estimator} is "
                f"{figures.effective_sample_size:.2g} of 1, below {minimum}; {advice}"
            )
        elif figures.weight_mean < minimum:
            texts.append(
                f"strategy {strategy!r}: its samples weigh {figures.weight_mean:.2g} on average under {estimator}, "
                f"below {minimum}; {advice}"
            )
    return texts
