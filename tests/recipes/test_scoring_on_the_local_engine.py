"""What the scoring pass says of every sample is what the sampler itself says of the same tokens behind that context."""

import pytest
import tinker
from random_models import make_model
from tinker_cookbook.rl.problem_env import ProblemGroupBuilder

from viva.conversation.rendering import load_renderer
from viva.engine import LocalServiceClient
from viva.experts.feedback import FeedbackGroupBuilder
from viva.experts.iid import iid
from viva.experts.prompt_augmentation import PromptAugmentedEnv, PromptAugmentedGroupBuilder
from viva.rl.completer import Policy
from viva.rl.expert_batch import ExpertConfig, expert_batch
from viva.rl.expert_samples import expert_samples
from viva.rl.rollouts import run_groups

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
def parts(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("model"), "qwen3")
    client = LocalServiceClient(seed=0).create_lora_training_client(str(folder), rank=4)
    renderer = load_renderer(client.get_tokenizer(), model_name=str(folder))
    return client, renderer


async def test_scores_are_the_samplers_own(parts):
    client, renderer = parts
    sampler = await client.save_weights_and_get_sampling_client()

    def problem(hint=()):
        return Letters(renderer, list(hint), [])

    builders = [
        iid(ProblemGroupBuilder(env_thunk=problem, num_envs=2)),
        PromptAugmentedGroupBuilder(env_thunk=lambda: problem([HINT]), num_envs=2),
        FeedbackGroupBuilder(env_thunk=problem, num_envs=2, train_behind="problem"),
    ]
    outcomes = await run_groups(builders, Policy(sampler=sampler, seed=1, max_tokens=5))
    config = ExpertConfig(estimator="balance", min_effective_share=0.0, num_checked=2)
    batch = await expert_batch(client, outcomes, config)
    assert batch.warnings == []
    assert batch.metrics["experts/iid/self_check"] < 1e-5

    async def said(context, tokens):
        prompt = tinker.ModelInput.from_ints([*context, *tokens])
        return pytest.approx((await sampler.compute_logprobs(prompt))[-len(tokens) :], abs=1e-4)

    samples = expert_samples(outcomes)
    contexts = {
        record["context"]: sample.turns_K[0].sampled_in
        for record, sample in zip(batch.records, samples, strict=True)
    }
    assert sorted(contexts) == ["feedback 0", "feedback 1", "iid", "prompt_augmentation"]
    for record, sample in zip(batch.records, samples, strict=True):
        (turn,) = sample.turns_K
        assert record["sampling_logprobs"] == await said(turn.sampled_in, turn.tokens)
        assert record["old_logprobs"] == await said(turn.trained_in, turn.tokens)
        assert set(record["context_logprobs"]) == set(contexts) - {"iid", record["context"]}
        for name, values in record["context_logprobs"].items():
            assert values == await said(contexts[name], turn.tokens)
