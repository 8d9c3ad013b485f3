"""A step that was applied twice is noticed by the gradient that is gone, and by nothing else."""

from types import SimpleNamespace

import numpy as np
import pytest
import tinker

from viva.training.update import RepeatedStepError, UpdateConfig, update_policy


def datum(advantage):
    values = {
        "target_tokens": [2, 3],
        "logprobs": [0.0, -1.0],
        "advantages": [0.0, advantage],
        "mask": [0.0, 1.0],
    }
    kinds = {"target_tokens": np.int64}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={
            name: tinker.TensorData.from_numpy(np.asarray(value, dtype=kinds.get(name, np.float32)))
            for name, value in values.items()
        },
    )


class Server:
    """Averages gradients and applies every request for a step, also one that it has seen; SkyRL does so.

    `lost` are the steps (from 0) whose answers get lost: the SDK asks again, and the second answer is what it returns.
    """

    def __init__(self, lost=(), name="skyrl.ai/grad_norm", logprob=-1.0):
        self.lost, self.name, self.logprob = lost, name, logprob
        self.gradient, self.num_steps = 0.0, 0

    async def forward_backward(self, data, loss_fn, loss_fn_config=None):
        self.gradient += sum(abs(d.loss_fn_inputs["advantages"].to_numpy()).sum() for d in data)
        outputs = [
            {"logprobs": tinker.TensorData.from_numpy(np.asarray([0.0, self.logprob], np.float32))}
            for _ in data
        ]
        return SimpleNamespace(loss_fn_output_type="", loss_fn_outputs=outputs, metrics={})

    def optim_step(self, params):
        return self._step()

    async def _step(self):
        answers = []
        for _ in range(2 if self.num_steps in self.lost else 1):
            answers.append(self.gradient)
            self.gradient = 0.0
        self.num_steps += 1
        metrics = {self.name: float(answers[-1]), "skyrl.ai/learning_rate": 1e-3} if self.name else None
        return tinker.OptimStepResponse(metrics=metrics)


async def update(server, advantages, **options):
    config = UpdateConfig(learning_rate=1e-3, **options)
    return await update_policy(server, [datum(advantage) for advantage in advantages], config)


@pytest.mark.parametrize("name", ["skyrl.ai/grad_norm", "grad_norm", "optim/grad_norm"])
async def test_a_repeated_step_is_noticed(name):
    with pytest.raises(RepeatedStepError, match="applied an optimiser step twice"):
        await update(Server(lost=[0], name=name), [1.0, -0.5])


@pytest.mark.parametrize("lost", [0, 1])
async def test_each_step_of_a_batch_is_looked_at(lost):
    with pytest.raises(RepeatedStepError):
        await update(Server(lost=[lost]), [1.0, -1.0], num_substeps=2)


@pytest.mark.parametrize(
    ("server", "advantages", "options"),
    [
        (Server(), [1.0, -1.0], {}),
        (Server(), [0.0, 0.0], {}),
        (Server(lost=[0]), [1.0, -1.0], {}),
        (Server(lost=[0], logprob=0.0), [1.0, -0.5], {}),
        (Server(lost=[0], name=None), [1.0, -0.5], {}),
        (Server(lost=[0]), [1.0, -0.5], {"loss_fn": "ppo"}),
    ],
    ids=[
        "applied once",
        "nothing to learn",
        "equals undo each other",
        "certain",
        "no norm is told",
        "clipped",
    ],
)
async def test_a_gradient_of_zero_that_may_be_right_passes(server, advantages, options):
    updated = await update(server, advantages, **options)
    assert updated.metrics["optim/steps"] == 1
