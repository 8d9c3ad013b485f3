"""The optimiser, memory of a training pass, and numbers that are not finite."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import FAMILIES, ints, params, supervised, train
from torch import nn
from tree_results import DEAR_TOKENS, evaluate

from viva.engine import LocalSamplingClient, LocalServiceClient, policy
from viva.engine.adam import AdamW, check_adam
from viva.engine.losses import LOSSES
from viva.engine.model import attention_by
from viva.engine.packing import make_examples, plan_batches
from viva.engine.policy import Policy, activation_bytes, free_bytes
from viva.engine.trees import TREE_ATTENTION

TEXT = list(b"The answer is 42, because six times seven is 42, and no other number is.")
DATA = [supervised(TEXT[:cut] + list(b" No, look: 6 * 7.")[cut % 5 :]) for cut in (9, 25, 40)]


def make_policy(service: LocalServiceClient, folder: str, rank: int) -> Policy:
    client = service.create_lora_training_client(folder, rank=rank, seed=0)
    train(client, [TEXT], steps=1, learning_rate=0.01 if rank else 0.001)
    client._policy._costs = DEAR_TOKENS
    return client._policy


@pytest.mark.parametrize("family", ["gemma2", "llama", "mistral", "qwen3"])
@pytest.mark.parametrize("rank", [0, 4])
def test_layers_computed_again_change_no_bit(
    family: str,
    rank: int,
    service: LocalServiceClient,
    model_dir: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = make_policy(service, model_dir(family), rank)
    again: list[int] = []
    checkpoint = policy.checkpoint
    monkeypatch.setattr(policy, "checkpoint", lambda *a, **k: (again.append(1), checkpoint(*a, **k))[1])
    for trees in (True, False):
        plain, plain_gradient = evaluate(trained, DATA, "cross_entropy", trees=trees)
        assert not again
        with monkeypatch.context() as patch:
            patch.setattr(policy, "free_bytes", lambda device: 0)
            ours, gradient = evaluate(trained, DATA, "cross_entropy", trees=trees)
        assert len(again) == 2  # layers; everything is one batch
        again.clear()
        assert torch.equal(gradient, plain_gradient)
        for mine, other in zip(ours.logprobs, plain.logprobs, strict=True):
            assert np.array_equal(mine, other)


def kept_bytes(trained: Policy, *, trees: bool) -> tuple[int, tuple[int, ...]]:
    """Bytes that a forward pass keeps for the backward pass beside the weights, and the batch's shape."""
    base = trained.base
    examples = make_examples(
        DATA, LOSSES["cross_entropy"], "cross_entropy", base.vocab_size, base.context_length
    )
    (batch,) = plan_batches(examples, trained._costs, 10**6, trees=trees)
    weights = {tensor.untyped_storage().data_ptr() for tensor in trained._module.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    attention = attention_by(trained._module, TREE_ATTENTION) if trees else nullcontext()
    with attention, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden: Any = trained._hidden(batch, np.arange(batch.tokens.size))
    assert hidden.requires_grad
    return sum(found.values()), batch.tokens.shape


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", [0, 4])
def test_the_estimate_is_what_layers_keep(
    family: str, rank: int, service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    trained = make_policy(service, model_dir(family), rank)
    for trees in (False, True):
        kept, (num_rows, length) = kept_bytes(trained, trees=trees)
        with attention_by(trained._module, TREE_ATTENTION) if trees else nullcontext():
            estimate = activation_bytes(trained._module.config, num_rows, length, itemsize=4)
        assert 0.55 * estimate <= kept <= 1.2 * estimate


def test_what_is_done_about_little_memory_is_said_once(
    service: LocalServiceClient,
    model_dir: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained = make_policy(service, model_dir("qwen3"), rank=2)
    kept = activation_bytes(trained._module.config, 1, 100, itemsize=4)
    monkeypatch.setattr(policy, "free_bytes", lambda device: int(kept / 0.6) + 10)
    with caplog.at_level(logging.WARNING):
        assert [trained._needs_recomputing(1, size) for size in (50, 100, 101, 200)] == [
            False,
            False,
            True,
            True,
        ]
    assert [record.name for record in caplog.records].count("viva.engine.policy") == 1
    assert "are computed again" in caplog.text
    monkeypatch.setattr(policy, "free_bytes", lambda device: None)
    assert not trained._needs_recomputing(10, 10**9)


def test_free_memory_is_the_machines_and_the_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(policy, "_CGROUP", tmp_path)
    assert free_bytes(torch.device("cpu")) is None
    (tmp_path / "meminfo").write_text("MemTotal:  900 kB\nMemAvailable:     500 kB\nCached: 7 kB\n")
    assert free_bytes(torch.device("cpu")) == 500 * 1024
    (tmp_path / "memory.current").write_text("250000\n")
    (tmp_path / "memory.stat").write_text("anon 150000\ninactive_file 100000\n")
    for limit, free in (("max", 500 * 1024), ("400000", 250000), ("100000", 0), ("9000000", 500 * 1024)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert free_bytes(torch.device("cpu")) == free


POISON = 99
"""A token whose embedding is not a number."""
BAD = [*range(20, 60), POISON, 1, 2]
LONG, SHORT = list(range(100, 160)), [5, 6]


@pytest.fixture(scope="module")
def sampler_of(model_dir: Callable[[str], str]) -> Iterator[Callable[[], LocalSamplingClient]]:
    service = LocalServiceClient(device="cpu")
    folder = model_dir("llama")
    service.create_sampling_client(base_model=folder)
    weight = service._core.base_model(folder).module.model.embed_tokens.weight
    with torch.no_grad():
        weight[POISON] = math.nan
    return lambda: service.create_sampling_client(base_model=folder)


def drawn(sampler: LocalSamplingClient, *prompts: list[int], **settings: int) -> list[list[int] | None]:
    """Tokens of one sample per prompt, all decoded together; ``None`` where the logits were not finite."""
    futures = [sampler.sample(ints(prompt), 1, params(**settings)) for prompt in prompts]
    found: list[list[int] | None] = []
    for future in futures:
        try:
            found.append(list(future.result().sequences[0].tokens))
        except FloatingPointError:
            found.append(None)
    return found


@pytest.mark.parametrize("order", [(BAD, LONG, SHORT), (LONG, BAD, SHORT), (SHORT, LONG, BAD)])
@pytest.mark.parametrize("max_tokens", [1, 6])
def test_a_prompt_that_is_lost_takes_no_other_with_it(
    order: tuple[list[int], ...], max_tokens: int, sampler_of: Callable[[], LocalSamplingClient]
) -> None:
    alone = [drawn(sampler_of(), prompt, max_tokens=max_tokens)[0] for prompt in order]
    assert [tokens is None for tokens in alone] == [prompt is BAD for prompt in order]
    sampler = sampler_of()
    for _ in range(2):  # what is left behind in the rows reaches nobody either
        assert drawn(sampler, *order, max_tokens=max_tokens) == alone


def test_rows_that_end_beside_a_lost_one_leave_nothing_behind(
    sampler_of: Callable[[], LocalSamplingClient],
) -> None:
    expected = [drawn(sampler_of(), prompt, max_tokens=3)[0] for prompt in (LONG, SHORT, SHORT[::-1])]
    sampler = sampler_of()
    ending = sampler.sample(ints(LONG), 1, params(max_tokens=1))
    lost = sampler.sample(ints(BAD), 1, params(max_tokens=3))
    assert ending.result().sequences[0].tokens == expected[0][:1]
    with pytest.raises(FloatingPointError, match=r"not finite.*earlier checkpoint"):
        lost.result()
    assert drawn(sampler, LONG, SHORT, SHORT[::-1], max_tokens=3) == expected


def test_logprobs_of_a_prompt_that_are_not_finite_are_an_error(
    sampler_of: Callable[[], LocalSamplingClient],
) -> None:
    expected = drawn(sampler_of(), LONG, SHORT, SHORT[::-1], max_tokens=3)
    scores = sampler_of().compute_logprobs(ints(SHORT)).result()
    sampler = sampler_of()
    lost, kept = sampler.compute_logprobs(ints(BAD)), sampler.compute_logprobs(ints(SHORT))
    sampled = sampler.sample(ints(BAD), 2, params(max_tokens=3), include_prompt_logprobs=True)
    others = drawn(sampler, LONG, SHORT, SHORT[::-1], max_tokens=3)
    for future in (lost, sampled):
        with pytest.raises(FloatingPointError, match=r"not finite.*earlier checkpoint"):
            future.result()
    assert kept.result()[1:] == pytest.approx(scores[1:], abs=1e-5)
    assert others == expected
    assert drawn(sampler, LONG, SHORT, SHORT[::-1], max_tokens=3) == expected


settings_of_steps = st.lists(
    st.tuples(
        st.sampled_from([1e-3, 0.1]),
        st.sampled_from([0.0, 0.9]),
        st.sampled_from([0.95, 0.999]),
        st.sampled_from([1e-12, 1e-2]),
        st.sampled_from([0.0, 0.1]),
        st.sampled_from([0.0, 0.5, 100.0]),
    ),
    min_size=1,
    max_size=5,
)


def pair() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(4, 3, generator=generator)) for name in "ab"}


def set_gradients(parameters: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@given(settings_of_steps)
def test_steps_are_those_of_torch(steps: list[Any]) -> None:
    ours, theirs = pair(), pair()
    optimizer, reference = AdamW(ours), torch.optim.AdamW(theirs.values())
    for number, (lr, beta1, beta2, eps, decay, clip) in enumerate(steps):
        set_gradients(ours, number)
        set_gradients(theirs, number)
        for group in reference.param_groups:
            group.update(lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), clip or float("inf"))
        reference.step()
        metrics = optimizer.step(
            tinker.AdamParams(
                learning_rate=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay, grad_clip_norm=clip
            )
        )
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    parameters = pair()
    optimizer = AdamW(parameters)
    set_gradients(parameters, 0)
    optimizer.step(tinker.AdamParams())
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    state = {name: value.clone() for name, value in optimizer.moments.items()}
    set_gradients(parameters, 1)
    assert parameters["b"].grad is not None
    parameters["b"].grad[0, 0] = bad
    with pytest.raises(FloatingPointError, match="weights are unchanged"):
        optimizer.step(tinker.AdamParams())
    assert optimizer.num_steps == 1
    assert all(torch.equal(parameters[name], value) for name, value in before.items())
    assert all(torch.equal(optimizer.moments[name], value) for name, value in state.items())


def test_a_restored_optimizer_goes_on_bit_for_bit() -> None:
    whole, first = pair(), pair()
    optimizer, started = AdamW(whole), AdamW(first)
    for number in range(3):
        for parameters, stepper in ((whole, optimizer), (first, started)):
            set_gradients(parameters, number)
            stepper.step(tinker.AdamParams(learning_rate=0.1))
    resumed = AdamW(first)
    resumed.load(started.moments, started.num_steps)
    for parameters, stepper in ((whole, optimizer), (first, resumed)):
        set_gradients(parameters, 7)
        stepper.step(tinker.AdamParams(learning_rate=0.1))
    assert all(torch.equal(whole[name], first[name]) for name in whole)


def test_a_state_of_other_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mean\.c"):
        AdamW(pair()).load({"mean.c": torch.zeros(2)}, 1)


NO_NUMBERS = [float("nan"), float("inf"), float("-inf")]
negative = st.floats(max_value=0.0, exclude_max=True)
refused = st.one_of(
    st.tuples(
        st.sampled_from(["learning_rate", "weight_decay", "grad_clip_norm"]),
        negative | st.sampled_from(NO_NUMBERS),
    ),
    st.tuples(
        st.sampled_from(["beta1", "beta2"]), negative | st.floats(min_value=1) | st.sampled_from(NO_NUMBERS)
    ),
    st.tuples(st.just("eps"), st.floats(max_value=1e-39) | st.sampled_from(NO_NUMBERS)),
)


@given(refused)
def test_settings_that_are_no_numbers_or_out_of_range_are_refused(setting: tuple[str, float]) -> None:
    name, value = setting
    with pytest.raises(ValueError, match=f"{name} must be .*; got "):
        check_adam(tinker.AdamParams(**{name: value}))


@given(
    st.floats(0, 10),
    st.floats(0, 1, exclude_max=True),
    st.floats(0, 1, exclude_max=True),
    st.floats(1e-37, 1),
    st.floats(0, 0.1),
    st.floats(0, 1e6),
)
def test_settings_that_are_taken_leave_weights_that_are_numbers(
    rate: float, beta1: float, beta2: float, eps: float, decay: float, clip: float
) -> None:
    params = tinker.AdamParams(
        learning_rate=rate, beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay, grad_clip_norm=clip
    )
    check_adam(params)
    parameters = pair()
    optimizer = AdamW(parameters)
    for number in range(2):
        set_gradients(parameters, number)
        optimizer.step(params)
    assert all(torch.isfinite(parameter).all() for parameter in parameters.values())
