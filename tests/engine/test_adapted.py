"""The written-out layer with an adapter, and the written-out logprobs, against autograd."""

import pytest
import torch
from torch import nn

from viva.engine.lora import AdaptedLinear
from viva.engine.losses import rows_at_once, target_logprobs


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
