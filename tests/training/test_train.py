import random

import pytest
from bandit_engine import CountEnv, CountGroup
from bandit_runs import make_run, metrics_of

from viva.judging.comparison import NoValidComparisonsError
from viva.training.loop import AllGroupsFailedError, train


async def test_the_loop_logs_every_step_and_the_final_evaluation(tmp_path):
    run = make_run(tmp_path)
    assert await train(run)
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert ["test/good" in row for row in rows] == [True, False, True, False, True, False, True]
    assert rows[0]["optim/logprob_gap_max"] < 1e-6
    assert rows[0]["rollout/groups"] == 3
    assert {"reward/mean", "reward/std", "reward/max", "reward/min", "optim/entropy", "share"} <= set(rows[0])
    assert len((tmp_path / "transcripts.jsonl").read_text().splitlines()) == 18


async def test_the_policy_learns_what_is_rewarded(tmp_path):
    run = make_run(tmp_path, num_steps=40)
    await train(run)
    rows = metrics_of(tmp_path)
    assert rows[-1]["test/good"] > rows[0]["test/good"] + 1.0


async def test_the_policy_does_not_learn_from_shuffled_rewards(tmp_path):
    class Shuffled(CountGroup):
        async def compute_group_rewards(self, trajectory_group, env_group):
            own = [trajectory.transitions[0].reward for trajectory in trajectory_group]
            other = random.Random(self.prompt).sample(own, len(own))
            return [(new - old, {}) for new, old in zip(other, own, strict=True)]

    run = make_run(tmp_path, num_steps=40, group_class=Shuffled)
    await train(run)
    rows = metrics_of(tmp_path)
    assert rows[-1]["test/good"] < rows[0]["test/good"] + 0.5


async def test_two_runs_with_one_seed_are_equal(tmp_path):
    for name in ("a", "b"):
        await train(make_run(tmp_path / name))
    assert metrics_of(tmp_path / "a") == metrics_of(tmp_path / "b")
    transcripts = [(tmp_path / name / "transcripts.jsonl").read_text() for name in ("a", "b")]
    assert transcripts[0] == transcripts[1]


async def test_another_seed_is_another_run(tmp_path):
    await train(make_run(tmp_path / "a"))
    await train(make_run(tmp_path / "b", seed=4))
    assert metrics_of(tmp_path / "a") != metrics_of(tmp_path / "b")


class LateFailure(CountGroup):
    """Groups of the fourth step cannot be played; `failing` is a switch."""

    failing = True

    async def make_envs(self):
        if self.failing and self.prompt >= 9:
            raise ConnectionError("engine unreachable")
        return await super().make_envs()


async def test_a_step_in_which_everything_fails_stops_the_run_with_its_state_saved(tmp_path, monkeypatch):
    await train(make_run(tmp_path / "whole", group_class=CountGroup))
    with pytest.raises(
        AllGroupsFailedError, match="all 3 groups of step 4 failed: ConnectionError: engine unreach"
    ):
        await train(make_run(tmp_path / "broken", group_class=LateFailure))
    assert len(metrics_of(tmp_path / "broken")) == 3
    monkeypatch.setattr(LateFailure, "failing", False)
    assert await train(make_run(tmp_path / "broken", group_class=LateFailure))
    assert metrics_of(tmp_path / "broken") == metrics_of(tmp_path / "whole")


async def test_the_first_failure_is_told_first_and_what_code_a_run_goes_on_with(tmp_path):
    class Failing(CountGroup):
        async def make_envs(self):
            raise (RuntimeError("zero") if self.prompt % 3 == 0 else ArithmeticError("later"))

    told = "step 1 failed: RuntimeError: zero; ArithmeticError: later. .* with the code that it began with"
    with pytest.raises(AllGroupsFailedError, match=told):
        await train(make_run(tmp_path, num_steps=1, group_class=Failing))


async def test_verdicts_that_cannot_be_read_are_counted_and_train_nothing(tmp_path):
    class Unreadable(CountGroup):
        async def compute_group_rewards(self, trajectory_group, env_group):
            raise NoValidComparisonsError("no verdict")

    run = make_run(tmp_path, num_steps=2, group_class=Unreadable)
    assert await train(run)
    rows = metrics_of(tmp_path)
    assert [row["rollout/void"] for row in rows[:2]] == [3, 3]
    assert [row["optim/steps"] for row in rows[:2]] == [0, 0]
    assert run.client.logits.tolist() == [0.0] * 8


async def test_a_cleanup_that_fails_too_does_not_hide_why_a_group_is_void(tmp_path):
    class Untidy(CountGroup):
        async def compute_group_rewards(self, trajectory_group, env_group):
            raise NoValidComparisonsError("no verdict")

        async def cleanup(self):
            raise OSError("sandbox is gone")

    assert await train(make_run(tmp_path, num_steps=1, group_class=Untidy))
    rows = metrics_of(tmp_path)
    assert (rows[0]["rollout/void"], rows[0]["rollout/errors/OSError"]) == (3, 6)


async def test_no_metric_of_an_environment_takes_the_place_of_the_loops_own(tmp_path):
    def group(names):
        class Env(CountEnv):
            async def step(self, action, *, extra=None):
                result = await super().step(action, extra=extra)
                result.metrics.update(dict.fromkeys(names, -7.0))
                return result

        class Group(CountGroup):
            async def make_envs(self):
                return [Env(self.prompt) for _ in range(self.size)]

        return Group

    taken = ["step", "rollout/groups", "num_turns", "reward/mean"]
    await train(make_run(tmp_path / "plain", num_steps=2))
    await train(make_run(tmp_path / "taken", num_steps=2, group_class=group(taken)))
    rows = metrics_of(tmp_path / "taken")
    assert [{name: row.pop(f"env/{name}") for name in taken} for row in rows[:2]] == [
        dict.fromkeys(taken, -7.0)
    ] * 2
    assert rows == metrics_of(tmp_path / "plain")
    await train(make_run(tmp_path / "tested", num_steps=2, group_class=group(["test/good"])))
    assert metrics_of(tmp_path / "tested")[0] == metrics_of(tmp_path / "plain")[0]


async def test_groups_without_a_signal_are_counted_and_left_out(tmp_path):
    class Equal(CountGroup):
        async def compute_group_rewards(self, trajectory_group, env_group):
            return [(1.0 - trajectory.transitions[0].reward, {}) for trajectory in trajectory_group]

    run = make_run(tmp_path, num_steps=1, group_class=Equal)
    await train(run)
    row = metrics_of(tmp_path)[0]
    assert (row["advantage/silent_groups_share"], row["optim/datums"]) == (1.0, 0)


async def test_a_failed_seat_is_neither_centred_nor_trained(tmp_path):
    class FailingEnv(CountEnv):
        async def step(self, action, *, extra=None):
            if self.prompt == "fails":
                raise ValueError("lost")
            return await super().step(action, extra=extra)

        async def abort(self, reason):
            self.reason = reason

    class OneFails(CountGroup):
        async def make_envs(self):
            return [FailingEnv(1), FailingEnv("fails"), FailingEnv(1)]

        async def compute_group_rewards(self, trajectory_group, env_group):
            assert trajectory_group[1].stop_reason == "failed"
            return [(1.0, {}), (99.0, {}), (-1.0, {})]

    FailingEnv.initial_observation = lambda self: CountEnv(1).initial_observation()
    run = make_run(tmp_path, num_steps=1, group_class=OneFails)
    await train(run)
    row = metrics_of(tmp_path)[0]
    assert row["rollout/failed_seats"] == 3
    assert row["optim/datums"] == 6
    assert row["reward/max"] < 3
    assert row["advantage/mean"] == pytest.approx(0, abs=1e-12)


async def test_the_last_three_checkpoints_and_the_final_one_are_kept(tmp_path):
    run = make_run(tmp_path, num_steps=9)
    assert await train(run)
    kept = run.folder.checkpoints.all()
    assert [checkpoint.name for checkpoint in kept] == ["000004", "000006", "000008", "000009"]
    assert [checkpoint.final for checkpoint in kept] == [False, False, False, True]
    assert sorted(path.name for path in (tmp_path / "state" / "weights").iterdir()) == [
        checkpoint.name for checkpoint in kept
    ]
