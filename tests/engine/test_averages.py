"""The moving average of what a client trains: its closed form, what samples from it, and what a saved state keeps."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_engine import ints, train, weights

from viva.engine import LocalServiceClient, LocalTrainingClient

TEXTS = [list(b"The answer is 42."), list(b"No, it is 7, because 3 + 4 = 7.")]
DECAY = 0.7


def average_of(client: LocalTrainingClient) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in client._policy._begun_average().items()}


def stepped(client: LocalTrainingClient, num_steps: int) -> list[dict[str, torch.Tensor]]:
    """Take steps and move the average after each; the weights after each."""
    found: list[dict[str, torch.Tensor]] = []
    for _ in range(num_steps):
        train(client, TEXTS, steps=1)
        client.update_average(DECAY).result()
        found.append(weights(client))
    return found


@pytest.fixture
def service(tmp_path: Path) -> LocalServiceClient:
    return LocalServiceClient(device="cpu", state_dir=tmp_path)


@pytest.mark.parametrize("rank", [4, 0])
def test_an_average_is_the_weighted_sum_of_the_weights_after_every_step(
    service: LocalServiceClient, model_dir: Callable[[str], str], rank: int
) -> None:
    client = service.create_lora_training_client(model_dir("qwen3"), rank=rank, seed=0)
    client.begin_average().result()
    theta = [weights(client), *stepped(client, 4)]
    for name, found in average_of(client).items():
        shares = [DECAY**4, *((1 - DECAY) * DECAY ** (4 - step) for step in range(1, 5))]
        wanted = sum(share * each[name].double() for share, each in zip(shares, theta, strict=True))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-6)
    assert any(not torch.equal(found, theta[-1][name]) for name, found in average_of(client).items())


def test_the_average_samples_as_a_client_that_has_it_for_its_weights(
    service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    client = service.create_lora_training_client(model_dir("qwen3"), rank=4, seed=0)
    client.begin_average().result()
    stepped(client, 3)
    judge = client.save_average_and_get_sampling_client()
    found = judge.compute_logprobs(ints(TEXTS[0])).result()
    other = service.create_lora_training_client(model_dir("qwen3"), rank=4, seed=1)
    with torch.no_grad():
        for name, parameter in other._policy._parameters.items():
            parameter.copy_(average_of(client)[name])
    assert found == other.save_weights_and_get_sampling_client().compute_logprobs(ints(TEXTS[0])).result()
    assert found != client.save_weights_and_get_sampling_client().compute_logprobs(ints(TEXTS[0])).result()
    stepped(client, 1)
    assert judge.compute_logprobs(ints(TEXTS[0])).result() == found, "a snapshot stays as it is"


@pytest.mark.parametrize("rank", [4, 0])
def test_a_loaded_average_goes_on_to_the_bit(
    service: LocalServiceClient, model_dir: Callable[[str], str], rank: int
) -> None:
    client = service.create_lora_training_client(model_dir("qwen3"), rank=rank, seed=0)
    client.begin_average().result()
    stepped(client, 2)
    path = client.save_state("two").result().path
    stepped(client, 2)
    again = service.create_training_client_from_state_with_optimizer(path)
    stepped(again, 2)
    found = average_of(again)
    assert all(torch.equal(found[name], tensor) for name, tensor in average_of(client).items())


def test_no_average_is_taken_for_one(service: LocalServiceClient, model_dir: Callable[[str], str]) -> None:
    client = service.create_lora_training_client(model_dir("qwen3"), rank=4, seed=0)
    client.begin_average().result()
    path = client.save_state("begun").result().path
    assert (Path(path) / "average.safetensors").is_file()
    afresh = service.create_training_client_from_state(path)
    with pytest.raises(ValueError, match="There is no average of these weights"):
        afresh.update_average(0.9).result()
    with pytest.raises(ValueError, match="There is no average of these weights"):
        afresh.save_average_and_get_sampling_client().compute_logprobs(ints(TEXTS[0])).result()
    assert not (Path(afresh.save_state("none").result().path) / "average.safetensors").exists()


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5, float("nan")])
def test_a_decay_that_is_none_is_refused(
    service: LocalServiceClient, model_dir: Callable[[str], str], decay: float
) -> None:
    client = service.create_lora_training_client(model_dir("qwen3"), rank=4, seed=0)
    with pytest.raises(ValueError, match="decay must be above 0 and below 1"):
        client.update_average(decay)


def test_averaging_does_not_change_what_is_trained(
    service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    plain, averaged = (
        service.create_lora_training_client(model_dir("qwen3"), rank=4, seed=0) for _ in range(2)
    )
    averaged.begin_average().result()
    stepped(averaged, 3)
    train(plain, TEXTS, steps=3)
    assert all(torch.equal(tensor, weights(averaged)[name]) for name, tensor in weights(plain).items())
