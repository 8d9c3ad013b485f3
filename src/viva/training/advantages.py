"""What every seat of a batch is trained on, from the rewards of its group or from credit on its tokens.

A builder that has a method ``credit()`` is asked after its rewards were computed. If it returns a `GroupCredit`, the
tokens of that group get what their spans earned (`viva.rewards.streams`); with ``None``, or without the method, every
token of a seat gets the seat's reward minus the mean of its group (`viva.rewards.group`).

Legend: ``_P`` groups of a batch, ``_G`` members of a group (seats).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinker_cookbook.rl.types import EnvGroupBuilder, TrajectoryGroup

from viva.rewards.group import group_advantages
from viva.rewards.streams import GroupCredit, stream_advantages
from viva.training.data_processing import Advantage
from viva.training.metrics import advantage_metrics, credit_metrics
from viva.training.rollouts import GroupOutcome

__all__ = ["BatchAdvantages", "batch_advantages", "credit_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAdvantages:
    """The groups that were played, what their members are trained on, and figures about it."""

    groups_P: list[TrajectoryGroup]
    advantages_P_G: list[Sequence[Advantage | None]]
    """``None`` for a member that failed or carries no signal."""
    metrics: dict[str, float]


def batch_advantages(outcomes_P: Sequence[GroupOutcome]) -> BatchAdvantages:
    """Advantages of all groups that are not void.

    Raises:
        ValueError: If a builder's credit does not fit what its seats sampled.
    """
    groups_P: list[TrajectoryGroup] = []
    advantages_P_G: list[Sequence[Advantage | None]] = []
    values_P_N: list[list[float]] = []
    credits_P: list[tuple[GroupCredit, int]] = []
    by_seat_G: Sequence[Advantage | None]
    for outcome in outcomes_P:
        if outcome.group is None:
            continue
        groups_P.append(outcome.group)
        credit = credit_of(outcome.builder)
        if credit is None:
            by_seat_G, values_N = _from_rewards(outcome.group, outcome.failed_seats)
        else:
            num_tokens_G_K = [
                [len(turn.ac.tokens) for turn in traj.transitions] for traj in outcome.group.trajectories_G
            ]
            by_seat_G = stream_advantages(credit, num_tokens_G_K)
            values_N = [value for _, value in credit.advantages()]
            credits_P.append((credit, sum(map(sum, num_tokens_G_K))))
        advantages_P_G.append(by_seat_G)
        values_P_N.append(values_N)
    metrics = advantage_metrics(values_P_N) | credit_metrics(credits_P)
    return BatchAdvantages(groups_P=groups_P, advantages_P_G=advantages_P_G, metrics=metrics)


def credit_of(builder: EnvGroupBuilder) -> GroupCredit | None:
    """What the tokens of the builder's last group earned, if it can tell."""
    credit: Callable[[], GroupCredit | None] | None = getattr(builder, "credit", None)
    return None if credit is None else credit()


def _from_rewards(
    group: TrajectoryGroup, failed_seats: frozenset[int]
) -> tuple[list[Advantage | None], list[float]]:
    """Advantages by seat, and those of the members that did not fail."""
    rewards_G = group.get_total_rewards()
    seats = [seat for seat in range(len(rewards_G)) if seat not in failed_seats]
    values = group_advantages([[rewards_G[seat] for seat in seats]])[0]
    by_seat = dict(zip(seats, values, strict=True)) if any(values) else {}
    return [by_seat.get(seat) for seat in range(len(rewards_G))], values
