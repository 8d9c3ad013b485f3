"""Baselines over strata: what a reward is compared with when several strategies answered the same prompt.

Weights of one strategy alone do not make ``E_q[w grad log p]`` zero (only their mixture does, or nothing does once they
are truncated), so a baseline that looks at the sample itself, or that differs between strategies, turns into a
bias and can reverse the gradient. The union baselines here leave the sample out and give each stratum its full
share of the mixture, which makes their expectation the same for every sample::

    b_(-i) = sum_s (n_s / N) mean_(j in s, j != i) w_j r_j   /   sum_s (n_s / N) mean_(j in s, j != i) w_j

with ``w = 1`` for ``prompt_union``. Advantages are ``(r_i - b_(-i)) (1 - 1/N)``, which for one stratum of equal weights
is ``r_i - mean(r)``. For ``weighted`` the ratio leaves a difference of order ``1/N^2`` between strata.

Legend: ``_N`` samples, of the batch or of one prompt.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from viva.experts.estimators.base import Baseline, FloatArray, Sample
from viva.rewards.group import group_advantages

__all__ = ["centred_rewards"]


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

    Args:
        samples_N: Samples of any number of prompts.
        weights_N: One weight per sample, not negative; only ``Baseline.WEIGHTED`` looks at them.
        baseline: Which; a sample without company (alone in its stratum or prompt) has advantage 0.
    """
    if baseline is Baseline.NONE:
        return [sample.reward for sample in samples_N]
    advantages_N = [0.0] * len(samples_N)
    if baseline is Baseline.STRATUM:
        for members in _places([(sample.prompt, sample.strategy) for sample in samples_N]):
            centred = group_advantages([[samples_N[index].reward for index in members]])[0]
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
