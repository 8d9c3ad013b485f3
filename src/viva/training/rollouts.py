"""Rollouts that tolerate failure: what goes wrong is recorded as data, retried by rule, never silently dropped.

1. A failure of one seat (an exception, a timeout, a cancelled call) is caught in `_caught`, recorded with its type,
   message, seat and turn, and passed to the environment's ``abort(reason)`` if it is `Abortable`. Peers go on.
   If ``abort`` itself raises, they might wait for the failed seat for ever: they are stopped and the group is void.
2. If an environment without ``abort`` failed, its group is void: a grader that expects whole episodes must not see
   half of one. Environments with ``abort`` know about failures; their builder decides when it computes the rewards.
   Where every seat failed, the group is void whatever was decided: nobody is left who earned a reward.
3. A void group is retried whole, with fresh environments and new seeds, up to ``max_retries`` times (retrying one
   seat would put it into a different conversation). Then it is recorded as void, with its reason.
4. What ``cleanup`` raises is recorded; the rewards are known by then, and the group counts.
5. Metrics of a void attempt are kept all the same, if they are numbers: those of its turns, and those that the error
   brings along in an attribute ``metrics``.
6. Interrupts (the cancellation of the task that runs the rollouts) are not failures and propagate.

Results come in seat and group order, whatever finished first.

Legend: ``_P`` groups of a batch, ``_G`` members of a group (seats).
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, SupportsFloat, TypeAlias, TypeVar, runtime_checkable

import tinker
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.rollouts import do_single_rollout
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, Metrics, Trajectory, TrajectoryGroup

from viva.conversation.coordinator import gather_or_cancel, is_interrupted
from viva.experts.strategy import unpaid_seats_of
from viva.judging.usage import Meter, Role, Usage, count_tokens, metering
from viva.sdk import settled
from viva.selfplay.group import MultiAgentConversationEnv, close_board, pair_up
from viva.training.sampling import SeededCompleter

FAILED = "failed"
"""Stop reason of the empty trajectory that stands for a failed seat."""

_T = TypeVar("_T")

Place: TypeAlias = tuple[int, int]
"""Agent and round of a conversation, both from 0."""


class UnusableReplyError(ValueError):
    """A sampler's reply has no token, or not one logprob for each."""


class SeatPolicy(Protocol):
    """Hands every seat its own completer."""

    def seat(self, *, group: int, attempt: int, seat: int) -> TokenCompleter:
        """The completer of one seat in one attempt at one group."""
        ...


@runtime_checkable
class Abortable(Protocol):
    """An environment that learns when its seat failed, so that its peers can go on."""

    def abort(self, reason: str) -> Any:
        """End this seat; may be a coroutine function."""


@runtime_checkable
class _Placed(Protocol):
    """An environment that names the turn of a conversation it waits for."""

    agent_id: Any
    round_index: Any


@runtime_checkable
class _Measured(Protocol):
    """An error that brings metrics along."""

    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFailure:
    """One failure; ``seat`` and ``turn`` are ``None`` where the group as a whole failed."""

    attempt: int
    seat: int | None
    turn: int | None
    error_type: str
    message: str
    place: Place | None = None
    """The turn that failed, if the environment names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """The outcome of one group."""

    builder: EnvGroupBuilder
    group: TrajectoryGroup | None
    """Trajectories and rewards in seat order; ``None`` if the group is void."""
    failed_seats: frozenset[int] = frozenset()
    """Seats without a trajectory in a group that counts: they are neither rewarded nor trained."""
    failures: tuple[RolloutFailure, ...] = ()
    """Failures of all attempts."""
    void_reason: str | None = None
    void_failure: RolloutFailure | None = None
    """The failure behind the reason; others may have come after it."""
    retries: int = 0
    usage: Mapping[Role, Usage] = field(default_factory=dict[Role, Usage])
    """Tokens that policy, judge and scorer read and sampled in all attempts, also in those thrown away."""
    asked: Mapping[Place, int] = field(default_factory=dict[Place, int])
    """Calls of the policy for each turn, in all attempts, where environments are placed in a conversation."""
    void_metrics: tuple[Metrics, ...] = ()
    """Metrics of void attempts, also of those that were played again: of each turn, and of what ended the attempt."""

    @property
    def unpaid_seats(self) -> frozenset[int]:
        """Seats without a reward: they failed, or have a place holder."""
        return self.failed_seats | unpaid_seats_of(self.builder)

    def paid_rewards(self) -> list[float | None]:
        """The reward of every seat, ``None`` where it failed or has a place holder; of a void group, nothing."""
        if self.group is None:
            return []
        without, rewards_G = self.unpaid_seats, self.group.get_total_rewards()
        return [None if seat in without else reward for seat, reward in enumerate(rewards_G)]


@dataclass(frozen=True, slots=True)
class _Caught:
    error_type: str
    message: str
    metrics: Mapping[str, float]

    def __str__(self) -> str:
        return f"{self.error_type}: {self.message}" if self.message else self.error_type


async def _caught(awaitable: Awaitable[_T]) -> _T | _Caught:
    """The one boundary at which failures of policies, environments and rewards become data."""
    try:
        return await awaitable
    except asyncio.CancelledError as error:
        if is_interrupted():
            raise
        return _Caught(type(error).__name__, str(error) or "the call was cancelled", {})
    except Exception as error:  # noqa: BLE001 - whatever user code or an engine raises is recorded, see above
        told = "; ".join(filter(None, [str(error), *getattr(error, "__notes__", ())]))
        return _Caught(type(error).__name__, told, error.metrics if isinstance(error, _Measured) else {})


class _CheckingCompleter(TokenCompleter):
    """Passes calls on, counts them and checks the replies, for any completer."""

    def __init__(self, inner: TokenCompleter, env: Env) -> None:
        self.inner = inner
        self.env = env
        self.num_calls = 0
        self.asked: list[Place] = []

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        self.num_calls += 1
        place = _place(self.env)
        if place is not None:
            self.asked.append(place)
        if isinstance(self.inner, SeededCompleter) and isinstance(self.env, MultiAgentConversationEnv):
            self.inner.speaker = self.env.speaker
        limits = {} if max_tokens is None else {"max_tokens": max_tokens}
        result = await self.inner(model_input, stop, **limits)
        count_tokens("policy", prompt=model_input.length, sampled=len(result.tokens))
        _check_reply(result)
        return result


def _place(env: Env) -> Place | None:
    """The turn that an environment waits for, if it is one of a conversation."""
    if not isinstance(env, _Placed):
        return None
    agent_id, round_index = env.agent_id, env.round_index
    # others may mean something else by it
    return (agent_id, round_index) if isinstance(agent_id, int) and isinstance(round_index, int) else None


def _check_reply(reply: TokensWithLogprobs) -> None:
    """Refuse what cannot be trained on before it gets into a conversation."""
    if not reply.tokens:
        raise UnusableReplyError(
            "the sampler returned a reply without a token, not even the one that ends it"
        )
    logprobs = reply.maybe_logprobs
    if logprobs is None:
        return
    if len(logprobs) != len(reply.tokens):
        raise UnusableReplyError(
            f"the sampler returned {len(logprobs)} logprobs for {len(reply.tokens)} tokens; there must be one for each"
        )
    place = next((place for place, logprob in enumerate(logprobs) if not math.isfinite(logprob)), None)
    if place is not None:
        raise FloatingPointError(
            f"the sampler returned the logprob {logprobs[place]} for token {place} of {len(reply.tokens)}; it must be "
            "a finite number"
        )


def _check_metrics(metrics: Metrics, seat: int) -> None:
    """Refuse what cannot be averaged before the group counts."""
    for name, value in metrics.items():
        if not _is_number(value):
            raise ValueError(
                f"metrics must be numbers; {name!r} of seat {seat} is {value!r:.80}. Give a number, or leave it out"
            )


def _numbers(metrics: Mapping[str, float]) -> Metrics:
    return {name: value for name, value in metrics.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    """Whether `float` takes it; not a text, which it would read."""
    if not isinstance(value, SupportsFloat):
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # an array of several, or beyond every float
        return False
    return True


class _AbortFailedError(Exception):
    """An environment could not be aborted after its failure."""

    def __init__(self, seat: int, failure: _Caught, abort_failure: _Caught) -> None:
        super().__init__(seat, failure, abort_failure)
        self.seat = seat
        self.failure = failure
        self.abort_failure = abort_failure


async def _run_seat(seat: int, env: Env, completer: TokenCompleter) -> Trajectory | _Caught:
    result = await _caught(do_single_rollout(completer, env))
    if isinstance(result, _Caught) and isinstance(env, Abortable):
        failure = await _caught(_abort(env, str(result)))
        if failure is not None:
            raise _AbortFailedError(seat, result, failure)
    return result


async def _abort(env: Abortable, reason: str) -> None:
    await settled(env.abort(reason))


_Ending: TypeAlias = tuple[str, RolloutFailure]
"""Reason why an attempt is void, and the failure behind it."""


class _Attempts:
    """Plays a group, if need be again, and keeps what went wrong and what it cost."""

    def __init__(self, builder: EnvGroupBuilder, policy: SeatPolicy, group_index: int) -> None:
        self.builder = builder
        self.policy = policy
        self.group_index = group_index
        self.number = 0
        self.failures: list[RolloutFailure] = []
        self.failed_seats: frozenset[int] = frozenset()
        self.first_failed: _Ending | None = None
        self.void: _Ending | None = None
        self.asked: Counter[Place] = Counter()
        self.void_metrics: list[Metrics] = []

    async def run(self, number: int) -> TrajectoryGroup | None:
        """The group, or ``None`` with ``void`` set."""
        self.number, self.failed_seats = number, frozenset()
        self.first_failed = self.void = None
        try:
            envs = await _caught(self.builder.make_envs())
            if isinstance(envs, _Caught):
                return self._end(envs)
            trajectories_G = await self._play(envs)
            if trajectories_G is None:
                return None
            rewards = await _caught(self._rewards(trajectories_G, envs))
            if isinstance(rewards, _Caught):
                self._keep_turn_metrics(trajectories_G)
                self.void_metrics.append(_numbers(rewards.metrics))
                return self._end(rewards)
            if envs and len(self.failed_seats) == len(envs):
                self.void = self.first_failed
                return None
            return rewards
        finally:
            cleaned = await _caught(self.builder.cleanup())
            if cleaned is not None:
                self._record(cleaned)

    async def _play(self, envs: Sequence[Env]) -> list[Trajectory] | None:
        completers = [
            _CheckingCompleter(self.policy.seat(group=self.group_index, attempt=self.number, seat=seat), env)
            for seat, env in enumerate(envs)
        ]
        seats = enumerate(zip(envs, completers, strict=True))
        try:
            results_G = await gather_or_cancel(
                _run_seat(seat, env, completer) for seat, (env, completer) in seats
            )
        except* _AbortFailedError as errors:
            results_G = None
            self._record_failed_aborts(errors, completers)
        finally:
            self.asked.update(place for completer in completers for place in completer.asked)
        if results_G is None:
            return None
        trajectories_G: list[Trajectory] = []
        for seat, result in enumerate(results_G):
            if isinstance(result, _Caught):
                ending = self._seat_ending(seat, result, completers[seat])
                self.failed_seats |= {seat}
                self.first_failed = self.first_failed or ending
                if not isinstance(envs[seat], Abortable):
                    self.void = self.void or ending
                result = Trajectory(transitions=[], final_ob=tinker.ModelInput.empty(), stop_reason=FAILED)
            trajectories_G.append(result)
        if self.void:
            self._keep_turn_metrics(trajectories_G)
            return None
        return trajectories_G

    def _record_failed_aborts(
        self, errors: ExceptionGroup[_AbortFailedError], completers: Sequence[_CheckingCompleter]
    ) -> None:
        found = [error for error in errors.exceptions if isinstance(error, _AbortFailedError)]
        for error in sorted(found, key=lambda error: error.seat):
            reason, failure = self._seat_ending(error.seat, error.failure, completers[error.seat])
            self._record(error.abort_failure, seat=error.seat, turn=failure.turn)
            untold = f"its environment could not be told: {error.abort_failure}"
            self.void = self.void or (f"{reason}; {untold}", failure)

    def _seat_ending(self, seat: int, caught: _Caught, completer: _CheckingCompleter) -> _Ending:
        turn = max(completer.num_calls - 1, 0)
        failure = self._record(caught, seat=seat, turn=turn, place=_place(completer.env))
        return f"seat {seat} failed: {caught}", failure

    def _keep_turn_metrics(self, trajectories_G: Sequence[Trajectory]) -> None:
        self.void_metrics += [_numbers(turn.metrics) for traj in trajectories_G for turn in traj.transitions]

    async def _rewards(self, trajectories_G: list[Trajectory], envs: Sequence[Env]) -> TrajectoryGroup:
        rewards_and_metrics_G = await self.builder.compute_group_rewards(trajectories_G, envs)
        if len(rewards_and_metrics_G) != len(trajectories_G):
            raise ValueError(
                f"compute_group_rewards must return one reward per environment; got {len(rewards_and_metrics_G)} "
                f"for {len(trajectories_G)}"
            )
        rewards_G: list[float] = [float(reward) for reward, _ in rewards_and_metrics_G]
        metrics_G: list[Metrics] = [metrics for _, metrics in rewards_and_metrics_G]
        group = TrajectoryGroup(trajectories_G, rewards_G, metrics_G)
        totals_G = group.get_total_rewards()
        for seat, reward in enumerate(totals_G):
            if seat not in self.failed_seats and not math.isfinite(reward):
                raise ValueError(f"rewards must be finite numbers; seat {seat} got {reward}")
        for seat, (trajectory, own) in enumerate(zip(trajectories_G, metrics_G, strict=True)):
            for metrics in (own, *(turn.metrics for turn in trajectory.transitions)):
                _check_metrics(metrics, seat)
        return group

    def _record(
        self, caught: _Caught, *, seat: int | None = None, turn: int | None = None, place: Place | None = None
    ) -> RolloutFailure:
        failure = RolloutFailure(
            attempt=self.number,
            seat=seat,
            turn=turn,
            error_type=caught.error_type,
            message=caught.message,
            place=place,
        )
        self.failures.append(failure)
        return failure

    def _end(self, caught: _Caught) -> None:
        self.void = (str(caught), self._record(caught))


async def run_group(
    builder: EnvGroupBuilder, policy: SeatPolicy, *, group_index: int = 0, max_retries: int = 1
) -> GroupOutcome:
    """Play one group of any tinker-cookbook environments, all seats concurrently, and compute its rewards.

    ``group_index`` is part of the seeds. The builder's ``cleanup`` is called after every attempt.

    Returns:
        The outcome. It never raises for what happened inside the group, see the module's rules.
    """
    if max_retries < 0:
        raise ValueError(f"max_retries must be 0 or more; got {max_retries}")
    attempts, meter, group = _Attempts(builder, policy, group_index), Meter(), None
    for number in range(max_retries + 1):
        with metering(meter):
            group = await attempts.run(number)
        if group is not None:
            break
    reason, failure = attempts.void or (None, None)
    return GroupOutcome(
        builder=builder,
        group=group,
        failed_seats=attempts.failed_seats if group is not None else frozenset(),
        failures=tuple(attempts.failures),
        void_reason=reason,
        void_failure=failure,
        retries=attempts.number,
        usage=dict(meter.by_role),
        asked=attempts.asked,
        void_metrics=tuple(attempts.void_metrics),
    )


async def run_groups(
    builders_P: Sequence[EnvGroupBuilder],
    policy: SeatPolicy,
    *,
    max_retries: int = 1,
    on_group: Callable[[int, GroupOutcome], None] | None = None,
) -> list[GroupOutcome]:
    """Play all groups of a batch concurrently, see `run_group`; outcomes in the order of the builders.

    ``on_group`` is called with a group's place as it ends, not in group order. Conversations that read one another's
    critiques are paired (`viva.selfplay.group.pair_up`).
    """
    pair_up(builders_P)

    async def run(index: int, builder: EnvGroupBuilder) -> GroupOutcome:
        outcome = await run_group(builder, policy, group_index=index, max_retries=max_retries)
        close_board(builder)
        if on_group is not None:
            on_group(index, outcome)
        return outcome

    return await gather_or_cancel(run(index, builder) for index, builder in enumerate(builders_P))
