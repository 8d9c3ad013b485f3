"""Every loss the options name is what the local engine computes, with the run's settings; DRO leaves context alone."""

import numpy as np
import pytest
import tinker
from random_models import make_model
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.types import Trajectory, Transition

from viva.doctor.examination import check_engine
from viva.engine import LocalServiceClient
from viva.training.data_processing import trajectory_to_data
from viva.training.update import UpdateConfig, update_policy

CONFIGS = {"ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, "cispo": {}, "dro": {"beta": 0.3}}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("model"), "llama", names_labels=False)
    return LocalServiceClient().create_lora_training_client(str(model), rank=4, seed=0)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", *CONFIGS])
@pytest.mark.parametrize("given", [True, False])
async def test_the_local_engine_computes_what_it_is_asked_for(client, loss_fn, given):
    config = CONFIGS.get(loss_fn) if given else None
    await check_engine(LocalServiceClient(), client, loss_fn=loss_fn, loss_fn_config=config)


class Watched:
    def __init__(self, client):
        self.client, self.sent = client, []

    def forward(self, data, loss_fn, loss_fn_config=None):
        return self.client.forward(data, loss_fn, loss_fn_config)

    def forward_backward(self, data, loss_fn, loss_fn_config=None):
        self.sent.extend(data)
        return self.client.forward_backward(data, loss_fn, loss_fn_config)

    def optim_step(self, params):
        return self.client.optim_step(params)


@pytest.mark.parametrize("config", [None, {"temperature": 0.8}])
async def test_dro_leaves_context_tokens_alone(client, config):
    action = TokensWithLogprobs(tokens=[7, 8], maybe_logprobs=[-1.0, -2.0])
    turn = Transition(ob=tinker.ModelInput.from_ints([1, 2, 3]), ac=action, reward=0.0, episode_done=True)
    data = trajectory_to_data(Trajectory([turn], tinker.ModelInput.empty()), 1.0)
    watched = Watched(client)
    await update_policy(watched, data, UpdateConfig(learning_rate=1e-9, loss_fn="dro", loss_fn_config=config))
    sent = watched.sent[0].loss_fn_inputs
    scored = await client.forward(watched.sent, "importance_sampling", config)
    trained = scored.loss_fn_outputs[0]["logprobs"].to_numpy()
    assert sent["logprobs"].tolist()[2:] == [-1.0, -2.0]
    np.testing.assert_allclose(sent["logprobs"].to_numpy()[:2], trained[:2], atol=1e-4)
