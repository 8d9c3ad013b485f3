"""That fused layers compute what the model computes is tested with the other copies in test_attention.py."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_engine import FAMILIES, ints, params, with_kernels
from torch import nn

from viva.engine import LocalServiceClient
from viva.engine.attention import RaggedCache
from viva.engine.layers import FusedDecoder, FusedLayer, fuse_layers
from viva.engine.linear import PackedLinear, can_pack
from viva.engine.model import cast_weights, decoder_layers, load_base_model

pytestmark = pytest.mark.skipif(not can_pack(torch.zeros(1, 1)), reason="this torch has no packed product")
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
@with_kernels
def test_layers_of_the_llama_kind_are_fused(family: str, model_dir: Callable[[str], str]) -> None:
    base = load_base_model(model_dir(family), CPU, torch.float32)
    before = [type(layer) for layer in decoder_layers(base.module)]
    kinds = {type(layer) for layer in decoder_layers(fuse_layers(base.decode_copy()))}
    assert kinds == (set(before) if family.startswith("gemma") else {FusedLayer})
    assert [type(layer) for layer in decoder_layers(base.module)] == before


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_in_bfloat16_fused_layers_differ_by_rounding(family: str, model_dir: Callable[[str], str]) -> None:
    base = load_base_model(model_dir(family), CPU, torch.float32)
    tokens, more = torch.randint(0, 256, (5, 20), generator=torch.Generator().manual_seed(4)).split(
        [19, 1], 1
    )
    hidden: list[torch.Tensor] = []
    with torch.inference_mode():
        for change, dtype in (
            (fuse_layers, torch.bfloat16),
            (nn.Identity(), torch.bfloat16),
            (nn.Identity(), None),
        ):
            module = change(cast_weights(base.decode_copy(), dtype or torch.float32))
            cache = RaggedCache(rows=5)
            cache.forward(module, tokens, start=0, past=[0] * 5)
            hidden.append(cache.forward(module, more, start=0, past=[19] * 5).float())
    fused, stock, exact = hidden
    assert (fused - exact).abs().mean() < 1.5 * (stock - exact).abs().mean()


@pytest.mark.parametrize("family", FAMILIES)
@with_kernels
def test_a_decoder_of_fused_layers_is_called_without_masks(
    family: str, model_dir: Callable[[str], str]
) -> None:
    base = load_base_model(model_dir(family), CPU, torch.float32)
    module = fuse_layers(base.decode_copy())
    assert isinstance(module.get_decoder(), FusedDecoder) == (not family.startswith("gemma"))
    module = base.decode_copy()
    decoder_layers(module)[0].self_attn.q_proj = nn.Sequential(decoder_layers(module)[0].self_attn.q_proj)
    assert not isinstance(fuse_layers(module).get_decoder(), FusedDecoder)


@with_kernels
def test_a_layer_of_another_kind_or_with_an_adapter_stays(model_dir: Callable[[str], str]) -> None:
    base = load_base_model(model_dir("llama"), CPU, torch.float32)
    first, second = decoder_layers(module := base.decode_copy())

    class LlamaDecoderLayer(type(first)):
        """Of somebody else, who may have changed anything."""

    first.__class__ = LlamaDecoderLayer
    second.mlp.gate_proj = nn.Sequential(second.mlp.gate_proj)
    assert not any(isinstance(layer, FusedLayer) for layer in decoder_layers(fuse_layers(module)))
    decoder_layers(module := base.decode_copy())[0].mlp.extra = nn.Linear(2, 2)
    kinds = [type(layer) for layer in decoder_layers(fuse_layers(module))]
    assert kinds == [type(decoder_layers(base.module)[0]), FusedLayer]


@pytest.mark.parametrize("rows", [1, 3, 4, 70])
@pytest.mark.parametrize("biased", [False, True])
def test_sums_within_the_product(rows: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, bias = (
        torch.randn(6, 5, generator=generator),
        torch.randn(6, generator=generator) if biased else None,
    )
    inputs, others = (
        torch.randn(rows, 1, 5, generator=generator),
        torch.randn(rows, 1, 6, generator=generator),
    )
    kept = others.clone()
    with torch.inference_mode():
        output = PackedLinear(weight, bias).added_to(others, inputs)
    torch.testing.assert_close(output, others + nn.functional.linear(inputs, weight, bias))
    assert torch.equal(others, kept)


@with_kernels
def test_the_engine_samples_with_fused_layers(
    model_dir: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    forward = FusedLayer.forward
    monkeypatch.setattr(
        FusedLayer,
        "forward",
        lambda self, *args, **kwargs: calls.append(self) or forward(self, *args, **kwargs),
    )
    client = LocalServiceClient(device="cpu").create_sampling_client(base_model=model_dir("qwen3"))
    client.sample(ints([1, 2, 3]), 2, params(max_tokens=4)).result()
    assert len(calls) >= 2 * 4
