"""What the scoring pass says of every sample is what the sampler itself says of the same tokens behind that context."""

import numpy as np
import pytest
import tinker
from random_models import make_model
from tinker_cookbook.rl.problem_env import ProblemGroupBuilder

from viva.conversation.rendering import load_renderer
from viva.engine import LocalServiceClient
from viva.experts.assisted import FeedbackGroupBuilder, PromptAugmentedEnv, PromptAugmentedGroupBuilder
from viva.experts.strategy import iid
from viva.training.batch import ExpertConfig, make_batch
from viva.training.data_processing import action_values, trained_values
from viva.training.rollouts import run_groups
from viva.training.samples import batch_samples
from viva.training.sampling import Sampling, SeatSampler
from viva.training.update import EXACT_GAP, UpdateConfig, update_policy

HINT = {"role": "system", "content": "Write letters only."}


class Letters(PromptAugmentedEnv):
    """Pays for the letter A."""

    def get_question(self):
        return "Write."

    def check_answer(self, sample_str):
        return "A" in sample_str

    def check_format(self, sample_str):
        return True

    def get_reference_answer(self):
        return "A"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture
def parts(folder):
    client = LocalServiceClient(seed=0).create_lora_training_client(str(folder), rank=4)
    renderer = load_renderer(client.get_tokenizer(), model_name=str(folder))
    return client, renderer


async def played(client, renderer, temperature=1.0, names=("iid", "hint", "feedback"), seed=1):
    sampler = await client.save_weights_and_get_sampling_client()

    def problem(hint=()):
        return Letters(renderer, list(hint), [])

    builders = {
        "iid": iid(ProblemGroupBuilder(env_thunk=problem, num_envs=2)),
        "hint": PromptAugmentedGroupBuilder(env_thunk=lambda: problem([HINT]), num_envs=2),
        "feedback": FeedbackGroupBuilder(env_thunk=problem, num_envs=2, train_behind="problem"),
    }
    policy = SeatSampler(sampler=sampler, sampling=Sampling(seed=seed, max_tokens=5, temperature=temperature))
    outcomes = await run_groups([builders[name] for name in names], policy)
    for outcome in outcomes:  # an advantage for everybody, whatever was drawn
        outcome.group.final_rewards_G[:] = [-1.0, 1.0]
    return sampler, outcomes


async def updated(client, outcomes, temperature, **options):
    config = ExpertConfig(min_effective_share=0.0, **options)
    batch = await make_batch(client, outcomes, config, temperature=temperature)
    update = UpdateConfig(learning_rate=1e-3)
    made = await update_policy(client, batch.data_D, update, foreign_D=batch.foreign_D, check=batch.check)
    return batch, made.metrics


@pytest.mark.parametrize("names", [("iid",), ("hint", "feedback")])
@pytest.mark.parametrize(
    ("estimator", "temperature"),
    [
        ("importance_sampling", 1.0),
        ("shaped", 1.0),
        ("importance_sampling", 0.8),
        ("shaped", 0.8),
        ("none", 1.5),
    ],
)
async def test_what_was_sampled_is_compared_with_what_is_trained_at_every_step(
    parts, estimator, temperature, names
):
    client, renderer = parts
    # samples of weights before a step
    _, outcomes = await played(client, renderer, temperature, names, seed=9)
    await updated(client, outcomes, temperature, estimator=estimator)
    _, metrics = await updated(client, outcomes, temperature, estimator=estimator)
    assert metrics["optim/logprob_gap_max"] > 10 * EXACT_GAP
    for seed in range(2):
        _, outcomes = await played(client, renderer, temperature, names, seed)
        batch, metrics = await updated(client, outcomes, temperature, estimator=estimator)
        assert metrics["optim/steps"] == 1
        assert 0 < metrics["optim/logprob_gap_max"] < EXACT_GAP  # rounding: two programs computed it
        assert metrics["optim/kl_sample_train_v2"] > 0
        assert batch.warnings == []
    # a logprob that the sampler tells wrongly
    _, outcomes = await played(client, renderer, temperature, names)
    outcomes[-1].group.trajectories_G[0].transitions[-1].ac.maybe_logprobs[-1] -= 0.01
    _, metrics = await updated(client, outcomes, temperature, estimator=estimator)
    assert metrics["optim/logprob_gap_max"] == pytest.approx(0.01, abs=EXACT_GAP)


async def test_a_policy_is_trained_at_the_temperature_of_its_samples_without_another_pass_over_them(parts):
    client, renderer = parts
    _, outcomes = await played(client, renderer, 0.8, ("iid", "hint"))
    options = ExpertConfig(estimator="shaped", min_effective_share=0.0, num_checked=0)
    other = await make_batch(client, outcomes, options, temperature=0.8)
    batch = await make_batch(client, outcomes, options, temperature=0.8, trained_at=0.8)
    assert batch.foreign_D == [False, False, True, True]
    assert 0 < batch.metrics["experts/scored_tokens"] < other.metrics["experts/scored_tokens"]
    assert abs(other.metrics["experts/iid/token_gap_mean"]) > 0.01
    assert batch.metrics["experts/iid/token_gap_mean"] == 0
    update = UpdateConfig(learning_rate=1e-3, loss_fn_config={"temperature": 0.8})
    assert update.temperature == 0.8
    made = await update_policy(client, batch.data_D, update, foreign_D=batch.foreign_D, check=batch.check)
    assert 0 < made.metrics["optim/logprob_gap_max"] < EXACT_GAP
    # every anchor is the policy's own, so the loss's ratio is 1
    for datum, logprobs_T in zip(batch.data_D, made.logprobs_D, strict=True):
        assert trained_values(datum, logprobs_T) == pytest.approx(
            action_values(datum, "logprobs"), abs=10 * EXACT_GAP
        )
    for datum, logprobs_T in zip(other.data_D, made.logprobs_D, strict=True):
        assert np.abs(trained_values(datum, logprobs_T) - action_values(datum, "logprobs")).max() > 0.01


async def test_scores_are_the_samplers_own(parts):
    client, renderer = parts
    sampler, outcomes = await played(client, renderer)
    config = ExpertConfig(estimator="balance", min_effective_share=0.0, num_checked=3)
    batch = await make_batch(client, outcomes, config)
    assert batch.warnings == []
    assert batch.metrics["experts/iid/self_check"] < 1e-5

    async def said(context, tokens):
        prompt = tinker.ModelInput.from_ints([*context, *tokens])
        return pytest.approx((await sampler.compute_logprobs(prompt))[-len(tokens) :], abs=1e-4)

    samples = batch_samples(outcomes)
    contexts = {
        record["context"]: sample.turns_K[0].sampled_in
        for record, sample in zip(batch.records, samples, strict=True)
    }
    assert sorted(contexts) == ["feedback 0", "feedback 1", "iid", "prompt_augmentation"]
    for record, sample in zip(batch.records, samples, strict=True):
        (turn,) = sample.turns_K
        assert record["sampling_logprobs"] == await said(turn.sampled_in, turn.tokens)
        if record["old_logprobs"] is not None:  # drawn there
            assert record["old_logprobs"] == await said(turn.trained_in, turn.tokens)
        assert set(record["context_logprobs"]) == set(contexts) - {"iid", record["context"]}
        for name, values in record["context_logprobs"].items():
            assert values == await said(contexts[name], turn.tokens)
