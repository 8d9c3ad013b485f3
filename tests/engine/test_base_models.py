"""Base models in memory: their precision, their merged copies, and how many of these there are."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engine import ints, params, run, supervised, weights, with_kernels
from trained_clients import TEXTS, go_on, make, scores

from viva.engine import LocalServiceClient
from viva.engine.linear import TiledLinear


def test_a_base_model_is_loaded_once_however_it_is_named(model_dir: Callable[[str], str]) -> None:
    service = LocalServiceClient(device="cpu")
    folder = Path(model_dir("llama"))
    clients = [
        service.create_sampling_client(base_model=name) for name in (str(folder), f"{folder}/", f"{folder}/.")
    ]
    assert len({id(client._base) for client in clients}) == 1


@pytest.mark.parametrize("rank", [0, 4])
def test_bfloat16_trains_and_samples_close_to_float32(rank: int, model_dir: Callable[[str], str]) -> None:
    results: list[np.ndarray] = []
    for precision in ("float32", "bfloat16"):
        trainer = make(LocalServiceClient(device="cpu", precision=precision), model_dir("qwen3"), rank)
        assert all(value.dtype == torch.float32 for value in weights(trainer).values())
        sampler = trainer.save_weights_and_get_sampling_client()
        assert len(sampler.sample(ints(TEXTS[0]), 2, params()).result().sequences) == 2
        results.append(np.array(scores(sampler)[1:]))
    assert np.abs(results[0] - results[1]).mean() < 0.35


@pytest.mark.parametrize("rank", [0, 4])
def test_fast_samples_in_bfloat16_what_is_trained_in_float32(
    rank: int, model_dir: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    folder = model_dir("qwen3")
    fast = make(LocalServiceClient(device="cpu", precision="fast"), folder, rank)
    exact = make(LocalServiceClient(device="cpu"), folder, rank)
    assert all(torch.equal(value, weights(exact)[name]) for name, value in weights(fast).items())
    sampler = fast.save_weights_and_get_sampling_client()
    assert len(sampler.sample(ints(TEXTS[0]), 2, params()).result().sequences) == 2
    samplers = sampler, exact.save_weights_and_get_sampling_client()
    rough, sharp = (np.array(scores(client)[1:]) for client in samplers)
    assert 1e-4 < np.abs(rough - sharp).mean() < 0.35
    (copy,), base = sampler._core._copies.values(), sampler._base.module
    assert {weight.dtype for weight in copy.parameters()} == {torch.bfloat16}
    assert copy.model.rotary_emb.inv_freq.dtype == torch.float32
    assert {weight.dtype for weight in base.parameters()} == {torch.float32}
    seen, expected = (
        client.forward([supervised(TEXTS[0])], "cross_entropy").result() for client in (fast, exact)
    )
    assert seen.loss_fn_outputs[0]["logprobs"].data == expected.loss_fn_outputs[0]["logprobs"].data


@with_kernels
@pytest.mark.parametrize("shared", [False, True])
def test_fast_without_instructions_for_bfloat16_rounds_the_matrices_alone(
    shared: bool, model_dir: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False}, raising=False)
    folder = model_dir("qwen3")
    fast, exact = (
        make(LocalServiceClient(device="cpu", precision=precision, shared_batch=shared), folder, 4)
        for precision in ("fast", "float32")
    )
    sampler = fast.save_weights_and_get_sampling_client()
    samplers = sampler, exact.save_weights_and_get_sampling_client()
    rough, sharp = (np.array(scores(client)[1:]) for client in samplers)
    assert 1e-5 < np.abs(rough - sharp).mean() < 0.2
    (copy,) = sampler._core._copies.values()
    assert {weight.dtype for weight in copy.parameters()} == {torch.float32}
    kept = [each._tiles.dtype for each in copy.modules() if isinstance(each, TiledLinear)]
    assert kept
    assert set(kept) == {torch.bfloat16}
    assert sampler._core.precision == "float32, sampled with matrices in bfloat16"


def test_fast_is_refused_where_it_would_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("viva.engine.model.can_compile", lambda _: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False}, raising=False)
    with pytest.raises(ValueError, match=r"precision='fast' .* cpu device.* precision='float32'"):
        LocalServiceClient(device="cpu", precision="fast")
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # as in older torch
    with pytest.raises(ValueError, match=r"precision='fast' .* cpu device.* precision='float32'"):
        LocalServiceClient(device="cpu", precision="fast")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    # a GPU without such instructions, on which torch can emulate them
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    with pytest.raises(ValueError, match=r"precision='fast' .* cuda device.* precision='float32'"):
        LocalServiceClient(device="cuda", precision="fast")


def test_two_samplers_share_one_slot_for_merged_weights(
    cramped_service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    trainer = make(cramped_service, model_dir("qwen3"))
    first = trainer.save_weights_and_get_sampling_client()
    expected = scores(first)
    go_on(trainer)
    second = trainer.save_weights_and_get_sampling_client()

    async def program() -> list[Any]:
        prompt = ints(TEXTS[0])
        return list(
            await asyncio.gather(
                first.sample(prompt, 2, params()),
                second.sample(prompt, 2, params()),
                first.compute_logprobs(prompt),
            )
        )

    together = run(program())
    assert together[2] == pytest.approx(expected, abs=1e-5)
    assert (
        together[0].sequences[0].tokens
        == first.sample(ints(TEXTS[0]), 2, params()).result().sequences[0].tokens
    )
    assert len(cramped_service._core._copies) == 1


def test_merged_weights_go_with_their_last_sampling_client(model_dir: Callable[[str], str]) -> None:
    service = LocalServiceClient(device="cpu")
    trainer, core = make(service, model_dir("qwen3")), service._core
    first = trainer.save_weights_and_get_sampling_client()
    scores(first)
    go_on(trainer)
    second = trainer.save_weights_and_get_sampling_client()
    expected = scores(second)
    assert len(core._copies) == 2
    del first
    assert scores(second) == pytest.approx(expected, abs=1e-5)
    assert len(core._copies) == 1
    del second
    go_on(trainer)
    assert not core._copies
