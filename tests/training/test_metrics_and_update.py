import math
from contextlib import nullcontext

import numpy as np
import pytest
import tinker
from bandit_engine import VOCABULARY, BanditTrainer, CountGroup, Done
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.metrics import compute_kl_sample_train
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition

from viva.judging.usage import Usage
from viva.training.data_processing import trajectory_to_data
from viva.training.metrics import advantage_metrics, logprob_metrics, rollout_metrics, summary
from viva.training.rollouts import GroupOutcome, RolloutFailure
from viva.training.update import EXACT_GAP, SamplerGapError, UpdateConfig, for_engine, update_policy


def turn(tokens, reward=0.0, stop="stop", **metrics):
    action = TokensWithLogprobs(tokens=tokens, maybe_logprobs=[-0.5] * len(tokens), stop_reason=stop)
    return Transition(
        ob=tinker.ModelInput.from_ints([1, 2]), ac=action, reward=reward, episode_done=True, metrics=metrics
    )


def outcome(turns_G, rewards_G, metrics_G=None, prompt=0, **options):
    trajectories = [Trajectory(turns, tinker.ModelInput.empty()) for turns in turns_G]
    group = TrajectoryGroup(trajectories, rewards_G, metrics_G or [{} for _ in rewards_G])
    return GroupOutcome(builder=CountGroup(prompt), group=group, **options)


def test_summaries_are_those_of_numpy():
    assert summary("x", [1.0, 3.0]) == {"x/mean": 2.0, "x/std": 1.0, "x/max": 3.0, "x/min": 1.0}
    assert summary("x", []) == {}


def test_rollout_metrics_average_what_environments_report_over_those_who_report_it():
    usage = {
        "policy": Usage(prompt_tokens=100, sampled_tokens=7),
        "scorer": Usage(prompt_tokens=20, sampled_tokens=1),
    }
    metrics = rollout_metrics(
        [
            outcome(
                [[turn([1, 2], ok=1.0)], [turn([3], ok=0.0, stop="length")]],
                [1.0, -1.0],
                [{"agent_0/x": 5}, {}],
            ),
            outcome([[turn([1]), turn([1])]], [0.5], usage=usage),
        ]
    )
    assert metrics["ok"] == 0.5
    assert metrics["agent_0/x"] == 5.0
    assert metrics["reward/mean"] == pytest.approx(0.5 / 3)
    assert (metrics["reward/max"], metrics["reward/min"]) == (1.0, -1.0)
    assert metrics["num_turns"] == pytest.approx(4 / 3)
    assert metrics["rollout/reply_tokens_per_turn"] == 1.25
    assert metrics["rollout/prompt_tokens_per_turn"] == 2.0
    assert metrics["rollout/finish_rate"] == 0.75
    assert (metrics["rollout/sampled_tokens"], metrics["rollout/prompt_tokens"]) == (7, 100)
    assert (metrics["scorer/sampled_tokens"], metrics["scorer/prompt_tokens"]) == (1, 20)
    assert metrics["rollout/total_tokens"] == 128
    assert "judge/prompt_tokens" not in metrics  # nobody was asked


def test_failed_seats_count_for_nothing_and_failures_are_counted():
    failure = RolloutFailure(attempt=0, seat=1, turn=0, error_type="TimeoutError", message="")
    played = outcome(
        [[turn([1])], []], [1.0, 0.0], failed_seats=frozenset({1}), failures=(failure,), retries=1
    )
    void = GroupOutcome(
        builder=CountGroup(0), group=None, failures=(failure, failure), void_reason="x", retries=1
    )
    metrics = rollout_metrics([played, void])
    assert metrics["reward/mean"] == 1.0
    assert metrics["rollout/errors/TimeoutError"] == 3
    assert (metrics["rollout/groups"], metrics["rollout/void"]) == (2, 1)
    assert (metrics["rollout/retries"], metrics["rollout/failed_seats"]) == (2, 1)


def test_rewards_are_told_apart_by_tags_where_groups_differ():
    groups = [outcome([[turn([1])]], [1.0], prompt=0), outcome([[turn([1])]], [0.0], prompt=1)]
    metrics = rollout_metrics(groups)
    assert (metrics["env/even/reward/mean"], metrics["env/odd/reward/mean"]) == (1.0, 0.0)
    assert not any(key.startswith("env/") for key in rollout_metrics(groups[:1] * 2))


def test_a_batch_without_any_group_has_counts_only():
    assert set(rollout_metrics([])) == {
        "rollout/groups",
        "rollout/void",
        "rollout/failed_seats",
        "rollout/retries",
        "rollout/sampled_tokens",
        "rollout/prompt_tokens",
        "rollout/total_tokens",
    }
    assert advantage_metrics([]) == {}


def test_silent_groups_and_zero_advantages_are_counted():
    metrics = advantage_metrics([[0.0, 0.0], [1.0, 0.0, -1.0]])
    assert metrics["advantage/zero_share"] == 0.6
    assert metrics["advantage/silent_groups_share"] == 0.5


def datum_with(logprobs):
    action = TokensWithLogprobs(tokens=list(range(len(logprobs))), maybe_logprobs=logprobs)
    transition = Transition(ob=tinker.ModelInput.from_ints([1]), ac=action, reward=0.0, episode_done=True)
    return trajectory_to_data(Trajectory([transition], tinker.ModelInput.empty()), 1.0)[0]


def test_the_gap_between_sampler_and_trainer_is_the_cookbooks():
    data = [datum_with([-1.0, -2.0]), datum_with([-0.5])]
    trained = [np.array([-1.1, -1.7], dtype=np.float32), np.array([-0.5], dtype=np.float32)]
    ours = logprob_metrics([*zip(data, map(tinker.TensorData.from_numpy, trained), strict=True)])
    theirs = compute_kl_sample_train(data, [tinker.TensorData.from_numpy(row).to_torch() for row in trained])
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=1e-5)
    assert ours["optim/logprob_gap_max"] == pytest.approx(0.3, rel=1e-5)


def test_a_logprob_that_is_no_number_is_refused():
    nan = tinker.TensorData.from_numpy(np.array([math.nan], dtype=np.float32))
    with pytest.raises(FloatingPointError, match="logprobs that are not finite"):
        logprob_metrics([(datum_with([-1.0]), nan)])


class Watched(BanditTrainer):
    def __init__(self, tmp_path):
        super().__init__(tmp_path)
        self.requests = []

    def forward_backward(self, data, loss_fn, loss_fn_config=None):
        self.requests.append([datum.model_input.to_ints()[1:] for datum in data])
        return super().forward_backward(data, loss_fn, loss_fn_config)

    def optim_step(self, params):
        self.requests.append("step")
        self.params = params
        return Done(tinker.OptimStepResponse(metrics={"grad_norm": 2.0}))


@pytest.mark.parametrize(("num_substeps", "sizes"), [(1, [5]), (2, [2, 3]), (5, [1] * 5), (9, [1] * 5)])
async def test_every_substep_gets_its_share_and_its_optimiser_step(tmp_path, num_substeps, sizes):
    client = Watched(tmp_path)
    data = [datum_with([-1.0]) for _ in range(5)]
    updated = await update_policy(client, data, UpdateConfig(learning_rate=0.1, num_substeps=num_substeps))
    metrics = updated.metrics
    assert [len(request) for request in client.requests[::2]] == sizes
    assert client.requests[1::2] == ["step"] * len(sizes)
    assert (metrics["optim/steps"], metrics["optim/datums"], metrics["optim/grad_norm"]) == (
        len(sizes),
        5,
        2.0,
    )


def test_only_an_engine_that_takes_masks_gets_them():
    class Server:
        pass

    class Local:
        takes_mask = takes_temperature = True

    data_D = [datum_with([-0.5, -0.5])]
    ((bare,), (whole,)) = for_engine(Server(), data_D), for_engine(Local(), data_D)
    assert whole is data_D[0]
    assert set(whole.loss_fn_inputs) - set(bare.loss_fn_inputs) == {"mask"}


async def test_without_data_nothing_is_sent_and_the_weights_stay(tmp_path):
    client = Watched(tmp_path)
    metrics = (await update_policy(client, [], UpdateConfig(learning_rate=0.1))).metrics
    assert client.requests == []
    assert metrics == {"optim/lr": 0.1, "optim/datums": 0, "optim/steps": 0}


async def test_the_optimisers_settings_arrive(tmp_path):
    client = Watched(tmp_path)
    config = UpdateConfig(
        learning_rate=0.25, beta1=0.5, beta2=0.6, eps=1e-3, weight_decay=0.1, grad_clip_norm=3.0
    )
    await update_policy(client, [datum_with([-1.0])], config)
    sent = {name: getattr(client.params, name) for name in ("learning_rate", "beta1", "beta2", "eps")}
    assert sent == {"learning_rate": 0.25, "beta1": 0.5, "beta2": 0.6, "eps": 1e-3}
    assert (client.params.weight_decay, client.params.grad_clip_norm) == (0.1, 3.0)


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 0.0},
        {"learning_rate": math.inf},
        {"num_substeps": 0},
        {"beta1": 1.5},
        {"beta2": -1.0},
        {"eps": 0.0},
        {"weight_decay": -0.1},
        {"grad_clip_norm": math.nan},
    ],
)
def test_settings_that_cannot_train_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        UpdateConfig(**({"learning_rate": 0.1} | options))


@pytest.mark.parametrize(
    ("gaps", "stops"),
    [
        ([2e-4] + [0.0] * 99, False),
        ([2e-4] * 100, True),
        ([9e-4] * 2 + [0.0] * 998, False),
        ([2e-3] + [0.0] * 999, True),
    ],
)
async def test_one_token_may_be_rounded_more_than_all_of_them(tmp_path, gaps, stops):
    uniform = -math.log(VOCABULARY)
    datum = datum_with([uniform + gap for gap in gaps])
    config = UpdateConfig(learning_rate=0.1, max_logprob_gap=EXACT_GAP)
    with pytest.raises(SamplerGapError, match="differ by") if stops else nullcontext():
        await update_policy(BanditTrainer(tmp_path), [datum], config)
