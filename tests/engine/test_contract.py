"""The engine's contract: every probe of the doctor, tinker-cookbook's loops, architectures it does not know."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
import transformers
from tinker.lib.public_interfaces.rest_client import RestClient
from tinker_cookbook import renderers
from tinker_cookbook.completers import StopCondition, TinkerMessageCompleter, TinkerTokenCompleter
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages, trajectory_to_data
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.train import train_step
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, StepResult
from tinker_cookbook.supervised.common import datum_from_model_input_weights
from tiny_engine import ints, make_tokenizer, run, supervised

from viva.doctor.bench import Bench
from viva.doctor.examination import PROBES, examine
from viva.engine import LocalSamplingClient, LocalServiceClient, LocalTrainingClient, policy
from viva.engine.service import LocalRestClient


@pytest.mark.parametrize(("family", "rank"), [("qwen3", 4), ("gemma3", 4), ("llama", 0)])
async def test_every_probe_is_answered_with_yes(model_dir, tmp_path: Path, family: str, rank: int) -> None:
    service = LocalServiceClient(device="cpu", state_dir=tmp_path)
    client = service.create_lora_training_client(model_dir(family), rank=rank, seed=0)
    bench = Bench(service=service, client=client, tolerance=1e-3)
    findings = [finding async for finding in examine(bench)]
    unheard = [] if hasattr(tinker.SampledSequence, "topk_logprobs") else ["top-k of samples"]  # older SDKs
    assert [finding.name for finding in findings if finding.answer != "yes"] == unheard, findings
    assert len(findings) == len(PROBES)


PAIRS = [
    (tinker.ServiceClient, LocalServiceClient),
    (tinker.TrainingClient, LocalTrainingClient),
    (tinker.SamplingClient, LocalSamplingClient),
    (RestClient, LocalRestClient),
]


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_every_public_method_of_the_sdk_is_there_or_says_in_a_sentence_that_it_is_not(
    theirs: type, ours: type
) -> None:
    names = [name for name, _ in inspect.getmembers(theirs, callable) if not name.startswith("_")]
    assert len(names) > 5
    refused = [name for name in names if isinstance(inspect.getattr_static(ours, name), staticmethod)]
    assert len(refused) < len(names)
    for name in refused:
        with pytest.raises(NotImplementedError, match=rf"^{name} is answered by Tinker's servers, .*\.$"):
            getattr(ours, name)("anything", more=1)


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
    text = QUESTION + list(b"yes, gladly\n")
    weights = torch.tensor([0.0] * len(QUESTION) + [1.0] * (len(text) - len(QUESTION)))
    datum = datum_from_model_input_weights(ints(text), weights, max_length=64)
    losses: list[float] = []
    for _ in range(8):
        losses.append(trainer.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"])
        trainer.optim_step(tinker.AdamParams(learning_rate=0.02)).result()
    assert losses[-1] < 0.5 * losses[0]


TEXTS = [[*range(1, 12), 20 + number, 3] for number in range(4)]
CONFIGS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=260, n_positions=64, eos_token_id=256
    ),
    "opt": lambda: transformers.OPTConfig(
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        word_embed_proj_dim=16,
        vocab_size=260,
        max_position_embeddings=64,
    ),
}


@pytest.mark.parametrize(("kind", "rank"), [("gpt2", 0), ("opt", 0), ("opt", 4)])
@pytest.mark.parametrize("free", [2**40, 0])
def test_what_is_trained_is_what_is_sampled(
    kind: str, rank: int, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(policy, "free_bytes", lambda device: free)  # 0: layers are computed again
    client = LocalServiceClient(device="cpu").create_lora_training_client(str(tmp_path), rank=rank, seed=0)
    data = [supervised(text) for text in TEXTS]
    losses: list[float] = []
    for _ in range(3):
        losses.append(client.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
        client.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
    assert losses == sorted(losses, reverse=True)
    seen = client.forward(data[:1], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    sampler = client.save_weights_and_get_sampling_client()
    np.testing.assert_allclose(sampler.compute_logprobs(ints(TEXTS[0])).result()[1:], seen, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_models_with_recurrent_layers_are_refused_with_what_is_supported(
    family: str, model_dir: Callable[[str], str]
) -> None:
    pattern = r"layers of the kind 'linear_attention'.*Supported are .*Llama, .*Qwen3 .*engine=remote"
    with pytest.raises(ValueError, match=pattern):
        LocalServiceClient(device="cpu").create_sampling_client(base_model=model_dir(family))
