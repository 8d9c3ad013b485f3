"""Layers in the place of those of ``transformers``: fused ones, norms and gates in training, the last one."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engine import FAMILIES, ints, params, supervised, train, with_kernels
from torch import nn
from torch.nn.functional import rms_norm, silu
from tree_results import DEAR_TOKENS, assert_alike, evaluate

from viva.engine import LocalServiceClient, policy
from viva.engine.attention import RaggedCache
from viva.engine.layers import (
    FrozenNorm,
    FusedDecoder,
    FusedLayer,
    GatedMLP,
    LastLayer,
    confine_last_layer,
    fuse_layers,
    replace_parts,
)
from viva.engine.linear import JointProduct, PackedLinear, can_pack, join_linears, pack_linears
from viva.engine.lora import AdapterSettings, add_adapter
from viva.engine.model import cast_weights, decoder_layers, load_base_model, structure_copy
from viva.engine.policy import Policy
from viva.engine.trees import TreeStep, pack_tree

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


@pytest.mark.parametrize("change", [fuse_layers, pack_linears])
def test_a_replaced_layer_is_let_go_before_the_next_one(
    change: Callable[..., Any], model_dir: Callable[[str], str]
) -> None:
    base = load_base_model(model_dir("qwen3"), CPU, torch.float32)
    module = structure_copy(base.module)
    refs = [weakref.ref(layer.self_attn.q_proj) for layer in decoder_layers(module)]
    alive: list[int] = []

    def join(layers: Sequence[nn.Linear]) -> JointProduct:
        alive.append(sum(ref() is not None for ref in refs))
        return join_linears(layers)

    change(module, join)
    assert alive[0] == len(refs) > 1
    assert alive[-1] <= 1
    assert alive == sorted(alive, reverse=True)


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
            cache.forward(module, tokens, past=[0] * 5)
            hidden.append(cache.forward(module, more, past=[19] * 5).float())
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
    # of a single number the gradient is a difference of nearly equal terms
    assert_near(hidden.grad, exact.grad, 4 * error if size == 1 else error)


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


PROMPT, REPLIES = 140, 3
"""A prompt has a cell of its own, in which nothing is read."""


def group() -> list[tinker.Datum]:
    """Replies behind one prompt, whose targets a mask hides; one reply is hidden half."""
    generator = np.random.default_rng(5)
    prompt = generator.integers(0, 250, PROMPT).tolist()
    data: list[tinker.Datum] = []
    for number in range(REPLIES):
        reply = generator.integers(0, 250, 6 + number).tolist()
        mask = np.ones(PROMPT + len(reply) - 1, np.float32)
        mask[: PROMPT - 1 + 3 * (number == 1)] = 0
        inputs: dict[str, Any] = {
            "target_tokens": [*prompt, *reply][1:],
            "weights": generator.normal(size=len(mask)).tolist(),
            "mask": mask,
        }
        data.append(tinker.Datum(model_input=ints([*prompt, *reply][:-1]), loss_fn_inputs=inputs))
    return data


def make_policy(service: LocalServiceClient, folder: str, rank: int) -> Policy:
    client = service.create_lora_training_client(folder, rank=rank, seed=0)
    train(client, [list(range(1, 30))], steps=1, learning_rate=0.01 if rank else 0.001)
    client._policy._costs = DEAR_TOKENS
    return client._policy


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("trees", [False, True])
def test_losses_and_gradients_are_those_of_whole_layers(
    family: str,
    rank: int,
    trees: bool,
    service: LocalServiceClient,
    model_dir: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    confined = make_policy(service, model_dir(family), rank)
    assert confined._is_confined == (not family.startswith("gemma"))
    with monkeypatch.context() as context:
        context.setattr(policy, "confine_last_layer", lambda module: False)
        whole = make_policy(service, model_dir(family), rank)
    ours, theirs = (
        evaluate(each, group(), "cross_entropy", trees=trees and each.base.takes_trees)
        for each in (confined, whole)
    )
    assert theirs[1].norm() > 0
    assert_alike(ours, theirs, 1e-5)
    assert list(confined._parameters) == list(whole._parameters)


@pytest.mark.parametrize("trees", [False, True])
def test_the_last_layer_computes_what_is_read_alone(
    trees: bool, service: LocalServiceClient, model_dir: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = make_policy(service, model_dir("qwen3"), 4)
    rows: list[int] = []
    for layer in decoder_layers(trained._module):
        layer.mlp.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[:-1].numel()))
    cells: list[list[int]] = []
    make = TreeStep.__init__

    def spy(step: TreeStep, *given: Any) -> None:
        make(step, *given)
        cells.append([step.cells[index].queries.start for index in step.read_cells])

    monkeypatch.setattr(TreeStep, "__init__", spy)
    evaluate(trained, group(), "cross_entropy", trees=trees)
    replies = sum(6 + number for number in range(REPLIES)) - 3
    shared = (
        REPLIES - 2 if trees else 0
    )  # the first reply tokens are predicted at one place of the tree, one is hidden
    assert rows[-1] == replies - shared
    assert rows[0] > PROMPT
    assert all(0 not in starts for starts in cells)
    assert len(cells) == trees


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9), st.data())
def test_cells_that_are_read(texts: list[list[int]], data: st.DataObject) -> None:
    tree = pack_tree([np.array(text) for text in sorted(texts)], call_entries=data.draw(st.integers(0, 20)))
    read = sorted(data.draw(st.sets(st.integers(0, len(tree.tokens) - 1))))
    step = TreeStep(tree, CPU, np.array(read, dtype=np.int64))
    expected = [
        index for index, cell in enumerate(tree.cells) if {*range(len(tree.tokens))[cell.queries]} & {*read}
    ]
    assert list(step.read_cells) == expected
    assert list(TreeStep(tree, CPU).read_cells) == list(range(len(tree.cells)))


def test_a_layer_that_somebody_changed_is_left_alone(model_dir: Callable[[str], str]) -> None:
    module = structure_copy(load_base_model(model_dir("llama"), CPU, torch.float32).module)
    last = decoder_layers(module)[-1]

    class LlamaDecoderLayer(type(last)):
        """Of somebody else, who may have changed anything."""

    kind, last.__class__ = last.__class__, LlamaDecoderLayer
    assert not confine_last_layer(module)
    assert decoder_layers(module)[-1] is last
    last.__class__ = kind
    names = [name for name, _ in module.named_parameters()]
    assert confine_last_layer(module)
    assert isinstance(decoder_layers(module)[-1], LastLayer)
    assert [name for name, _ in module.named_parameters()] == names


def test_where_nothing_is_read_nothing_is_computed(
    service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    client = service.create_lora_training_client(model_dir("llama"), rank=2, seed=0)
    datum = supervised(list(range(9)))
    inputs: dict[str, Any] = {**datum.loss_fn_inputs, "mask": np.zeros(8, np.float32)}
    hidden = tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)
    assert client.forward([hidden], "cross_entropy").result().metrics["tree_token_ratio"] == 0
    assert client.forward([datum], "cross_entropy").result().metrics["tree_token_ratio"] == 1
