"""tinker_cookbook's own completers, rollouts and data assembly run on the engine unchanged."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tinker
from tinker_cookbook import renderers
from tinker_cookbook.completers import StopCondition, TinkerMessageCompleter, TinkerTokenCompleter
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages, trajectory_to_data
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.train import train_step
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, StepResult
from tinker_cookbook.supervised.common import datum_from_model_input_weights
from tiny_engine import ints, run

from viva.engine import LocalServiceClient, LocalTrainingClient

QUESTION = list(b"Say something: ")
STOP = 10  # a line break


@dataclass
class LoudEnv(Env):
    """Two turns; rewards the share of even tokens."""

    history: list[int]
    turns: int = 0

    async def initial_observation(self) -> tuple[tinker.ModelInput, StopCondition]:
        return ints(self.history), [STOP]

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        self.turns += 1
        self.history = self.history + action + list(b"More: ")
        return StepResult(
            reward=sum(token % 2 == 0 for token in action) / len(action),
            episode_done=self.turns == 2,
            next_observation=ints(self.history),
            next_stop_condition=[STOP],
        )


@dataclass(frozen=True)
class LoudGroup(EnvGroupBuilder):
    num_envs: int = 4

    async def make_envs(self) -> Sequence[Env]:
        return [LoudEnv(list(QUESTION)) for _ in range(self.num_envs)]


@pytest.fixture
def trainer(service: LocalServiceClient, model_dir: Callable[[str], str]) -> LocalTrainingClient:
    return service.create_lora_training_client(model_dir("qwen3"), rank=4, seed=0)


def test_rollouts_become_data_that_train(trainer: LocalTrainingClient) -> None:
    async def program() -> dict[str, Any]:
        sampler = await trainer.save_weights_and_get_sampling_client_async()
        policy = TinkerTokenCompleter(sampler, max_tokens=12)
        groups = list(await asyncio.gather(*(do_group_rollout(LoudGroup(), policy) for _ in range(3))))
        data, _ = assemble_training_data(groups, compute_advantages(groups))
        assert len(data) == 12
        for group in groups:
            for trajectory in group.trajectories_G:
                assert len(trajectory_to_data(trajectory, 1.0)) == 1
                for transition in trajectory.transitions:
                    assert STOP not in transition.ac.tokens[:-1]
        metrics: dict[str, Any] = {}
        logprobs = await train_step(data, trainer, 1e-3, 2, "importance_sampling", metrics=metrics)
        for datum, seen in list(zip(data, logprobs, strict=True))[:6]:  # before the first of two steps
            mask = datum.loss_fn_inputs["mask"].to_numpy() > 0
            sampled = datum.loss_fn_inputs["logprobs"].to_numpy()
            np.testing.assert_allclose(seen.numpy()[mask], sampled[mask], atol=1e-4)
        return metrics

    assert run(program())["grad_norm"] > 0


def test_the_message_completer_gets_a_parsed_reply(trainer: LocalTrainingClient) -> None:
    async def program() -> renderers.Message:
        sampler = await trainer.save_weights_and_get_sampling_client_async()
        renderer = renderers.get_renderer("role_colon", trainer.get_tokenizer())
        completer = TinkerMessageCompleter(sampler, renderer, max_tokens=10)
        return await completer([{"role": "user", "content": "Hello"}])

    assert run(program())["role"] == "assistant"


def test_a_reply_that_ends_at_the_stop_token_is_parsed_as_ended(trainer: LocalTrainingClient) -> None:
    from tinker_cookbook.renderers.base import parse_response_for_stop_token

    sampler = trainer.save_weights_and_get_sampling_client()
    settings = tinker.SamplingParams(max_tokens=200, stop=[STOP], seed=1, temperature=2.0)
    for sequence in sampler.sample(ints(QUESTION), 8, settings).result().sequences:
        _, termination = parse_response_for_stop_token(sequence.tokens, trainer.get_tokenizer(), STOP)
        assert termination.is_stop_sequence == (sequence.stop_reason == "stop")


def test_supervised_data_of_the_cookbook_train(trainer: LocalTrainingClient) -> None:
    import torch

    text = QUESTION + list(b"yes, gladly\n")
    weights = torch.tensor([0.0] * len(QUESTION) + [1.0] * (len(text) - len(QUESTION)))
    datum = datum_from_model_input_weights(ints(text), weights, max_length=64)
    losses: list[float] = []
    for _ in range(8):
        losses.append(trainer.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"])
        trainer.optim_step(tinker.AdamParams(learning_rate=0.02)).result()
    assert losses[-1] < 0.5 * losses[0]
