"""Mixture of strategies: how much each counts in a batch, without rescaling the learning rate.

With ``n_s`` samples of strategy s among ``N`` and weights ``w_s`` that sum to one, the mixture estimate is
``sum_s w_s mean_(i in s) g_i = (1/N) sum_i f_s(i) g_i`` with the factor ``f_s = w_s N / n_s``. The mean of the factors
over the samples is one, so that a mixture changes what is learnt, not how large the step is.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

__all__ = ["check_mixture", "mixture_factors", "strategy_counts"]


def strategy_counts(strategies: Iterable[str]) -> dict[str, int]:
    """``n_s`` of every strategy that occurs, in the order of their names."""
    return dict(sorted(Counter(strategies).items()))


def check_mixture(mixture: Mapping[str, float]) -> None:
    """Refuse weights that define no mixture.

    Raises:
        ValueError: If there are none, one is negative or not finite, or all are zero.
    """
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


def mixture_factors(counts: Mapping[str, int], mixture: Mapping[str, float] | None) -> dict[str, float]:
    """``f_s = w_s N / n_s`` for every strategy of `counts`.

    Weights are relative: they are scaled to sum to one over the strategies that have samples, so a strategy with
    ``n_s = 0`` (all its groups failed) leaves its share to the others and the mean stays one. Its own factor is 0.
    When only strategies of weight 0 have samples, all factors are 0: nothing is trained.

    Args:
        counts: ``n_s``, 0 allowed.
        mixture: Relative weights; ``None`` counts every sample once (all factors 1, ``w_s = n_s / N``).

    Raises:
        ValueError: If a count is negative, a strategy has samples but no weight, or the weights define no mixture.
    """
    for strategy, count in sorted(counts.items()):
        if count < 0:
            raise ValueError(f"strategy {strategy!r} cannot have {count} samples")
    if mixture is None:
        return {strategy: float(count > 0) for strategy, count in counts.items()}
    check_mixture(mixture)
    present = {strategy: count for strategy, count in counts.items() if count > 0}
    if missing := sorted(set(present) - set(mixture)):
        raise ValueError(
            f"strategy {missing[0]!r} has samples but no mixture weight; weights are given for {sorted(mixture)}. "
            "Give it a weight (0 to measure it without training on it)."
        )
    largest = max(mixture.values())
    # by the largest first: shares of denormal or huge weights are still shares
    scaled = {strategy: mixture[strategy] / largest for strategy in present}
    total_weight = math.fsum(scaled.values())
    num_samples = sum(present.values())
    if total_weight == 0:
        return dict.fromkeys(counts, 0.0)
    return {
        strategy: scaled[strategy] / total_weight * num_samples / count if count > 0 else 0.0
        for strategy, count in counts.items()
    }
