"""Sampling while training: who samples what, that it happens, and what a killed run loses."""

import asyncio

import numpy as np
import pytest
import tinker
from bandit_engine import BanditSampler, CountDataset, CountEnv, CountGroup, Done
from bandit_runs import make_run, metrics_of
from hypothesis import given
from hypothesis import strategies as st

from viva.experts.strategy import is_strategy
from viva.judging.judge import PolicyRef
from viva.training.ahead import RolloutsAhead
from viva.training.followers import Current
from viva.training.loop import LoopConfig, train
from viva.training.update import UpdateConfig


def watch(run, events):
    """Note what is asked of the engine, in order: samples with the number of updates before their snapshot."""

    class Sampler(BanditSampler):
        def __init__(self, logits, version):
            super().__init__(logits)
            self.version = version

        def sample(self, prompt, num_samples, sampling_params):
            events.append(("sample", prompt.to_ints()[0] // CountDataset.groups, self.version))
            return super().sample(prompt, num_samples, sampling_params)

    client, forward_backward, optim_step = run.client, run.client.forward_backward, run.client.optim_step

    def noted_forward_backward(data, *settings):
        events.append(("train", len(data)))
        return forward_backward(data, *settings)

    def noted_optim_step(params):
        events.append(("step", client.steps))
        return optim_step(params)

    client.forward_backward, client.optim_step = noted_forward_backward, noted_optim_step
    client.save_weights_and_get_sampling_client = lambda: Done(Sampler(client.logits, client.steps))
    return run


@given(st.integers(0, 4), st.integers(0, 9), st.sets(st.integers(0, 30)))
async def test_the_sampler_is_as_old_as_allowed_but_from_no_earlier_than_the_last_fresh_start(
    staleness, first_step, fresh
):
    async def play(step, version, sampler):
        assert sampler == f"policy {version}"
        assert not running
        running.append(step)
        await asyncio.sleep(0)
        running.remove(step)
        return step, version, sampler

    running: list[int] = []
    ahead = RolloutsAhead(
        play=play,
        first_step=first_step,
        num_steps=20,
        max_staleness=staleness,
        starts_afresh=fresh.__contains__,
    )
    for step in range(first_step, 20):
        ahead.offer(step, f"policy {step}")
        played, sampled_by, sampler = await ahead.take(step)
        starts = [start for start in fresh | {first_step} if first_step <= start <= step]
        version = max(step - staleness, max(starts))
        assert (played, sampled_by, sampler) == (step, version, f"policy {version}")
        assert step - version <= staleness
    await ahead.close()


async def test_a_step_is_sampled_by_the_policy_before_the_last_update_except_after_a_checkpoint(tmp_path):
    events: list[tuple] = []
    run = watch(make_run(tmp_path, max_staleness=1, eval_every=0, save_every=4), events)
    assert await train(run)
    samples = sorted({event[1:] for event in events if event[0] == "sample"})
    assert samples == [(0, 0), (1, 0), (2, 1), (3, 2), (4, 4), (5, 4)]
    assert [row["rollout/staleness"] for row in metrics_of(tmp_path)] == [0, 1, 1, 1, 0, 1]


async def test_an_engine_that_samples_and_trains_at_once_does_so(tmp_path):
    """The first optimiser step ends only when the next step's rollouts have begun."""
    begun = asyncio.Event()

    class Noted(CountGroup):
        async def make_envs(self):
            if self.prompt >= CountDataset.groups:
                begun.set()
            return await super().make_envs()

    run = make_run(tmp_path, num_steps=2, group_class=Noted, max_staleness=1, eval_every=0)
    optim_step = run.client.optim_step

    async def slow(params):
        await begun.wait()
        return await optim_step(params)

    run.client.optim_step = slow
    assert await asyncio.wait_for(train(run), timeout=20)


async def test_judges_follow_the_policy_that_samples(tmp_path):
    seen: set[tuple[int, int]] = set()
    policy_ref = PolicyRef()

    class Judged(CountGroup):
        async def compute_group_rewards(self, trajectory_group, env_group):
            await asyncio.sleep(0)
            seen.add((self.prompt // CountDataset.groups, policy_ref.sampling_client.version))
            return [(0.0, {}) for _ in trajectory_group]

    run = make_run(tmp_path, group_class=Judged, max_staleness=2, eval_every=0, save_every=0)
    object.__setattr__(run, "followers", [Current(policy_ref)])
    assert await train(watch(run, []))
    assert seen == {(step, max(0, step - 2)) for step in range(6)}


class Killed(BaseException):
    """Ends a run at once, as a signal would."""


@pytest.mark.parametrize("strike", range(1, 7))
@pytest.mark.parametrize("staleness", [1, 2])
async def test_a_run_killed_while_it_samples_ahead_resumes_exactly(tmp_path, strike, staleness):
    options = {"max_staleness": staleness, "eval_every": 3, "save_every": 2}
    await train(make_run(tmp_path / "whole", **options))
    run = make_run(tmp_path / "killed", **options)
    optim_step = run.client.optim_step

    def killing(params):
        if run.client.steps + 1 == strike:
            raise Killed
        return optim_step(params)

    run.client.optim_step = killing
    with pytest.raises(Killed):
        await train(run)
    assert await train(make_run(tmp_path / "killed", **options))
    assert metrics_of(tmp_path / "killed") == metrics_of(tmp_path / "whole")


async def test_a_failure_ahead_of_time_is_told_in_its_turn_with_everything_before_it_trained(tmp_path):
    class Failing(CountGroup):
        async def make_envs(self):
            if self.prompt >= 3 * CountDataset.groups:
                raise ConnectionError("engine unreachable")
            return await super().make_envs()

    run = make_run(tmp_path, group_class=Failing, max_staleness=2, eval_every=0, save_every=0)
    with pytest.raises(RuntimeError, match="all 3 groups of step 4 failed"):
        await train(run)
    assert run.client.steps == 3
    assert run.folder.checkpoints.latest().next_step == 3


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
async def test_groups_are_sent_as_they_are_played_and_add_up_to_the_batch(tmp_path, order):
    class SlowEnv(CountEnv):
        async def step(self, action, *, extra=None):
            for _ in range(50 * order[self.prompt % 3]):
                await asyncio.sleep(0)
            return await super().step(action, extra=extra)

    class Slow(CountGroup):
        async def make_envs(self):
            return [SlowEnv(self.prompt) for _ in range(self.size)]

        async def compute_group_rewards(self, trajectory_group, env_group):
            events.append(("played", self.prompt % 3))
            return await super().compute_group_rewards(trajectory_group, env_group)

    runs = []
    for streams in (True, False):
        events: list[tuple] = []
        run = make_run(tmp_path / str(streams), num_steps=2, group_class=Slow, stream_updates=streams)
        assert await train(watch(run, events))
        runs.append((run, [event for event in events if event[0] != "sample"]))
    (streamed, sent), (plain, _) = runs
    np.testing.assert_allclose(streamed.client.logits, plain.client.logits, rtol=1e-12)
    ours, theirs = (metrics_of(tmp_path / str(streams)) for streams in (True, False))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other)
    tokens = [(tmp_path / str(streams) / "tokens.jsonl").read_text() for streams in (True, False)]
    assert tokens[0] == tokens[1] != ""
    first = [event[0] for event in sent[: sent.index(("step", 0))]]
    assert first.count("train") == 2  # of three groups, one of which has equal rewards
    if order == (0, 1, 2):  # one is trained before the last is played
        assert first.index("train") < len(first) - 1 - first[::-1].index("played")


async def test_losses_of_streamed_groups_add_up_and_nothing_is_sent_for_a_silent_batch(tmp_path):
    class Silent(CountGroup):
        async def compute_group_rewards(self, trajectory_group, env_group):
            return [(-trajectory.transitions[0].reward, {}) for trajectory in trajectory_group]

    run = make_run(tmp_path / "silent", num_steps=1, group_class=Silent, stream_updates=True)
    assert await train(run)
    assert run.client.steps == 0
    run = make_run(tmp_path / "loud", num_steps=1, stream_updates=True)
    forward_backward = run.client.forward_backward

    def told(data, *settings):
        output = forward_backward(data, *settings).value
        metrics = {"loss:sum": float(len(data)), "share": 0.5}
        outputs = output.loss_fn_outputs
        return Done(
            tinker.ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=outputs, metrics=metrics)
        )

    run.client.forward_backward = told
    assert await train(run)
    row = metrics_of(tmp_path / "loud")[0]
    assert (row["optim/loss"], row["optim/share"], row["optim/steps"]) == (row["optim/datums"], 0.5, 1)


@pytest.mark.parametrize(
    ("options", "update", "message"),
    [
        ({"max_staleness": -1}, {}, "max_staleness must be 0 or more; got -1"),
        ({"stream_updates": True, "max_staleness": 1}, {}, "use one of the two"),
        ({"stream_updates": True}, {"num_substeps": 2}, "num_substeps=2 divides the whole batch"),
        ({"stream_updates": True}, {"loss_fn": "dro"}, "it takes no stream_updates"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(options, update, message):
    with pytest.raises(ValueError, match=message):
        LoopConfig(update=UpdateConfig(learning_rate=0.1, **update), **options)


@pytest.mark.parametrize("option", [{"max_staleness": 1}, {"stream_updates": True}])
async def test_batches_of_search_strategies_take_neither(tmp_path, option):
    class Strategy(CountGroup):
        strategy_id = "direct"

        def context_transform(self, observation, turn_index):
            return observation

    assert is_strategy(Strategy(0))
    run = make_run(tmp_path, group_class=Strategy, **option)
    with pytest.raises(ValueError, match="neither max_staleness nor stream_updates"):
        await train(run)
    assert run.client.steps == 0
