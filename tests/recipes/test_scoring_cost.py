"""What the scoring pass costs, in tokens that the engine computes: it shares prefixes as training does."""

import pytest
import random_models
import torch
from tinker_cookbook.rl.problem_env import ProblemGroupBuilder

from viva.conversation.rendering import load_renderer
from viva.engine import LocalServiceClient
from viva.experts.assisted import FeedbackGroupBuilder, PromptAugmentedEnv, PromptAugmentedGroupBuilder
from viva.experts.strategy import iid
from viva.training.batch import ExpertConfig, make_batch
from viva.training.rollouts import run_groups
from viva.training.sampling import Sampling, SeatSampler

QUESTION = "A question that is somewhat longer than the answers to it. " * 4


class Asked(PromptAugmentedEnv):
    """Pays for the letter A."""

    def get_question(self):
        return QUESTION

    def check_answer(self, sample_str):
        return "A" in sample_str

    def check_format(self, sample_str):
        return True

    def get_reference_answer(self):
        return "A"


class Recording:
    """A client that keeps what it was asked to score."""

    def __init__(self, client):
        self.client = client
        self.requests = []

    def forward(self, data, loss_fn, loss_fn_config=None):
        self.requests.append(data)
        return self.client.forward(data, loss_fn, loss_fn_config)


@pytest.fixture
def counted(monkeypatch):
    """Sizes of what is embedded, call by call: all tokens that are computed, however they are packed."""
    sizes, forward = [], torch.nn.Embedding.forward

    def counting(module, ids):
        sizes.append(ids.numel())
        return forward(module, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", counting)
    return sizes


@pytest.mark.parametrize("estimator", ["shaped", "balance"])
async def test_the_scoring_pass_shares_prefixes_as_training_does(tmp_path, monkeypatch, counted, estimator):
    monkeypatch.setattr(
        random_models, "SIZES", random_models.SIZES | {"hidden_size": 96, "intermediate_size": 384}
    )
    folder = random_models.make_model(tmp_path, "qwen3")
    client = LocalServiceClient(seed=0).create_lora_training_client(str(folder), rank=4)
    renderer = load_renderer(client.get_tokenizer(), model_name=str(folder))

    def problem(*hint):
        return Asked(renderer, list(hint), [])

    hint = {"role": "system", "content": "Write letters only."}
    builders = [
        iid(ProblemGroupBuilder(env_thunk=problem, num_envs=4)),
        PromptAugmentedGroupBuilder(env_thunk=lambda: problem(hint), num_envs=4),
        FeedbackGroupBuilder(env_thunk=problem, num_envs=4, train_behind="problem"),
    ]
    sampler = await client.save_weights_and_get_sampling_client()
    outcomes = await run_groups(
        builders, SeatSampler(sampler=sampler, sampling=Sampling(seed=1, max_tokens=6))
    )
    recording = Recording(client)
    counted.clear()
    config = ExpertConfig(estimator=estimator, min_effective_share=0.0, num_checked=0)
    batch = await make_batch(recording, outcomes, config)
    scored = sum(counted)
    (request,) = recording.requests  # one pass for everything
    given = sum(datum.model_input.length for datum in request)
    assert batch.metrics["experts/scored_tokens"] == given
    counted.clear()
    await client.forward_backward(request, "importance_sampling")
    assert sum(counted) == scored
    assert scored < 0.6 * given  # as prefix trees
