"""Adapters: their start, the layers they are put on, and what is refused."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engine import ints, plain_logprobs, train, weights

from viva.engine import LocalServiceClient


def test_an_adapters_start_depends_on_its_seed_and_on_nothing_else(
    service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    def start(seed: int | None) -> dict[str, torch.Tensor]:
        return weights(service.create_lora_training_client(model_dir("qwen3"), rank=4, seed=seed))

    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = start(5)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    again, other = start(5), start(6)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert not any(value.any() for name, value in first.items() if name.endswith("lora_B"))
    unseeded = [start(None), start(None)]
    assert any(not torch.equal(unseeded[0][name], unseeded[1][name]) for name in first)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"train_attn": False, "train_unembed": False}, {"gate_proj", "up_proj", "down_proj"}),
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
    ],
)
def test_flags_choose_the_layers(
    service: LocalServiceClient, model_dir: Callable[[str], str], flags: dict[str, bool], expected: set[str]
) -> None:
    trainer = service.create_lora_training_client(model_dir("qwen3"), rank=2, seed=0, **flags)
    assert {name.split(".")[-2] for name in weights(trainer)} == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": -1}, "rank must be at least 1"),
        ({"train_mlp": False, "train_attn": False, "train_unembed": False}, "At least one"),
        ({"rank": 0, "train_mlp": False}, "rank=0 trains all weights"),
    ],
)
def test_adapters_that_make_no_sense_are_refused(
    service: LocalServiceClient, model_dir: Callable[[str], str], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        service.create_lora_training_client(model_dir("qwen3"), **changes)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("flags", [{}, {"train_attn": False, "train_unembed": False}])
def test_adapters_beside_stacked_experts_are_read_by_peft_as_they_were_trained(
    saving_service: LocalServiceClient, model_dir: Callable[[str], str], family: str, flags: dict[str, bool]
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    with pytest.warns(UserWarning, match=r"its routed experts \([0-9]+% of the weights.*have no adapter"):
        trainer = saving_service.create_lora_training_client(model_dir(family), rank=4, seed=0, **flags)
    text = list(b"The answer is 42.")
    train(trainer, [text], learning_rate=0.03)
    path = trainer.save_weights_for_sampler("final").result().path
    trained = trainer.save_weights_and_get_sampling_client().compute_logprobs(ints(text)).result()[1:]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir(family)), path)
    np.testing.assert_allclose(trained, plain_logprobs(model.eval(), text), atol=1e-4)
