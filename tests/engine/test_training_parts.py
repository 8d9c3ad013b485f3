"""Norms and gates that are trained through, against torch in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engine import FAMILIES, with_kernels
from torch import nn
from torch.nn.functional import rms_norm, silu

from viva.engine.layers import FrozenNorm, GatedMLP, replace_parts
from viva.engine.lora import AdapterSettings, add_adapter
from viva.engine.model import load_base_model

CPU = torch.device("cpu")
types = pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 3e-6), (torch.bfloat16, 2**-6)], ids=["float32", "bfloat16"]
)


def numbers(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(actual: torch.Tensor | None, expected: torch.Tensor | None, error: float) -> None:
    assert actual is not None
    assert expected is not None
    assert (actual.double() - expected).abs().max() <= error * max(1.0, expected.abs().max().item())


@types
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 50), heads=st.integers(1, 3), size=st.integers(1, 300))
def test_norms_and_their_gradients(
    dtype: torch.dtype, error: float, rows: int, heads: int, size: int
) -> None:
    hidden = numbers(rows, heads, size, seed=rows, dtype=dtype).requires_grad_()
    weight = nn.Parameter(numbers(size, seed=size, dtype=dtype), requires_grad=False)
    slopes = numbers(rows, heads, size, seed=heads, dtype=dtype)
    exact = hidden.detach().double().requires_grad_()
    expected = rms_norm(exact, (size,), weight.double(), 1e-5)
    expected.backward(slopes.double())
    output = FrozenNorm(weight, 1e-5)(hidden.transpose(0, 1)).transpose(0, 1)
    output.backward(slopes)
    assert_near(output, expected, error)
    assert_near(hidden.grad, exact.grad, error)


class Both(nn.Module):
    """A gated layer whose gates and values are its inputs, so that each has a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Identity(), nn.Identity(), nn.Identity()


@types
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 50), size=st.integers(1, 300), scale=st.sampled_from([0.1, 3.0, 200.0]))
def test_gates_and_their_gradients(
    dtype: torch.dtype, error: float, rows: int, size: int, scale: float
) -> None:
    gates = (scale * numbers(1, rows, size, seed=rows, dtype=dtype)).requires_grad_()
    values, slopes = (numbers(1, rows, size, seed=size + i, dtype=dtype) for i in (1, 2))
    values.requires_grad_()
    layer = GatedMLP(Both())
    layer.gate_proj.forward, layer.up_proj.forward = (lambda hidden: gates), (lambda hidden: values)
    output = layer(gates)
    output.backward(slopes)
    exact = [tensor.detach().double().requires_grad_() for tensor in (gates, values)]
    expected = silu(exact[0]) * exact[1]
    expected.backward(slopes.double())
    assert_near(output, expected, error)
    assert_near(gates.grad, exact[0].grad, error)
    assert_near(values.grad, exact[1].grad, error)


@pytest.mark.parametrize("family", FAMILIES)
@with_kernels
def test_parts_of_known_kinds_are_replaced_and_names_stay(
    family: str, model_dir: Callable[[str], str]
) -> None:
    base = load_base_model(model_dir(family), CPU, torch.float32)
    names = [name for name, _ in base.module.named_parameters()]
    module: Any = add_adapter(base, AdapterSettings(rank=2, seed=0))
    is_known = not family.startswith("gemma")
    assert any(isinstance(part, FrozenNorm) for part in module.modules()) == is_known
    assert any(isinstance(part, GatedMLP) for part in module.modules()) == is_known
    assert [name for name, _ in module.named_parameters() if "lora_" not in name] == names
    assert not any(isinstance(part, FrozenNorm | GatedMLP) for part in base.module.modules())


@with_kernels
def test_a_norm_that_is_trained_stays(model_dir: Callable[[str], str]) -> None:
    module = load_base_model(model_dir("llama"), CPU, torch.float32).decode_copy()
    module.get_decoder().norm.weight = nn.Parameter(torch.ones(32))
    replace_parts(module)
    assert not isinstance(module.get_decoder().norm, FrozenNorm)
    assert isinstance(module.get_decoder().layers[0].input_layernorm, FrozenNorm)
