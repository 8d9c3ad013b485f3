from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from viva.engine.linear import PackedLinear, can_pack, pack_linears
from viva.engine.model import load_base_model

pytestmark = pytest.mark.skipif(not can_pack(torch.zeros(1, 1)), reason="this torch has no packed product")


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    biased=st.booleans(),
)
def test_a_packed_layer_computes_what_the_layer_computed(
    shape: list[int], inputs: int, outputs: int, biased: bool
) -> None:
    generator = torch.Generator().manual_seed(inputs * outputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator) if biased else None
    values = torch.randn(*shape, inputs, generator=generator)
    with torch.inference_mode():
        output = PackedLinear(weight, bias)(values)
    torch.testing.assert_close(output, nn.functional.linear(values, weight, bias), atol=1e-5, rtol=1e-5)


def test_packing_a_copy_leaves_the_base_model_alone(model_dir: Callable[[str], str]) -> None:
    base = load_base_model(model_dir("qwen2"), torch.device("cpu"), torch.float32)
    linears = [name for name, layer in base.module.named_modules() if isinstance(layer, nn.Linear)]
    copy = pack_linears(base.decode_copy())
    assert [name for name, layer in copy.named_modules() if isinstance(layer, PackedLinear)] == linears
    assert all(isinstance(base.module.get_submodule(name), nn.Linear) for name in linears)
    assert not any(isinstance(layer, nn.Linear) for layer in copy.modules())
    for name in ("model.embed_tokens", "model.norm"):
        assert copy.get_submodule(name).weight is base.module.get_submodule(name).weight


@pytest.mark.parametrize("weight", [torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, device="meta")])
def test_other_weights_stay_as_they_are(weight: torch.Tensor) -> None:
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(weight)
    assert pack_linears(nn.Sequential(layer))[0] is layer
