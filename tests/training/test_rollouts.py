"""Failure is data: recorded, told, retried whole, and never at the peers' cost."""

import asyncio
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import tinker
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, StepResult

from viva.judging.records import Transcript
from viva.judging.usage import Usage
from viva.training.metrics import rollout_metrics
from viva.training.records import transcript_row
from viva.training.rollouts import FAILED, run_group, run_groups
from viva.view.entries import entry_of


class Script(TokenCompleter):
    """Answers with its place; fails where the script says so."""

    def __init__(self, place, plan):
        self.place, self.plan, self.calls = place, plan, 0

    async def __call__(self, model_input, stop, *, max_tokens=None):
        action = self.plan.get((*self.place, self.calls))
        self.calls += 1
        if isinstance(action, float):
            await asyncio.sleep(action)
        elif action == "cancelled":
            raise asyncio.CancelledError
        elif action == "hang":
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        elif action is not None:
            raise action
        return TokensWithLogprobs(tokens=list(self.place), maybe_logprobs=[-1.0] * 3)


class ScriptedPolicy:
    """`plan` maps (group, attempt, seat, call) to a delay, an exception, "cancelled" or "hang"."""

    def __init__(self, plan=None):
        self.plan = plan or {}

    def seat(self, *, group, attempt, seat):
        return Script((group, attempt, seat), self.plan)


class TwoTurnEnv(Env):
    def __init__(self):
        self.turns = 0

    async def initial_observation(self):
        return tinker.ModelInput.from_ints([1]), []

    async def step(self, action, *, extra=None):
        self.turns += 1
        return StepResult(
            reward=float(action[2]),
            episode_done=self.turns == 2,
            next_observation=tinker.ModelInput.from_ints([1]),
            next_stop_condition=[],
        )


class ToldEnv(TwoTurnEnv):
    """Knows about failures."""

    reason = None

    async def abort(self, reason):
        self.reason = reason


class Builder(EnvGroupBuilder):
    def __init__(self, env_class=TwoTurnEnv, size=3, rewards=None):
        self.env_class, self.size, self.rewards = env_class, size, rewards
        self.made, self.cleaned, self.seen = [], 0, []

    async def make_envs(self) -> Sequence[Env]:
        self.made.append([self.env_class() for _ in range(self.size)])
        return self.made[-1]

    async def compute_group_rewards(self, trajectory_group, env_group):
        self.seen.append([len(trajectory.transitions) for trajectory in trajectory_group])
        if self.rewards is not None:
            return await self.rewards(trajectory_group, env_group)
        return [(0.0, {}) for _ in trajectory_group]

    async def cleanup(self):
        self.cleaned += 1


async def test_a_group_without_failures_counts_everything():
    builder = Builder()
    outcome = await run_group(builder, ScriptedPolicy())
    assert outcome.group is not None
    assert outcome.group.get_total_rewards() == [0.0, 2.0, 4.0]
    assert (outcome.retries, builder.cleaned) == (0, 1)
    read = sum(turn.ob.length for each in outcome.group.trajectories_G for turn in each.transitions)
    assert outcome.usage == {"policy": Usage(prompt_tokens=read, sampled_tokens=18)}


async def test_a_failed_seat_voids_the_attempt_and_the_group_is_played_again_with_fresh_envs():
    builder = Builder()
    outcome = await run_group(builder, ScriptedPolicy({(0, 0, 1, 1): RuntimeError("sampler down")}))
    assert outcome.group is not None
    assert (outcome.retries, len(builder.made), builder.cleaned) == (1, 2, 2)
    (failure,) = outcome.failures
    assert (failure.attempt, failure.seat, failure.turn) == (0, 1, 1)
    assert (failure.error_type, failure.message) == ("RuntimeError", "sampler down")
    assert {turn.ac.tokens[1] for traj in outcome.group.trajectories_G for turn in traj.transitions} == {1}


async def test_a_group_that_fails_too_often_is_void_with_its_reason():
    plan = {(0, attempt, 2, 0): ValueError("no room") for attempt in range(2)}
    builder = Builder()
    outcome = await run_group(builder, ScriptedPolicy(plan), max_retries=1)
    assert outcome.group is None
    assert outcome.void_reason == "seat 2 failed: ValueError: no room"
    assert [failure.attempt for failure in outcome.failures] == [0, 1]
    assert outcome.usage["policy"].sampled_tokens == 2 * 2 * 2 * 3
    assert builder.cleaned == 2


@pytest.mark.parametrize(
    ("action", "error_type"),
    [("cancelled", "CancelledError"), ("hang", "TimeoutError"), (OSError("x"), "OSError")],
)
async def test_every_kind_of_failure_of_one_seat_leaves_its_peers_alone(action, error_type):
    builder = Builder(ToldEnv)
    outcome = await run_group(builder, ScriptedPolicy({(0, 0, 0, 0): action}))
    assert outcome.group is not None
    assert outcome.failed_seats == {0}
    assert [failure.error_type for failure in outcome.failures] == [error_type]
    assert builder.seen == [[0, 2, 2]]
    assert outcome.group.trajectories_G[0].stop_reason == FAILED
    assert builder.made[0][0].reason.startswith(error_type)
    assert [env.reason for env in builder.made[0][1:]] == [None, None]


async def test_a_group_of_which_nobody_is_left_is_void_and_played_again():
    lost = {(0, 0, seat, 0): ValueError(f"no room {seat}") for seat in range(3)}
    again = {(0, 1, seat, 1): OSError("still none") for seat in range(3)}
    outcome = await run_group(Builder(ToldEnv), ScriptedPolicy(lost | again), max_retries=1)
    assert outcome.group is None
    assert outcome.void_reason == "seat 0 failed: OSError: still none"
    assert (outcome.retries, len(outcome.failures), outcome.failed_seats) == (1, 6, frozenset())
    row = transcript_row(3, 4, outcome)
    assert (row["void"], row["void_reason"], row["rewards"]) == (True, outcome.void_reason, None)
    mended = await run_group(Builder(ToldEnv), ScriptedPolicy(lost), max_retries=1)
    assert mended.group is not None
    assert (mended.void_reason, mended.failed_seats, mended.retries) == (None, frozenset(), 1)


async def test_a_transcript_has_no_reward_where_nobody_earned_one():
    class PartlyPaid(Builder):
        def unpaid_seats(self):
            return frozenset({2})

    outcome = await run_group(PartlyPaid(ToldEnv, size=4), ScriptedPolicy({(0, 0, 0, 0): OSError("x")}))
    row = transcript_row(0, 0, outcome)
    assert (row["void"], row["rewards"]) == (False, [None, 2.0, None, 6.0])
    read = Transcript.parse("line 1", row)
    assert entry_of(0, read).reward_mean == 4.0


async def test_an_environment_may_name_its_agents_as_it_likes():
    class Named(ToldEnv):
        agent_id, round_index = "alice", "opening"

    outcome = await run_group(Builder(Named), ScriptedPolicy({(0, 0, 0, 0): OSError("x")}))
    assert outcome.group is not None
    assert [failure.error_type for failure in outcome.failures] == ["OSError"]
    assert (outcome.asked, outcome.failures[0].place) == ({}, None)


async def test_a_reward_that_raises_voids_the_group_and_is_never_replaced():
    async def broken(trajectories, envs):
        raise ConnectionError("judge unreachable")

    outcome = await run_group(Builder(rewards=broken), ScriptedPolicy(), max_retries=0)
    assert outcome.group is None
    assert outcome.void_reason == "ConnectionError: judge unreachable"
    assert outcome.failures[0].seat is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
async def test_a_reward_that_is_no_number_voids_the_group(bad):
    async def broken(trajectories, envs):
        return [(bad, {}), (0.0, {}), (0.0, {})]

    outcome = await run_group(Builder(rewards=broken), ScriptedPolicy(), max_retries=0)
    assert outcome.void_reason == f"ValueError: rewards must be finite numbers; seat 0 got {bad}"


@pytest.mark.parametrize("bad", [None, "blue", "42", b"42", [1.0], np.zeros(2)])
@pytest.mark.parametrize("place", ["turn", "seat"])
async def test_a_metric_that_is_no_number_voids_the_group_and_is_named(bad, place):
    class Telling(TwoTurnEnv):
        async def step(self, action, *, extra=None):
            result = await super().step(action, extra=extra)
            result.metrics = {"turns": self.turns, "answer": bad if action[2] == 1 else 1.0}
            return result

    async def rewards(trajectories, envs):
        return [(0.0, {}), (0.0, {"answer": bad}), (0.0, {})]

    builder = Builder(Telling) if place == "turn" else Builder(rewards=rewards)
    outcome = await run_group(builder, ScriptedPolicy(), max_retries=0)
    assert str(outcome.void_reason).startswith(
        f"ValueError: metrics must be numbers; 'answer' of seat 1 is {bad!r}"
    )
    metrics = rollout_metrics([outcome])
    if place == "turn":  # the numbers beside it are kept
        assert (metrics["void/turns"], metrics["void/answer"]) == (1.5, 1.0)


@pytest.mark.parametrize("good", [True, 3, np.float32(0.5), np.True_, torch.tensor(2.0), Fraction(1, 2)])
async def test_whatever_is_a_number_is_a_metric(good):
    async def rewards(trajectories, envs):
        return [(0.0, {"answer": good}) for _ in envs]

    outcome = await run_group(Builder(rewards=rewards), ScriptedPolicy())
    assert rollout_metrics([outcome])["answer"] == float(good)


async def test_a_wrong_number_of_rewards_voids_the_group():
    async def broken(trajectories, envs):
        return [(0.0, {})]

    outcome = await run_group(Builder(rewards=broken), ScriptedPolicy(), max_retries=0)
    assert "got 1 for 3" in str(outcome.void_reason)


async def test_envs_that_cannot_be_made_void_the_group():
    class Broken(Builder):
        async def make_envs(self):
            raise FileNotFoundError("no container")

    builder = Broken()
    outcome = await run_group(builder, ScriptedPolicy(), max_retries=2)
    assert outcome.void_reason == "FileNotFoundError: no container"
    assert (outcome.retries, builder.cleaned, len(outcome.failures)) == (2, 3, 3)


async def test_a_cleanup_that_raises_is_recorded_and_the_group_counts():
    class Untidy(Builder):
        async def cleanup(self):
            await super().cleanup()
            raise OSError("container gone")

    builder = Untidy()
    outcome = await run_group(builder, ScriptedPolicy())
    assert outcome.group is not None
    assert (outcome.retries, builder.cleaned) == (0, 1)
    (failure,) = outcome.failures
    assert (failure.seat, failure.error_type, failure.message) == (None, "OSError", "container gone")


@pytest.mark.parametrize("is_async", [True, False])
async def test_an_abort_that_raises_voids_the_group_and_stops_the_peers(is_async):
    class Deaf(TwoTurnEnv):
        async def aborted(self, reason):
            raise LookupError("no such seat")

        def abort(self, reason):
            if is_async:
                return self.aborted(reason)
            raise LookupError("no such seat")

    plan = {(0, 0, 1, 1): RuntimeError("sampler down"), (0, 0, 0, 1): 1e6, (0, 0, 2, 0): 1e6}
    builder = Builder(Deaf)
    async with asyncio.timeout(5):
        first, second = await run_groups([builder, Builder()], ScriptedPolicy(plan), max_retries=0)
    assert first.group is None
    assert first.void_reason == (
        "seat 1 failed: RuntimeError: sampler down; its environment could not be told: LookupError: no such seat"
    )
    told = [(failure.seat, failure.turn, failure.error_type) for failure in first.failures]
    assert told == [(1, 1, "RuntimeError"), (1, 1, "LookupError")]
    assert (builder.cleaned, first.usage["policy"].sampled_tokens) == (1, 6)
    assert second.group is not None
    assert len(asyncio.all_tasks()) == 1


class CountedEnv(TwoTurnEnv):
    """Measures its turns."""

    async def step(self, action, *, extra=None):
        result = await super().step(action, extra=extra)
        result.metrics["parse/ok"] = float(self.turns == 1)
        return result


async def test_void_attempts_keep_what_their_turns_and_their_error_tell():
    class UnreadableError(RuntimeError):
        metrics = {"judge/invalid_rate": 1.0}  # noqa: RUF012 - read only

    async def unreadable(trajectories, envs):
        raise UnreadableError("no verdict")

    outcome = await run_group(Builder(CountedEnv, rewards=unreadable), ScriptedPolicy(), max_retries=1)
    metrics = rollout_metrics([outcome, await run_group(Builder(CountedEnv), ScriptedPolicy())])
    assert (metrics["void/parse/ok"], metrics["void/judge/invalid_rate"]) == (0.5, 1.0)
    assert len(outcome.void_metrics) == 2 * (3 * 2 + 1)
    assert metrics["parse/ok"] == 0.5


async def test_a_seat_that_failed_leaves_the_turns_of_its_peers_to_the_metrics_of_void_attempts():
    plan = {(0, 0, 0, 0): RuntimeError("x")}
    outcome = await run_group(Builder(CountedEnv), ScriptedPolicy(plan), max_retries=1)
    assert outcome.group is not None  # played again
    assert rollout_metrics([outcome])["void/parse/ok"] == 0.5
    assert len(outcome.void_metrics) == 4


async def test_groups_that_count_have_no_void_metrics():
    outcome = await run_group(Builder(CountedEnv), ScriptedPolicy())
    assert not [key for key in rollout_metrics([outcome]) if key.startswith("void/")]


async def test_a_negative_number_of_retries_is_refused():
    with pytest.raises(ValueError, match="0 or more; got -1"):
        await run_group(Builder(), ScriptedPolicy(), max_retries=-1)


async def test_an_interrupt_is_not_a_failure_and_leaves_no_task_behind():
    builder = Builder(ToldEnv)
    plan = {(0, 0, seat, 1): 30.0 for seat in range(3)}
    task = asyncio.create_task(run_groups([builder], ScriptedPolicy(plan)))
    await asyncio.sleep(0.01)
    before = len(asyncio.all_tasks())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert before > 2
    assert len(asyncio.all_tasks()) == 1
    assert builder.cleaned == 1
    assert [env.reason for env in builder.made[0]] == [None] * 3


async def test_all_groups_and_seats_are_in_flight_together():
    running, most = 0, 0

    class Counting(TokenCompleter):
        async def __call__(self, model_input, stop, *, max_tokens=None):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1
            return TokensWithLogprobs(tokens=[0, 0, 0], maybe_logprobs=[-1.0] * 3)

    class Policy:
        def seat(self, **place):
            return Counting()

    await run_groups([Builder() for _ in range(5)], Policy())
    assert most == 15


@settings(deadline=None, max_examples=15)
@given(st.lists(st.floats(0, 0.003), min_size=18, max_size=18))
async def test_results_do_not_depend_on_who_finishes_first(delays):
    places = [(group, 0, seat, call) for group in range(3) for seat in range(3) for call in range(2)]
    plan = dict(zip(places, delays, strict=True))
    outcomes = await run_groups([Builder() for _ in range(3)], ScriptedPolicy(plan))
    tokens = [
        [traj.transitions[0].ac.tokens for traj in outcome.group.trajectories_G] for outcome in outcomes
    ]
    assert tokens == [[[group, 0, seat] for seat in range(3)] for group in range(3)]


async def test_progress_is_told_about_every_group():
    seen = []
    await run_groups(
        [Builder(), Builder()], ScriptedPolicy(), on_group=lambda index, outcome: seen.append(outcome)
    )
    assert len(seen) == 2


@settings(deadline=None, max_examples=30)
@given(st.data())
async def test_every_group_ends_complete_or_void_with_a_reason(data):
    plan = {}
    for group in range(4):
        for attempt in range(2):
            for seat in range(3):
                if data.draw(st.integers(0, 9)) == 0:
                    plan[(group, attempt, seat, data.draw(st.integers(0, 1)))] = data.draw(
                        st.sampled_from(["cancelled", RuntimeError("boom")])
                    )
    outcomes = await run_groups([Builder() for _ in range(4)], ScriptedPolicy(plan))
    for group, outcome in enumerate(outcomes):
        failing = [attempt for attempt in range(2) if any(key[:2] == (group, attempt) for key in plan)]
        assert (outcome.group is None) == (failing == [0, 1])
        assert (outcome.void_reason is None) == (outcome.group is not None)
        assert outcome.retries == int(0 in failing)
