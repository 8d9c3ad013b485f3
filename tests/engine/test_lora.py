"""Adapters: which layers have one, what PEFT reads, and the gradients of their layers."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engine import ints, plain_logprobs, train, weights
from torch import nn

from viva.engine import LocalServiceClient
from viva.engine.lora import AdaptedLinear
from viva.engine.losses import rows_at_once, target_logprobs


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


def make_layer(dtype: torch.dtype, *, bias: bool) -> AdaptedLinear:
    torch.manual_seed(0)
    layer = AdaptedLinear(nn.Linear(24, 17, bias=bias).to(dtype).requires_grad_(False), rank=3, scale=2.0)
    nn.init.normal_(layer.lora_A)
    nn.init.normal_(layer.lora_B)
    return layer


def plain(layer: AdaptedLinear, inputs: torch.Tensor) -> torch.Tensor:
    bias = None if layer.bias is None else layer.bias.float()
    delta = layer.scale * layer.lora_B @ layer.lora_A
    return nn.functional.linear(inputs, layer.weight.float() + delta, bias)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_and_its_gradients_are_those_of_the_merged_weight(
    dtype: torch.dtype, tolerance: float, bias: bool
) -> None:
    layer = make_layer(dtype, bias=bias)
    values = torch.randn(5, 2, 24).to(dtype).transpose(0, 1)
    slopes = torch.randn(2, 5, 17).to(dtype)
    found = []
    for compute, number_type in ((layer, dtype), (lambda x: plain(layer, x), torch.float32)):
        inputs = values.clone().to(number_type).requires_grad_(True)
        output = compute(inputs)
        output.backward(slopes.to(number_type))
        gradients = [inputs.grad, layer.lora_A.grad, layer.lora_B.grad]
        found.append([output.detach(), *gradients])
        layer.zero_grad()
    assert layer.weight.grad is None
    for mine, other in zip(*found, strict=True):
        assert mine.dtype in (dtype, torch.float32)
        assert (mine.float() - other).norm() <= tolerance * other.norm()


def test_inputs_that_nobody_trains_get_no_gradient() -> None:
    layer = make_layer(torch.float32, bias=False)
    inputs = torch.randn(4, 24)
    layer(inputs).sum().backward()
    assert inputs.grad is None
    assert layer.lora_A.grad is not None


@pytest.mark.parametrize("cap", [None, 3.0])
def test_logprobs_and_their_gradient_are_those_of_autograd(cap: float | None) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 50)
            self.config = type("Config", (), {"final_logit_softcapping": cap})()

        def get_output_embeddings(self) -> nn.Linear:
            return self.head

    torch.manual_seed(1)
    model = Model()
    targets = torch.randint(50, (9, 3))
    targets[2] = 7  # the same candidate several times
    slopes = torch.randn(9, 3)
    slopes[4] = 0
    values, found = torch.randn(9, 6) * 3, []
    for ours in (True, False):
        hidden = values.clone().requires_grad_(True)
        if ours:
            logprobs = target_logprobs(model, hidden, targets)
        else:
            logits = model.head(hidden)
            logits = logits if cap is None else torch.tanh(logits / cap) * cap
            logprobs = logits.double().log_softmax(1).gather(1, targets)
        logprobs.backward(slopes.to(logprobs.dtype))
        found.append([logprobs.detach(), hidden.grad, model.head.weight.grad, model.head.bias.grad])
        model.zero_grad()
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other.to(mine.dtype), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("vocab_size", "max_logits", "rows"),
    [(32_000, 2**25, 262), (152_000, 2**25, 128), (32_000, 64_000, 2), (32_000, 1, 1), (260, 2**25, 32_263)],
)
def test_logits_at_once_fit_the_limit_and_the_cache(vocab_size: int, max_logits: int, rows: int) -> None:
    assert rows_at_once(vocab_size, max_logits) == rows
