"""Updates over a line that loses and repeats: applied once, or noticed, and the weights are those of a good line.

The engine is scripted here, a softmax over a few tokens with Adam. `tests/remote/server/test_exactly_once.py` does the
same to a SkyRL server through the SDK.
"""

import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import tinker
from skyrl_updates import random_datum

from viva.training import update
from viva.training.update import RepeatedStepError

VOCABULARY, LENGTH, LOSS = 8, 6, 0.1
SAVE_EVERY = 10
CONFIG = update.UpdateConfig(learning_rate=1e-2)


class Engine:
    """Weights, Adam's moments, and the gradients since the last step, which it averages as SkyRL does."""

    def __init__(self):
        self.weights_V = np.zeros(VOCABULARY)
        self.moments_2_V = np.zeros((2, VOCABULARY))
        self.gradient_V, self.count, self.num_steps = np.zeros(VOCABULARY), 0, 0

    def logprobs(self):
        return self.weights_V - np.log(np.exp(self.weights_V).sum())

    def forward_backward(self, data):
        logprobs_V, outputs = self.logprobs(), []
        for each in data:
            inputs = {name: tensor.to_numpy() for name, tensor in each.loss_fn_inputs.items()}
            targets_T = inputs["target_tokens"]
            ratios_T = np.exp(logprobs_V[targets_T] - inputs["logprobs"]) * inputs["advantages"]
            self.gradient_V += np.bincount(targets_T, ratios_T, VOCABULARY)
            self.gradient_V -= np.exp(logprobs_V) * ratios_T.sum()
            self.count += 1
            outputs.append(
                {"logprobs": tinker.TensorData.from_numpy(logprobs_V[targets_T].astype(np.float32))}
            )
        return tinker.ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=outputs, metrics={})

    def optim_step(self, params):
        mean_V = self.gradient_V / max(self.count, 1)
        self.num_steps += 1
        betas_2 = np.array([[params.beta1], [params.beta2]])
        self.moments_2_V = betas_2 * self.moments_2_V + (1 - betas_2) * np.stack([mean_V, mean_V**2])
        first_V, second_V = self.moments_2_V / (1 - betas_2**self.num_steps)
        self.weights_V = self.weights_V + params.learning_rate * first_V / (np.sqrt(second_V) + params.eps)
        self.gradient_V, self.count = np.zeros(VOCABULARY), 0
        return tinker.OptimStepResponse(metrics={"grad_norm": float(np.linalg.norm(mean_V))})


class Line:
    """The SDK's client on a bad line: what gets no answer is sent again, whether it arrived or not."""

    def __init__(self, engine, line, *, is_numbered):
        self.engine, self.line, self.is_numbered = engine, line, is_numbered
        self.num_repeated_steps = 0

    async def forward_backward(self, data, loss_fn, loss_fn_config=None):
        return self._sent(lambda: self.engine.forward_backward(data))[0]

    async def optim_step(self, params):
        answer, times = self._sent(lambda: self.engine.optim_step(params))
        self.num_repeated_steps += times > 1
        return answer

    def _sent(self, work):
        answers = []
        while True:
            if self.line.random() < LOSS:
                continue  # lost on the way there
            if not (answers and self.is_numbered):
                answers.append(work())
            if self.line.random() >= LOSS:
                return answers[-1], len(answers)


async def train(num_steps, seed, *, loses, is_numbered=False):
    """The engine after so many steps, and how often the run stopped and how often a step was done twice."""
    line = random.Random(seed) if loses else SimpleNamespace(random=lambda: 1.0)
    client = Line(Engine(), line, is_numbered=is_numbered)
    saved, step, num_stops = (copy.deepcopy(client.engine), 0), 0, 0
    while step < num_steps:
        rng = np.random.default_rng([seed, step])
        try:
            data = [random_datum(rng, 0, VOCABULARY, LENGTH) for _ in range(4)]
            await update.update_policy(client, data, CONFIG)
        except RepeatedStepError:
            num_stops += 1
            client.engine, step = copy.deepcopy(saved[0]), saved[1]
            continue
        step += 1
        if step % SAVE_EVERY == 0:
            saved = copy.deepcopy(client.engine), step
    return client.engine, num_stops, client.num_repeated_steps


@pytest.mark.parametrize("is_numbered", [False, True], ids=["SkyRL", "numbered"])
async def test_weights_are_those_of_a_good_line(is_numbered, trials, ledger):
    num_steps, num_runs = trials(short=60, full=1000), trials(short=3, full=5)
    total_stops, gaps = 0, []
    for seed in range(num_runs):
        expected, *_ = await train(num_steps, seed, loses=False)
        actual, num_stops, num_repeated = await train(num_steps, seed, loses=True, is_numbered=is_numbered)
        assert (actual.num_steps, num_stops) == (num_steps, num_repeated)
        gaps.append(np.abs(actual.weights_V - expected.weights_V).max())
        total_stops += num_stops
    assert max(gaps) <= 1e-9
    assert (total_stops > 0) is not is_numbered
    which = "numbers" if is_numbered else "does not number"
    ledger(
        "4 exactly once",
        f"a tenth of requests and of answers lost, engine that {which} requests (scripted): weights of a good line",
        trials=num_runs * num_steps,
        seed=0,
        figures=f"{total_stops} steps done twice, each noticed; largest difference of a weight {max(gaps):.0e}",
    )


async def test_a_step_done_twice_that_nobody_notices_shows_in_the_weights(monkeypatch):
    monkeypatch.setattr(update, "check_applied_once", lambda *_: None)
    expected, *_ = await train(60, 0, loses=False)
    actual, num_stops, num_repeated = await train(60, 0, loses=True)
    assert (num_stops, num_repeated > 0) == (0, True)
    assert np.abs(actual.weights_V - expected.weights_V).max() > 1e-3
