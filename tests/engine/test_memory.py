"""Layers that are computed again in the backward pass: when, and that it changes no bit."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_tree_training import DEAR_TOKENS, evaluate
from tiny_engine import FAMILIES, supervised, train

from viva.engine import LocalServiceClient, policy
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
    assert len(caplog.records) == 1
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
