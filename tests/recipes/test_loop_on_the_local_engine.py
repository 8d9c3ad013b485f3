"""Environments written for tinker-cookbook run in the loop as they are, and the loop learns on a real model."""

import json
import random

import pytest
from letters import Letters
from random_models import make_model
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.problem_env import ProblemGroupBuilder

from viva.engine import LocalServiceClient
from viva.run.folder import prepare_run_folder
from viva.training.loop import LoopConfig, Training, train
from viva.training.sampling import Sampling
from viva.training.update import UpdateConfig


class ShuffledBuilder(ProblemGroupBuilder):
    """Deals the group's rewards out at random."""

    async def compute_group_rewards(self, trajectory_group, env_group):
        own = [trajectory.transitions[0].reward for trajectory in trajectory_group]
        other = random.Random(str(own)).sample(own, len(own))
        return [(new - old, {}) for new, old in zip(other, own, strict=True)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", names_labels=False)


async def rewards_of(model, folder, builder_class):
    run_folder = prepare_run_folder(folder, behavior="raise", config={}).open()
    client = LocalServiceClient(state_dir=folder / "state", one_run=True).create_lora_training_client(
        str(model), rank=8, seed=0
    )
    renderer = get_renderer("qwen3_instruct", client.get_tokenizer())
    run = Training(
        config=LoopConfig(
            sampling=Sampling(max_tokens=12),
            save_every=0,
            eval_every=0,
            update=UpdateConfig(learning_rate=0.01),
        ),
        client=client,
        dataset=Letters(renderer, 15, builder_class),
        folder=run_folder,
    )
    assert await train(run)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("optim/logprob_gap_max", 0.0) for row in rows) < 1e-4
    return [row["correct"] for row in rows]


async def test_a_cookbook_environment_learns_in_the_loop(model, tmp_path):
    rewards = await rewards_of(model, tmp_path, ProblemGroupBuilder)
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.25


async def test_it_does_not_learn_from_shuffled_rewards(model, tmp_path):
    rewards = await rewards_of(model, tmp_path, ShuffledBuilder)
    assert sum(rewards[-3:]) / 3 < sum(rewards[:3]) / 3 + 0.15
