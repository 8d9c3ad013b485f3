"""A batch of played groups becomes one update: samples, scores, estimates, datums.

    outcomes -> samples -> score -> estimate -> datums with anchors and weighted advantages

In plain self-play every sample has its advantages already, nothing is scored, and every weight is 1. Where a builder
names a search strategy (`viva.experts.strategy`), an estimator weighs the whole batch. Samples that were not drawn from
the very distribution that is trained (swapped context, other temperature) are scored first, if the estimator asks.

Legend: ``_P`` groups of a batch, ``_N`` samples, ``_D`` datums.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, cast

import numpy as np
import tinker

from viva.experts.diagnostics import Diagnostics, check_diagnostics, diagnose, flat_metrics, recommend
from viva.experts.estimation import (
    Estimate,
    Estimator,
    Need,
    check_mixture,
    choose_baseline,
    estimate,
    mixture_factors,
)
from viva.experts.estimators import DEFAULT_ESTIMATOR, make_estimator
from viva.experts.samples import FloatArray, Sample, sample_record
from viva.experts.strategy import credit_of, is_strategy, strategy_of
from viva.rewards.credit import GroupCredit
from viva.sdk import TrainingClient
from viva.training.data_processing import ScoredDatum, action_values, trained_values
from viva.training.metrics import advantage_metrics, credit_metrics, strategy_metrics
from viva.training.rollouts import GroupOutcome
from viva.training.samples import (
    TrainedSample,
    batch_samples,
    centred_rewards_of,
    with_values,
)
from viva.training.scoring import name_contexts, sampled_data, score, spread
from viva.training.update import check_sampler

NUM_CHECKED = 4
"""Samples per batch that are scored at the temperature they were sampled at, to check the sampler against the
trainer, where that is not the temperature which is trained."""

_MOST_SELF_CHECK = 0.1
"""Largest mean difference, in nats per token, that passes this check."""


class EstimatorStoppedError(RuntimeError):
    """The estimator refuses a batch, or wastes it and the settings say to stop then. The message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """Estimation of batches with strategies.

    Raises:
        ValueError: If there is no such estimator, option or baseline, or a limit makes no sense.
    """

    estimator: str = DEFAULT_ESTIMATOR
    estimator_options: Mapping[str, float | str | bool] = field(default_factory=dict[str, float | str | bool])
    baseline: str | None = None
    """``None`` takes the estimator's default."""
    min_effective_share: float = 0.1
    """Lowest effective sample size (of 1) and mean weight of a strategy that pass; 0 lets everything pass."""
    on_waste: Literal["warn", "stop"] = "warn"
    """The reaction to figures below that."""
    num_checked: int = NUM_CHECKED
    """Samples per batch, of all strategies in turn, that are scored behind the context and at the temperature they were
    sampled at, to check the sampler against the trainer."""
    mixed_units: bool = False
    """Whether rewards of different strategies must not be compared; advice keeps to that."""

    def __post_init__(self) -> None:
        choose_baseline(self.make(), self.baseline)
        if not 0 <= self.min_effective_share <= 1:
            raise ValueError(f"min_effective_share must be between 0 and 1; got {self.min_effective_share}")
        if self.on_waste not in ("warn", "stop"):
            raise ValueError(f"on_waste must be 'warn' or 'stop'; got {self.on_waste!r}")
        if self.num_checked < 0:
            raise ValueError(f"num_checked must be 0 or more; got {self.num_checked}")

    def make(self) -> Estimator:
        """The estimator."""
        return make_estimator(self.estimator, **self.estimator_options)

    def check_temperature(self, temperature: float, trained_at: float) -> None:
        """Refuse what cannot be estimated: the sampler's temperature is part of its distribution.

        Raises:
            ValueError: If samples are greedy, or the estimator compares contexts, which are scored at the temperature
                that is trained at.
        """
        if temperature == 0:
            raise ValueError(
                "strategies need samples with probabilities, and at temperature 0 there are none; use temperature=1"
            )
        if temperature != trained_at and Need.CONTEXT_LOGPROBS in self.make().needs:
            raise ValueError(
                f"{self.estimator} compares contexts, which are scored at temperature {trained_at:g}; got "
                f"temperature={temperature}. Use temperature={trained_at:g}, or on the local engine train at the "
                "temperature of the samples (loss_fn_config with temperature), or use another estimator."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The datums of a batch, and everything to know about them."""

    data_D: list[tinker.Datum]
    foreign_D: list[bool]
    """Datums that were not drawn from what is trained, see `viva.training.update.update_policy`."""
    check: Sequence[ScoredDatum] = ()
    """The check of samples without a datum that was drawn from what is trained."""
    samples_N: list[TrainedSample]
    weights_N: Sequence[FloatArray | None]
    """The estimator's weights of the tokens of each sample; ``None`` where there are none."""
    num_data_N: list[int]
    """Datums of every sample."""
    is_plain: bool = False
    """Whether it is plain self-play."""
    metrics: dict[str, float]
    warnings: list[str] = field(default_factory=list[str])
    records: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Records of the samples that an estimator weighed, ready for JSON: ``group`` and ``seat``, and what
    `viva.experts.samples` reads."""

    def speakers_D(self) -> list[str | None]:
        """The policy that sampled each datum, of plain self-play with several policies; else ``None``."""
        return [name for sample in self.samples_N for name in sample.speakers_D]


def plain_batch(outcomes_P: Sequence[GroupOutcome], *, keeps_silent: bool = False) -> Batch:
    """A batch of plain self-play, sampled at temperature 1.

    With ``keeps_silent``, tokens that earned nothing are in it, too, with advantages of 0.

    Raises:
        ValueError: If a builder's credit does not fit what its seats sampled.
    """
    samples_N = batch_samples(outcomes_P, is_plain=True, keeps_silent=keeps_silent)
    data_D: list[tinker.Datum] = []
    for sample in samples_N:
        advantages_T = np.zeros(0) if sample.advantages_T is None else sample.advantages_T
        logprobs = [action_values(datum, "logprobs") for datum in sample.data_D]
        data_D += with_values(sample.data_D, advantages_T, np.concatenate([np.zeros(0), *logprobs]))
    values_P_N: list[list[float]] = []
    credits_P: list[tuple[GroupCredit, int]] = []
    for outcome in outcomes_P:
        if outcome.group is None:
            continue
        credit = credit_of(outcome.builder)
        if credit is None:
            values_P_N.append(list(centred_rewards_of(outcome).values()))
            continue
        values_P_N.append([value for _, value in credit.advantages()])
        turns = (turn for trajectory in outcome.group.trajectories_G for turn in trajectory.transitions)
        credits_P.append((credit, sum(len(turn.ac.tokens) for turn in turns)))
    return Batch(
        data_D=data_D,
        foreign_D=[False] * len(data_D),
        samples_N=samples_N,
        weights_N=[None] * len(samples_N),
        num_data_N=[len(sample.data_D) for sample in samples_N],
        is_plain=True,
        metrics=advantage_metrics(values_P_N) | credit_metrics(credits_P),
    )


async def make_batch(
    client: TrainingClient,
    outcomes_P: Sequence[GroupOutcome],
    config: ExpertConfig | None = None,
    *,
    temperature: float = 1.0,
    trained_at: float = 1.0,
    keeps_silent: bool = False,
) -> Batch:
    """Everything to train of a batch. The client's weights stay as they are.

    Other truncation of the sampler than its temperature must be in the stored logprobs.

    Args:
        client: The policy.
        outcomes_P: What was played.
        config: Of the estimation of batches with strategies; ``None`` takes the defaults.
        temperature: Of the samples.
        trained_at: That of the policy which is trained. Samples at another one, or behind another context than the
            one that is trained, are not its own.
        keeps_silent: Whether the policy's own tokens that earned nothing are in it, too, with advantages of 0.

    Raises:
        ValueError: If the strategies contradict each other, or completions or credit do not fit what was sampled.
        EstimatorStoppedError: If the estimator refuses the samples; if it wastes those of a strategy and the settings
            say to stop.
    """
    if any(is_strategy(outcome.builder) for outcome in outcomes_P):
        return await _estimated_batch(
            client,
            outcomes_P,
            config or ExpertConfig(),
            temperature=temperature,
            trained_at=trained_at,
            keeps_silent=keeps_silent,
        )
    batch = plain_batch(outcomes_P, keeps_silent=keeps_silent)
    if (temperature or 1.0) == trained_at:
        return batch
    check = await check_sampler(client, batch.data_D[:NUM_CHECKED], temperature=temperature)
    return replace(batch, foreign_D=[True] * len(batch.data_D), check=check)


async def _estimated_batch(
    client: TrainingClient,
    outcomes_P: Sequence[GroupOutcome],
    config: ExpertConfig,
    *,
    temperature: float,
    trained_at: float,
    keeps_silent: bool,
) -> Batch:
    config.check_temperature(temperature, trained_at)
    estimator = config.make()
    mixture = mixture_of(outcomes_P)
    trained_N = batch_samples(outcomes_P)
    try:
        samples_N = _samples(trained_N, is_own_temperature=temperature == trained_at)
        samples_N, num_scored = await score(client, trained_N, samples_N, estimator, temperature=trained_at)
        estimates_N = estimate(samples_N, estimator, baseline=config.baseline, mixture=mixture)
    except ValueError as error:
        raise EstimatorStoppedError(str(error)) from error
    checks_N = await _checks(client, outcomes_P, trained_N, config.num_checked, temperature)
    checked_N = [
        replace(
            sample, checked_logprobs_T=np.concatenate([trained_values(*each) for each in checks_N[index]])
        )
        if index in checks_N
        else sample
        for index, sample in enumerate(samples_N)
    ]
    diagnostics = diagnose(checked_N, estimates_N)
    warnings = _warnings(samples_N, diagnostics, config)
    data_N = [
        _weighted(trained, made)
        if made.advantages_T.any() or (keeps_silent and sample.on_policy)
        else list[tinker.Datum]()
        for trained, made, sample in zip(trained_N, estimates_N, samples_N, strict=True)
    ]
    factors = mixture_factors((sample.strategy for sample in samples_N), mixture)
    metrics = flat_metrics(diagnostics) | strategy_metrics(outcomes_P, trained_N, factors)
    metrics |= advantage_metrics(_advantages_by_group(trained_N, estimates_N))
    metrics["experts/scored_tokens"] = num_scored + sum(
        datum.model_input.length for check in checks_N.values() for datum, _ in check
    )
    return Batch(
        data_D=[datum for data_D in data_N for datum in data_D],
        foreign_D=[
            not sample.on_policy for sample, data_D in zip(samples_N, data_N, strict=True) for _ in data_D
        ],
        check=[
            scored
            for index, check in checks_N.items()
            if not (samples_N[index].on_policy and data_N[index])
            for scored in check
        ],
        samples_N=trained_N,
        weights_N=[made.weights_T for made in estimates_N],
        num_data_N=[len(data_D) for data_D in data_N],
        metrics=metrics,
        warnings=warnings,
        records=[
            {"group": trained.outcome_index, "seat": trained.seat}
            | sample_record(sample, prompt=cast(int, sample.prompt))
            for trained, sample in zip(trained_N, checked_N, strict=True)
        ],
    )


async def _checks(
    client: TrainingClient,
    outcomes_P: Sequence[GroupOutcome],
    trained_N: Sequence[TrainedSample],
    count: int,
    temperature: float,
) -> dict[int, list[ScoredDatum]]:
    """Checks of some samples, by their place."""
    chosen = spread([sample.strategy for sample in trained_N], count)
    data: list[list[tinker.Datum]] = []
    for place in chosen:
        group = outcomes_P[trained_N[place].outcome_index].group
        assert group is not None  # it has samples
        data.append(sampled_data(trained_N[place], group.trajectories_G[trained_N[place].seat]))
    found = await check_sampler(
        client, [datum for data_D in data for datum in data_D], temperature=temperature
    )
    if not found:
        return {}
    scored = iter(found)
    return {place: [*islice(scored, len(data_D))] for place, data_D in zip(chosen, data, strict=True)}


def _warnings(samples_N: Sequence[Sample], diagnostics: Diagnostics, config: ExpertConfig) -> list[str]:
    texts = check_diagnostics(
        diagnostics,
        estimator=config.estimator,
        recommendation=recommend(samples_N, mixed_units=config.mixed_units),
        minimum=config.min_effective_share,
    )
    if texts and config.on_waste == "stop":
        raise EstimatorStoppedError("; ".join(texts))
    for name, figures in diagnostics.items():
        if figures.self_check is not None and figures.self_check > _MOST_SELF_CHECK:
            texts.append(
                f"strategy {name!r}: sampler and trainer differ by {figures.self_check:.3g} nats per token on the same "
                "tokens, context and temperature; make renderer_name, temperature and the engine the same for sampling "
                "and training"
            )
    return texts


def mixture_of(outcomes_P: Sequence[GroupOutcome]) -> dict[str, float] | None:
    """Weights of all strategies of a batch, void groups included; ``None`` if none has any.

    Raises:
        ValueError: If a strategy has two weights, only some strategies have one, or they define no mixture.
    """
    weights: dict[str, float | None] = {}
    for outcome in outcomes_P:
        strategy = strategy_of(outcome.builder)
        known = weights.setdefault(strategy.strategy_id, strategy.weight)
        if known != strategy.weight:
            raise ValueError(
                f"strategy {strategy.strategy_id!r} has the weights {known} and {strategy.weight} in one batch; "
                "give all its groups the same"
            )
    given = {name: weight for name, weight in weights.items() if weight is not None}
    if not given:
        return None
    if missing := sorted(set(weights) - set(given)):
        raise ValueError(
            f"strategy {missing[0]!r} has no mixture weight, but {sorted(given)} have; give all strategies one, or none"
        )
    check_mixture(given)
    return given


def _samples(trained_N: Sequence[TrainedSample], *, is_own_temperature: bool) -> list[Sample]:
    """The estimators' samples, without scores. Prompts become numbers, in order of their appearance."""
    prompts: dict[Hashable, int] = {}
    return [
        Sample(
            strategy=sample.strategy,
            prompt=prompts.setdefault(sample.prompt, len(prompts)),
            reward=sample.reward,
            sampling_logprobs_T=np.concatenate([action_values(datum, "logprobs") for datum in sample.data_D]),
            on_policy=is_own_temperature and not sample.is_swapped,
            context=name,
            advantages_T=sample.advantages_T,
            finished=sample.finished,
        )
        for sample, name in zip(trained_N, name_contexts(trained_N), strict=True)
    ]


def _weighted(trained: TrainedSample, made: Estimate) -> list[tinker.Datum]:
    """Datums of a sample with the estimator's advantages and anchors."""
    weights_T = np.concatenate([action_values(datum, "advantages") for datum in trained.data_D])
    return with_values(trained.data_D, made.advantages_T * weights_T, made.logprobs_T)


def _advantages_by_group(
    trained_N: Sequence[TrainedSample], estimates_N: Sequence[Estimate]
) -> list[list[float]]:
    groups: dict[int, list[float]] = {}
    for sample, made in zip(trained_N, estimates_N, strict=True):
        groups.setdefault(sample.outcome_index, []).append(made.advantage)
    return list(groups.values())
