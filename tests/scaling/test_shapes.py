"""Parameters, FLOPs, memory and hours: against published sizes, counted operations, and what must always hold."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from viva.scaling.counts import Block, Call, Cost, TrainedReply, count_step
from viva.scaling.hardware import (
    PRESETS,
    Assumptions,
    ModelShape,
    cache_bytes,
    read_shape,
    step_flops,
    step_time,
)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
}


@pytest.mark.parametrize(("name", "parameters"), [("8b", 8_030_261_248), ("70b", 70_553_706_496)])
def test_the_presets_have_the_published_sizes(name, parameters) -> None:
    assert PRESETS[name].parameters == parameters


def test_a_token_of_the_8b_models_cache_takes_128_kib() -> None:
    assert PRESETS["8b"].kv_bytes() == 128 * 1024


def small(kind: str, tied: bool):
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[kind]
    return model_class(config_class(**SIZES, tie_word_embeddings=tied, attn_implementation="eager"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_parameters_and_flops_of_a_models_folder_are_those_of_the_model(tmp_path, kind, tied) -> None:
    model = small(kind, tied)
    model.config.save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path))
    assert shape.parameters == model.num_parameters()
    tokens = torch.zeros((1, 11), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens, use_cache=False)
    # eager attention computes all pairs, later ones included; the rotary table is no part of a model's FLOPs
    rotary = 2 * 11 * SIZES["head_dim"] // 2
    expected = shape.forward_flops(Cost(tokens=11, pairs=11 * 11), 11)
    assert counter.get_total_flops() - expected in (0, rotary)


def test_what_is_no_such_model_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="neither 8b nor 70b nor a folder"):
        read_shape("9b")
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 8, "num_attention_heads": 1}'
    )
    with pytest.raises(ValueError, match="has no num_hidden_layers"):
        read_shape(str(tmp_path))


@pytest.mark.parametrize("text", ['{"model_type": "qwen3_moe"}', '{"model_type": "gpt_neox"}', "{}", "[1]"])
def test_a_model_with_other_matrices_is_refused_not_miscounted(tmp_path, text) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"config\.json has model_type .* counted are llama, mistral, qwen2, qwen3"
    ):
        read_shape(str(tmp_path))


def test_a_torn_configuration_is_named(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        read_shape(str(tmp_path))


def test_an_adapter_saves_the_gradients_of_the_weights_and_nothing_else() -> None:
    shape, cost = PRESETS["8b"], Cost(tokens=1000, pairs=0)
    forward = shape.forward_flops(cost, 100)
    assert shape.train_flops(cost, 100, is_lora=False) == pytest.approx(3 * forward)
    assert shape.train_flops(cost, 100, is_lora=True) == pytest.approx(2 * forward)


@st.composite
def steps(draw):
    """Calls of a group that share the beginning of their prompts, in several waves, and a number of groups."""
    sizes = st.integers(1, 300)
    shared = Block(key="shared", tokens=float(draw(sizes)))
    calls = []
    for index in range(draw(st.integers(1, 5))):
        prompt = (shared, Block(key=index, tokens=float(draw(sizes))))
        tokens = float(draw(sizes))
        trained = TrainedReply(context=prompt, tokens=tokens) if draw(st.booleans()) else None
        calls.append(Call(prompt=prompt, reply=tokens, wave=draw(st.integers(0, 2)), trained=trained))
    return calls, draw(st.integers(1, 40))


def seconds(calls, groups, shape, accelerators, **options) -> float:
    counts = count_step(calls, groups)
    time = step_time(calls, counts, shape, accelerators, assumptions=Assumptions(), **options)
    assert time is not None
    return time.total


@given(steps(), st.sampled_from(["8b", "70b"]))
def test_more_accelerators_reuse_and_adapters_never_take_longer(step, name) -> None:
    calls, groups = step
    shape = PRESETS[name]
    times = [seconds(calls, groups, shape, number) for number in (8, 64, 512)]
    assert times[0] * (1 + 1e-9) >= times[1] >= times[2] * (1 - 1e-9)
    assert times[0] <= seconds(calls, groups, shape, 8, reuse=False) * (1 + 1e-9)
    assert times[0] <= seconds(calls, groups, shape, 8, is_lora=False) * (1 + 1e-9)
    # no more is gained than there are more accelerators
    assert times[2] * 64 >= times[0] * (1 - 1e-9)


@given(steps())
def test_more_groups_cost_as_much_more_flops_and_cache(step) -> None:
    calls, groups = step
    shape = PRESETS["8b"]
    for reuse in (False, True):
        one, many = (
            step_flops(count_step(calls, number), shape, reuse=reuse, is_lora=True) for number in (1, groups)
        )
        assert many == pytest.approx(groups * one)
        caches = [cache_bytes(calls, number, shape, reuse=reuse) for number in (1, groups)]
        assert caches[1] == pytest.approx(groups * caches[0])
    assert cache_bytes(calls, 1, shape, reuse=True) <= cache_bytes(calls, 1, shape, reuse=False)


def test_a_model_that_does_not_fit_has_no_time() -> None:
    calls = [Call(prompt=(Block(key="p", tokens=8.0),), reply=1.0)]
    counts = count_step(calls, 1)
    assert step_time(calls, counts, PRESETS["70b"], 2, assumptions=Assumptions()) is None
    assert Assumptions().split(PRESETS["8b"]) == 1
    assert Assumptions().split(PRESETS["70b"]) == 4
    larger = replace(PRESETS["70b"], layers=800)
    assert Assumptions().split(larger) == 64


@pytest.mark.parametrize(
    "change",
    [{"mfu_train": 1.2}, {"peak_tflops": 0.0}, {"memory_gb": float("inf")}, {"bandwidth_share": 0.0}],
)
def test_assumptions_that_make_no_sense_are_refused(change) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        Assumptions(**change)


def test_decoding_one_sequence_reads_the_weights_for_every_token() -> None:
    shape = ModelShape(
        name="s", hidden=1024, layers=8, heads=8, kv_heads=8, head_dim=128, ffn=4096, vocab=1000
    )
    calls = [Call(prompt=(), reply=100.0)]
    time = step_time(calls, count_step(calls, 1), shape, 1, assumptions=Assumptions())
    assert time is not None
    read = 100 * 2 * shape.parameters / (3.35e12 * 0.6)
    assert time.decode == pytest.approx(read, rel=0.02)
