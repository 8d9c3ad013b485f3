"""The loop trains on what spans earned, if a group's builder gives credit."""

import json
import statistics

import pytest
from bandit_engine import CountEnv, CountGroup
from bandit_runs import make_run, metrics_of
from credited_groups import STREAM, Credited

from viva.rewards.credit import GroupCredit, SpanCredit
from viva.training.batch import plain_batch
from viva.training.loop import train


def trained_tokens(run):
    """Advantages that reach the engine, one list per datum."""
    seen = []
    forward_backward = run.client.forward_backward

    def recording(data, *options):
        seen.extend(datum.loss_fn_inputs["advantages"].to_numpy().tolist() for datum in data)
        return forward_backward(data, *options)

    run.client.forward_backward = recording
    return seen


async def test_only_credited_tokens_reach_the_engine_with_an_advantage(tmp_path):
    run = make_run(tmp_path, num_steps=4, group_class=Credited)
    seen = trained_tokens(run)
    await train(run)
    assert seen
    assert all(advantages[0] != 0 and not any(advantages[1:]) for advantages in seen)


async def test_the_policy_learns_from_credit_where_rewards_say_nothing(tmp_path):
    await train(make_run(tmp_path, num_steps=60, group_class=Credited))
    rows = metrics_of(tmp_path)
    assert rows[-1]["test/good"] > rows[0]["test/good"] + 0.5


async def test_streams_and_masked_tokens_are_in_the_metrics(tmp_path):
    await train(make_run(tmp_path, num_steps=1, group_class=Credited))
    row = metrics_of(tmp_path)[0]
    rewards = [span.reward for span in _spans(tmp_path)]
    assert row["credit/r_sol/mean"] == pytest.approx(sum(rewards) / len(rewards))
    assert row["credit/r_sol/std"] == pytest.approx(statistics.pstdev(rewards))
    assert row["credit/masked_share"] == pytest.approx(1 - len(rewards) / row["rollout/sampled_tokens"])


def _spans(folder):
    rows = [json.loads(line) for line in (folder / "transcripts.jsonl").read_text().splitlines()]
    return [SpanCredit(**span) for row in rows for span in row["record"]]


async def test_a_group_without_credit_is_trained_on_its_rewards(tmp_path):
    class Without(Credited):
        def credit(self):
            return None

    class Opposite(CountGroup):
        async def compute_group_rewards(self, trajectory_group, env_group):
            return [(-trajectory.transitions[0].reward, {}) for trajectory in trajectory_group]

    for name, group_class in (("a", Without), ("b", Opposite)):
        await train(make_run(tmp_path / name, num_steps=2, group_class=group_class))
    assert metrics_of(tmp_path / "a") == metrics_of(tmp_path / "b")


async def test_a_group_in_which_nothing_earns_is_silent(tmp_path):
    class Nothing(Credited):
        def credit(self):
            return GroupCredit(spans=(), weights={})

    run = make_run(tmp_path, num_steps=1, group_class=Nothing)
    await train(run)
    row = metrics_of(tmp_path)[0]
    assert (row["optim/datums"], row["credit/masked_share"]) == (0, 1.0)
    assert run.client.logits.tolist() == [0.0] * 8


class FailingEnv(CountEnv):
    async def initial_observation(self):
        raise ConnectionError("lost")

    async def abort(self, reason):
        pass


class OneFails(Credited):
    async def make_envs(self):
        return [CountEnv(1), FailingEnv(1), CountEnv(1)]

    async def compute_group_rewards(self, trajectory_group, env_group):
        self.spans = tuple(
            SpanCredit(
                seat=seat, transition=0, start=0, stop=1, stream=STREAM, round_index=0, reward=float(seat)
            )
            for seat in self.credited
        )
        return [(0.0, {})] * 3


async def test_a_failed_seat_is_left_out_and_the_baseline_is_that_of_the_others(tmp_path):
    class Rest(OneFails):
        credited = (0, 2)

    run = make_run(tmp_path, num_steps=1, group_class=Rest)
    seen = trained_tokens(run)
    await train(run)
    assert [advantages[0] for advantages in seen] == [-1.0, 1.0] * 3


async def test_credit_for_a_failed_seat_is_refused(tmp_path):
    class All(OneFails):
        credited = (0, 1, 2)

    with pytest.raises(ValueError, match=r"seat=1.*must lie in the seat's sampled tokens"):
        await train(make_run(tmp_path, num_steps=1, group_class=All))


def test_a_batch_without_groups_has_no_samples():
    batch = plain_batch([])
    assert (batch.samples_N, batch.data_D, batch.metrics) == ([], [], {})
