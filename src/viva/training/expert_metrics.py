"""Figures per strategy that need no estimate: what was played, what of it is trained, what environments report.

Together with `viva.experts.diagnostics` these stand under ``experts/<strategy>/``.
"""

import math
from collections.abc import Mapping, Sequence

from viva.experts.diagnostics import clustered_stderr
from viva.experts.strategy import strategy_of
from viva.training.expert_samples import ExpertSample
from viva.training.rollouts import GroupOutcome

__all__ = ["strategy_metrics"]


def strategy_metrics(
    outcomes_P: Sequence[GroupOutcome], samples_N: Sequence[ExpertSample], factors: Mapping[str, float]
) -> dict[str, float]:
    """For every strategy that was tried, also if all its groups are void.

    Args:
        outcomes_P: Groups of the batch.
        samples_N: What is trained of them.
        factors: Mixture factor of every strategy that has samples.

    Returns:
        Under ``experts/<strategy>/``: ``num_samples`` (n_s), ``mixture_factor``, ``masked_token_share`` (of the sampled
        tokens of seats that did not fail, those that are not trained), and ``env/<key>``, the mean of what
        environments and builders report (``correct``, ``leak``, ...) over those that report it, with its standard
        error over groups in ``env/<key>_stderr``.
    """
    metrics: dict[str, float] = {}
    for strategy in sorted({strategy_of(outcome.builder).strategy_id for outcome in outcomes_P}):
        own_P = [outcome for outcome in outcomes_P if strategy_of(outcome.builder).strategy_id == strategy]
        trained = [sample for sample in samples_N if sample.strategy == strategy]
        metrics[f"experts/{strategy}/num_samples"] = len(trained)
        metrics[f"experts/{strategy}/mixture_factor"] = factors.get(strategy, 0.0)
        if num_sampled := sum(_sampled_tokens(outcome) for outcome in own_P):
            num_trained = sum(_trained_tokens(sample) for sample in trained)
            metrics[f"experts/{strategy}/masked_token_share"] = 1 - num_trained / num_sampled
        for key, values_P in sorted(_reported(own_P).items()):
            name, values = f"experts/{strategy}/env/{key}", [each for group in values_P for each in group]
            metrics[name] = math.fsum(values) / len(values)
            error = clustered_stderr(values_P)
            if error is not None:
                metrics[f"{name}_stderr"] = error
    return metrics


def _trained_tokens(sample: ExpertSample) -> int:
    return sum(weight > 0 for turn in sample.turns_K for weight in turn.weights)


def _sampled_tokens(outcome: GroupOutcome) -> int:
    if outcome.group is None:
        return 0
    return sum(
        len(turn.ac.tokens)
        for seat, trajectory in enumerate(outcome.group.trajectories_G)
        for turn in trajectory.transitions
        if seat not in outcome.failed_seats
    )


def _reported(outcomes_P: Sequence[GroupOutcome]) -> dict[str, list[list[float]]]:
    """By key, the values of every group that reports it."""
    reported: dict[str, list[list[float]]] = {}
    for outcome in outcomes_P:
        values: dict[str, list[float]] = {}
        if outcome.group is None:
            continue
        members = zip(outcome.group.trajectories_G, outcome.group.metrics_G, strict=True)
        for seat, (trajectory, own) in enumerate(members):
            if seat in outcome.failed_seats:
                continue
            for row in (own, *(turn.metrics for turn in trajectory.transitions)):
                for key, value in row.items():
                    values.setdefault(key, []).append(float(value))
        for key, own in values.items():
            reported.setdefault(key, []).append(own)
    return reported
