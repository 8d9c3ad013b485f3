"""Metrics of one step: pure functions from outcomes, samples and datums to flat dictionaries.

Legend: ``_P`` groups of a batch, ``_G`` members of a group (seats), ``_N`` members, spans or samples, ``_T`` tokens,
``_D`` datums.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from tinker_cookbook.rl.types import EnvGroupBuilder, Trajectory

from viva.experts.conversation_expert import ConversationExpertGroupBuilder
from viva.experts.diagnostics import clustered_stderr
from viva.experts.strategy import ExpertGroupBuilder, strategy_of
from viva.judging.records import ConversationRecord
from viva.judging.usage import Role, Usage
from viva.rewards.credit import GroupCredit
from viva.selfplay.group import MultiAgentConversationEnvGroupBuilder
from viva.training.data_processing import ScoredDatum, action_values, trained_values
from viva.training.rollouts import GroupOutcome, Place
from viva.training.samples import TrainedSample
from viva.training.signs import signs


@dataclass(slots=True)
class Clock:
    """Seconds spent in each part of a step, as ``time/...`` metrics."""

    started: float = field(default_factory=time.monotonic)
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    def lap(self, name: str) -> None:
        """A part ends, and the next one begins."""
        now = time.monotonic()
        self.metrics[f"time/{name}"] = now - self.started
        self.started = now

    def all(self, num_tokens: float, sampling_s: float) -> dict[str, float]:
        """All parts, their sum, and the rate of sampling."""
        rate = {"time/tokens_per_second": num_tokens / sampling_s} if sampling_s > 0 else {}
        return self.metrics | {"time/step": sum(self.metrics.values())} | rate


def summary(name: str, values: Sequence[float]) -> dict[str, float]:
    """``name/mean``, ``/std`` (population), ``/max`` and ``/min``; nothing for no values."""
    if not values:
        return {}
    array = np.asarray(values, dtype=np.float64)
    return {
        f"{name}/mean": float(array.mean()),
        f"{name}/std": float(array.std()),
        f"{name}/max": float(array.max()),
        f"{name}/min": float(array.min()),
    }


def _columns(rows: Iterable[Mapping[str, float | int]]) -> dict[str, list[float]]:
    """Values of every key in the rows that have it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            values.setdefault(key, []).append(float(value))
    return values


def mean_by_key(rows: Iterable[Mapping[str, float | int]]) -> dict[str, float]:
    """Mean of every key over the rows that have it."""
    return {key: math.fsum(column) / len(column) for key, column in _columns(rows).items()}


def _members(outcome: GroupOutcome) -> list[tuple[Trajectory, Mapping[str, float | int]]]:
    """Trajectory and metrics of every seat that counts."""
    if outcome.group is None:
        return []
    group = outcome.group
    members = zip(group.trajectories_G, group.metrics_G, strict=True)
    return [member for seat, member in enumerate(members) if seat not in outcome.failed_seats]


def _paid(outcomes_P: Iterable[GroupOutcome]) -> list[float]:
    return [reward for outcome in outcomes_P for reward in outcome.paid_rewards() if reward is not None]


def rollout_metrics(outcomes_P: Sequence[GroupOutcome]) -> dict[str, float]:
    """Rewards, lengths, the environments' own metrics, and failures of one batch.

    What an environment reports per turn or per group is averaged by key over the rows that report it; a name that is
    taken (``step``, or one of the others here) gets ``env/`` before it. Where groups carry different ``logging_tags``,
    rewards are also given for each tag under ``env/<tag>/``. Metrics of attempts without rewards stand under ``void/``.
    """
    metrics: dict[str, float] = {
        "rollout/groups": len(outcomes_P),
        "rollout/void": sum(outcome.group is None for outcome in outcomes_P),
        "rollout/failed_seats": sum(len(outcome.failed_seats) for outcome in outcomes_P),
        "rollout/retries": sum(outcome.retries for outcome in outcomes_P),
        **token_metrics(outcomes_P),
    }
    errors = Counter(failure.error_type for outcome in outcomes_P for failure in outcome.failures)
    metrics |= {f"rollout/errors/{error_type}": count for error_type, count in sorted(errors.items())}
    metrics |= _drop_rates(outcomes_P)
    members = [member for outcome in outcomes_P for member in _members(outcome)]
    metrics |= _length_metrics([traj for traj, _ in members])
    metrics |= summary("reward", _paid(outcomes_P))
    metrics |= signs(_conversations(outcomes_P))
    void = mean_by_key(row for outcome in outcomes_P for row in outcome.void_metrics)
    metrics |= {f"void/{name}": value for name, value in void.items()}
    metrics |= _tag_metrics(outcomes_P)
    reported = mean_by_key(own for _, own in members)
    reported |= mean_by_key(turn.metrics for traj, _ in members for turn in traj.transitions)
    taken = {"step", *metrics}
    return {f"env/{name}" if name in taken else name: value for name, value in reported.items()} | metrics


def token_metrics(outcomes_P: Sequence[GroupOutcome]) -> dict[str, float]:
    """Tokens of all attempts at a batch: of the policy, of judge and scorer where they were asked, and of all.

    The update's own passes are not among them: ``optim/tokens`` and ``experts/scored_tokens``.
    """
    names: dict[Role, str] = {"policy": "rollout", "judge": "judge", "scorer": "scorer"}
    metrics: dict[str, float] = {}
    total = 0
    for role, name in names.items():
        usage = sum((outcome.usage.get(role, Usage()) for outcome in outcomes_P), Usage())
        total += usage.total
        if role == "policy" or usage.total:
            metrics[f"{name}/sampled_tokens"] = usage.sampled_tokens
            metrics[f"{name}/prompt_tokens"] = usage.prompt_tokens
    return metrics | {"rollout/total_tokens": total}


def _conversations(outcomes_P: Sequence[GroupOutcome]) -> list[ConversationRecord]:
    """Records of the groups that count and are conversations."""
    played = [_unwrapped(outcome.builder) for outcome in outcomes_P if outcome.group is not None]
    return [
        ConversationRecord.model_validate(each.record())
        for each in played
        if isinstance(each, MultiAgentConversationEnvGroupBuilder)
    ]


def _unwrapped(builder: EnvGroupBuilder) -> EnvGroupBuilder:
    while isinstance(builder, ExpertGroupBuilder | ConversationExpertGroupBuilder):
        builder = builder.inner
    return builder


def _drop_rates(outcomes_P: Sequence[GroupOutcome]) -> dict[str, float]:
    """Shares of the turns of every agent and of every round whose call failed, in all attempts.

    Conversations that lose a turn are repeated or dropped. Where the shares differ, what is trained on is not what was
    played.
    """
    asked = sum((Counter(outcome.asked) for outcome in outcomes_P), Counter[Place]())
    failures = [failure.place for outcome in outcomes_P for failure in outcome.failures]
    lost = Counter(place for place in failures if place is not None)
    metrics: dict[str, float] = {}
    for axis, name in enumerate(("agent", "round")):
        for key in sorted({place[axis] for place in asked}):
            num_asked = sum(count for place, count in asked.items() if place[axis] == key)
            num_lost = sum(count for place, count in lost.items() if place[axis] == key)
            metrics[f"rollout/drop_rate/{name}_{key}"] = num_lost / num_asked
    return metrics


def _length_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    turns = [turn for traj in trajectories for turn in traj.transitions]
    if not turns:
        return {}
    return {
        "num_turns": len(turns) / len(trajectories),
        "rollout/reply_tokens_per_turn": sum(len(turn.ac.tokens) for turn in turns) / len(turns),
        "rollout/prompt_tokens_per_turn": sum(turn.ob.length for turn in turns) / len(turns),
        "rollout/finish_rate": sum(turn.ac.stop_reason == "stop" for turn in turns) / len(turns),
    }


def _tag_metrics(outcomes_P: Sequence[GroupOutcome]) -> dict[str, float]:
    outcomes_by_tag: dict[str, list[GroupOutcome]] = {}
    for outcome in outcomes_P:
        for tag in set(outcome.builder.logging_tags()):
            outcomes_by_tag.setdefault(tag, []).append(outcome)
    metrics: dict[str, float] = {}
    for tag, own_P in sorted(outcomes_by_tag.items()):
        if len(own_P) < len(outcomes_P):
            metrics[f"env/{tag}/groups"] = len(own_P)
            metrics |= summary(f"env/{tag}/reward", _paid(own_P))
    return metrics


def advantage_metrics(advantages_P_N: Sequence[Sequence[float]]) -> dict[str, float]:
    """Spread of the advantages (one per member, or per span of a credited group), and the share of silent groups.

    A group is silent if it carries no signal: all its advantages are 0, or it has none.
    """
    values = [advantage for advantages_N in advantages_P_N for advantage in advantages_N]
    if not values:
        return {}
    silent = sum(not any(advantages_N) for advantages_N in advantages_P_N)
    return {
        **summary("advantage", values),
        "advantage/zero_share": sum(value == 0.0 for value in values) / len(values),
        "advantage/silent_groups_share": silent / len(advantages_P_N),
    }


def credit_metrics(credits_P: Sequence[tuple[GroupCredit, int]]) -> dict[str, float]:
    """Rewards of every stream, and how many of the sampled tokens, counted beside each credit, earn nothing."""
    rewards_by_stream: dict[str, list[float]] = {}
    for credit, _ in credits_P:
        for span in credit.spans:
            rewards_by_stream.setdefault(span.stream, []).append(span.reward)
    metrics: dict[str, float] = {}
    for stream, rewards in sorted(rewards_by_stream.items()):
        metrics |= summary(f"credit/{stream}", rewards)
    sampled = sum(num_tokens for _, num_tokens in credits_P)
    if sampled:
        credited = sum(span.stop - span.start for credit, _ in credits_P for span in credit.spans)
        metrics["credit/masked_share"] = 1.0 - credited / sampled
    return metrics


def logprob_metrics(scored_D: Sequence[ScoredDatum]) -> dict[str, float]:
    """Distance of the trainer from the sampler, over action tokens (``mask > 0``).

    With ``q`` the sampler and ``p`` the trainer, ``optim/kl_sample_train_v1`` is the mean of ``log q - log p`` over
    sampled tokens and ``_v2`` half its mean square (names as in tinker-cookbook); ``optim/logprob_gap_max`` is the
    largest absolute gap of one token; ``optim/entropy`` the mean of ``-log q``.

    Raises:
        FloatingPointError: If a logprob is not finite.
    """
    if not scored_D:
        return {}
    sampled = np.concatenate([action_values(datum, "logprobs") for datum, _ in scored_D])
    gap = sampled - np.concatenate([trained_values(*scored) for scored in scored_D])
    if not np.isfinite(gap).all():
        raise FloatingPointError(
            "the engine returned logprobs that are not finite numbers; this update is not to be trusted"
        )
    if gap.size == 0:
        return {}
    return {
        "optim/kl_sample_train_v1": float(gap.mean()),
        "optim/kl_sample_train_v2": float(0.5 * np.square(gap).mean()),
        "optim/logprob_gap_max": float(np.abs(gap).max()),
        "optim/entropy": float(-sampled.mean()),
    }


def strategy_metrics(
    outcomes_P: Sequence[GroupOutcome], samples_N: Sequence[TrainedSample], factors: Mapping[str, float]
) -> dict[str, float]:
    """For every strategy that was tried, also if all its groups are void.

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
            num_trained = sum(sample.num_trained for sample in trained)
            metrics[f"experts/{strategy}/masked_token_share"] = 1 - num_trained / num_sampled
        for key, values_P in sorted(_reported(own_P).items()):
            name, values = f"experts/{strategy}/env/{key}", [each for group in values_P for each in group]
            metrics[name] = math.fsum(values) / len(values)
            error = clustered_stderr(values_P)
            if error is not None:
                metrics[f"{name}_stderr"] = error
    return metrics


def _sampled_tokens(outcome: GroupOutcome) -> int:
    return sum(len(turn.ac.tokens) for trajectory, _ in _members(outcome) for turn in trajectory.transitions)


def _reported(outcomes_P: Sequence[GroupOutcome]) -> dict[str, list[list[float]]]:
    """Values by key, one list for every group that reports it."""
    reported: dict[str, list[list[float]]] = {}
    for outcome in outcomes_P:
        members = _members(outcome)
        rows = [
            row
            for trajectory, own in members
            for row in (own, *(turn.metrics for turn in trajectory.transitions))
        ]
        for key, values in _columns(rows).items():
            reported.setdefault(key, []).append(values)
    return reported
