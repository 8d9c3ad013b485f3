"""Search strategies: groups of environments with a name, the context their samples are trained in, and a weight.

A strategy is a tinker-cookbook ``EnvGroupBuilder`` with these attributes, all but the first optional::

    strategy_id: str
    context_transform(observation, turn_index) -> Observation      the training context of a turn; None: as sampled
    weight: float | None                                           share in the mixture; None: every sample counts once
    completions(group) -> per seat the `Completion`s to train      without it, all that was sampled
    unpaid_seats() -> seats whose 0.0 is a place holder            without it, every seat has a reward
    credit() -> a `GroupCredit` on spans of tokens, or None        without it, the rewards of seats count
    record() -> what the transcript keeps of the last group        without it, nothing

`ExpertGroupBuilder` puts them onto any builder. Sampled tokens and their logprobs are never touched.

Legend: ``_G`` members of a group (seats).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from tinker_cookbook.rl.types import (
    Env,
    EnvGroupBuilder,
    Metrics,
    Observation,
    Trajectory,
    TrajectoryGroup,
)

from viva.rewards.credit import GroupCredit

ContextTransform: TypeAlias = Callable[[Observation, int], Observation]
"""From a turn's sampling context and index to its training context."""

IID = "iid"
"""Strategy of builders that name none: trained as they were sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Sampled tokens ``[start, stop)`` of one turn, to be trained.

    Where the context is swapped the tokens before ``start`` belonged to the sampling context and go with it; else they
    stay, masked.

    Raises:
        ValueError: If the range or the weight makes no sense.
    """

    transition: int
    start: int = 0
    stop: int | None = None
    """``None``: to the end of the turn, its stop token included."""
    with_end: bool = False
    """Also the turn's last token, its stop token, though not what lies between (a closing brace): that goes with the
    sampling context, and stays, masked, where the context is not swapped."""
    weight: float = 1.0
    """Factor on the advantage; with 0, the tokens are context only."""
    advantage: float | None = None
    """Advantage of every token, instead of reward minus baseline."""

    def __post_init__(self) -> None:
        if self.transition < 0 or self.start < 0 or (self.stop is not None and self.stop < self.start):
            raise ValueError(f"a completion lies in a turn, 0 <= start <= stop; got {self}")
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(
                f"the weight of a completion must be a finite number of 0 or more; got {self.weight}"
            )
        if self.advantage is not None and not math.isfinite(self.advantage):
            raise ValueError(f"an advantage must be a finite number; got {self.advantage}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyInfo:
    """The strategy of a builder."""

    strategy_id: str
    context_transform: ContextTransform | None
    weight: float | None


@runtime_checkable
class _Named(Protocol):
    strategy_id: str | None


@runtime_checkable
class _Swapping(Protocol):
    context_transform: ContextTransform | None


@runtime_checkable
class _Weighted(Protocol):
    weight: float | None


@runtime_checkable
class _Choosing(Protocol):
    def completions(self, group: TrajectoryGroup) -> Sequence[Sequence[Completion]]: ...


@runtime_checkable
class _PartlyPaid(Protocol):
    def unpaid_seats(self) -> frozenset[int]: ...


@runtime_checkable
class _Crediting(Protocol):
    def credit(self) -> GroupCredit | None: ...


@runtime_checkable
class _RecordsConversation(Protocol):
    def record(self) -> Any: ...


def is_strategy(builder: EnvGroupBuilder) -> bool:
    """Whether the builder names a strategy."""
    return isinstance(builder, _Named) and builder.strategy_id is not None


def strategy_of(builder: EnvGroupBuilder) -> StrategyInfo:
    """The strategy of any builder: what its attributes say, else `IID`.

    Raises:
        ValueError: If the name is empty or holds a slash (metrics are named after it).
    """
    strategy_id = builder.strategy_id if isinstance(builder, _Named) else None
    if strategy_id is not None and (not strategy_id or "/" in strategy_id):
        raise ValueError(f"strategy_id must be a name without slashes; got {strategy_id!r}")
    return StrategyInfo(
        strategy_id=IID if strategy_id is None else strategy_id,
        context_transform=builder.context_transform if isinstance(builder, _Swapping) else None,
        weight=builder.weight if isinstance(builder, _Weighted) else None,
    )


def completions_of(builder: EnvGroupBuilder, group: TrajectoryGroup) -> list[Sequence[Completion]]:
    """The trained completions of every seat; without a method ``completions``, every turn.

    Raises:
        ValueError: If the method does not return one entry per seat.
    """
    if not isinstance(builder, _Choosing):
        return [
            [Completion(transition=turn) for turn in range(len(trajectory.transitions))]
            for trajectory in group.trajectories_G
        ]
    chosen_G = list(builder.completions(group))
    if len(chosen_G) != len(group.trajectories_G):
        raise ValueError(
            f"completions must return one entry per seat; got {len(chosen_G)} for {len(group.trajectories_G)}"
        )
    return chosen_G


def unpaid_seats_of(builder: EnvGroupBuilder) -> frozenset[int]:
    """Seats of the builder's last group that gave nothing to be rewarded: their reward of 0.0 is a place holder."""
    return builder.unpaid_seats() if isinstance(builder, _PartlyPaid) else frozenset()


def credit_of(builder: EnvGroupBuilder) -> GroupCredit | None:
    """Credit of a builder's last group; ``None`` if its rewards of seats count instead."""
    return builder.credit() if isinstance(builder, _Crediting) else None


def record_of(builder: EnvGroupBuilder) -> Any:
    """The record of a builder's last group for the transcript, ready for JSON; ``None`` if it keeps none."""
    return builder.record() if isinstance(builder, _RecordsConversation) else None


@dataclass(kw_only=True)
class ExpertGroupBuilder(EnvGroupBuilder):
    """Any builder as a strategy.

    What ``inner`` says about its own strategy holds where this does not say otherwise.
    """

    inner: EnvGroupBuilder
    strategy_id: str
    context_transform: ContextTransform | None = None
    weight: float | None = None

    def __post_init__(self) -> None:
        """Take over what the inner builder says."""
        own = strategy_of(self.inner)
        self.context_transform = self.context_transform or own.context_transform
        self.weight = own.weight if self.weight is None else self.weight

    async def make_envs(self) -> Sequence[Env]:
        """The inner builder's."""
        return await self.inner.make_envs()

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        """The inner builder's."""
        return await self.inner.compute_group_rewards(trajectory_group, env_group)

    async def cleanup(self) -> None:
        """The inner builder's."""
        await self.inner.cleanup()

    def logging_tags(self) -> list[str]:
        """The strategy, and the inner builder's tags."""
        return [self.strategy_id, *(tag for tag in self.inner.logging_tags() if tag != self.strategy_id)]

    def completions(self, group: TrajectoryGroup) -> list[Sequence[Completion]]:
        """The inner builder's."""
        return completions_of(self.inner, group)

    def unpaid_seats(self) -> frozenset[int]:
        """The inner builder's."""
        return unpaid_seats_of(self.inner)

    def credit(self) -> GroupCredit | None:
        """The inner builder's."""
        return credit_of(self.inner)

    def record(self) -> Any:
        """The inner builder's."""
        return record_of(self.inner)


def iid(builder: EnvGroupBuilder, *, weight: float | None = None) -> ExpertGroupBuilder:
    """The builder as the strategy ``iid``: its datums are those of tinker-cookbook.

    These are the samples that every ratio estimator is anchored at: keep at least half of a batch of them.
    """
    return ExpertGroupBuilder(inner=builder, strategy_id=IID, weight=weight)


@dataclass(kw_only=True)
class BestOfGroupBuilder(ExpertGroupBuilder):
    """Any builder or strategy, of which only the successes are imitated.

    ``best`` keeps of the successes the one with the highest reward, the first of equals; ``all`` every one. A success
    has finished and earned more than the threshold.
    """

    strategy_id: str = "best_of"
    keep: Literal["best", "all"] = "best"
    threshold: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep not in ("best", "all"):
            raise ValueError(f"keep must be 'best' or 'all'; got {self.keep!r}")

    def completions(self, group: TrajectoryGroup) -> list[Sequence[Completion]]:
        """The inner builder's completions, with advantage 1 where it is kept and 0 elsewhere."""
        rewards_G, without = group.get_total_rewards(), self.unpaid_seats()
        successes = [
            seat
            for seat, (trajectory, reward) in enumerate(zip(group.trajectories_G, rewards_G, strict=True))
            if reward > self.threshold
            and seat not in without
            and trajectory.transitions
            and trajectory.transitions[-1].ac.stop_reason == "stop"
        ]
        if self.keep == "best" and successes:
            successes = [max(successes, key=lambda seat: (rewards_G[seat], -seat))]
        return [
            [replace(completion, advantage=float(seat in successes)) for completion in completions]
            for seat, completions in enumerate(super().completions(group))
        ]

    def credit(self) -> None:
        """None: what is kept is imitated whole."""
        return None
