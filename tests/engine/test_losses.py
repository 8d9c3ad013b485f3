"""Losses and gradients against the documented formulas, and targets that a mask hides."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import gradients, ints, policy_datum, supervised, train
from transformers import AutoModelForCausalLM

from viva.engine import LocalServiceClient
from viva.engine.losses import LOSSES, _TargetLogprobs, find_loss, target_logprobs
from viva.engine.packing import DatumArrays, make_examples, micro_batches

NAMES = sorted(LOSSES)
logprob = st.floats(-6, -0.01)
triples = st.lists(st.tuples(logprob, logprob, st.floats(-3, 3)), min_size=1, max_size=8)


def by_formula(
    name: str, p: np.ndarray, q: np.ndarray, a: np.ndarray, config: dict[str, float]
) -> np.ndarray:
    """The losses as the Tinker documentation writes them, in float64."""
    ratio = np.exp(p - q)
    if name == "cross_entropy":
        return -p * a
    if name == "importance_sampling":
        return -ratio * a
    if name == "dro":
        return -(p * a - 0.5 * config["beta"] * (p - q) ** 2)
    clipped = np.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])
    return -np.minimum(ratio * a, clipped * a) if name == "ppo" else -clipped * p * a


def by_slope(name: str, p: np.ndarray, q: np.ndarray, a: np.ndarray, config: dict[str, float]) -> np.ndarray:
    """The gradient by central differences; cispo's ratio is a constant."""
    step = 1e-6
    if name == "cispo":
        return -np.clip(np.exp(p - q), config["clip_low_threshold"], config["clip_high_threshold"]) * a
    up, down = by_formula(name, p + step, q, a, config), by_formula(name, p - step, q, a, config)
    return (up - down) / (2 * step)


@pytest.mark.parametrize("name", NAMES)
@given(triples)
def test_losses_and_their_gradients_follow_the_documented_formulas(
    name: str, values: list[tuple[float, float, float]]
) -> None:
    p, q, a = np.array(values).T
    loss = find_loss(name)
    config = loss.settings(name, None)
    leaf = torch.tensor(p, requires_grad=True)
    given_inputs = {"weights": a, "advantages": a, "logprobs": q}
    losses = loss.per_token(leaf, {key: torch.tensor(given_inputs[key]) for key in loss.inputs}, config)
    np.testing.assert_allclose(losses.detach(), by_formula(name, p, q, a, config), rtol=1e-9)
    losses.sum().backward()
    edges = [config[key] for key in config if key.startswith("clip")]
    at_edge = (
        np.any([np.abs(np.exp(p - q) - edge) < 1e-4 for edge in edges], axis=0) if edges else np.zeros(len(p))
    )
    assert leaf.grad is not None
    slope = by_slope(name, p, q, a, config)
    np.testing.assert_allclose(leaf.grad[at_edge == 0], slope[at_edge == 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@given(triples)
def test_targets_called_inactive_have_no_gradient(
    name: str, values: list[tuple[float, float, float]]
) -> None:
    p, q, a = np.array(values).T
    a[::2] = 0
    loss = find_loss(name)
    arrays = {key: {"weights": a, "advantages": a, "logprobs": q}[key] for key in loss.inputs}
    leaf = torch.tensor(p, requires_grad=True)
    loss.per_token(
        leaf, {k: torch.tensor(v) for k, v in arrays.items()}, loss.settings(name, None)
    ).sum().backward()
    assert leaf.grad is not None
    assert not leaf.grad[~torch.tensor(loss.active(arrays))].any()


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("ppo", {"clip": 0.2}, r"Unknown loss_fn_config keys \['clip'\].*clip_high_threshold"),
        ("importance_sampling", {"beta": 1.0}, r"allowed: \['temperature'\]"),
        ("cross_entropy", {"temperature": 0}, "above 0"),
        ("ppo", {"temperature": 0.0}, "above 0"),
        ("ppo", {"clip_low_threshold": 1.3}, "above"),
        ("dro", {"beta": -1.0}, "at least 0"),
        ("dro", {"beta": "0.1"}, "must be a number"),
        ("cispo", {"clip_high_threshold": float("nan")}, "at least 0"),
    ],
)
def test_settings_a_loss_does_not_have_are_refused(name: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_loss(name).settings(name, config)


def test_an_unknown_loss_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'gspo' is not one of \['cispo'"):
        find_loss("gspo")


def datum(tokens: list[int], **inputs: Any) -> tinker.Datum:
    return tinker.Datum(model_input=ints(tokens), loss_fn_inputs=inputs)


def tensor(values: Any) -> tinker.TensorData:
    return tinker.TensorData.from_numpy(np.asarray(values))


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("cross_entropy", datum([1, 2], weights=[1.0, 1.0]), r"missing \['target_tokens'\]"),
        (
            "ppo",
            datum([1, 2], target_tokens=[1, 2], weights=[1.0, 1.0]),
            r"missing \['advantages', 'logprobs'\]",
        ),
        (
            "cross_entropy",
            datum([1, 2], target_tokens=[1, 2], masks=tensor([1.0, 1.0])),
            r"unknown \['masks'\]",
        ),
        ("cross_entropy", datum([1, 2], target_tokens=[1]), "must have shape"),
        ("cross_entropy", datum([], target_tokens=tensor(np.zeros(0, dtype=np.int64))), "at least 1"),
        ("cross_entropy", datum([1, 2], target_tokens=[1, 2], weights=[1.0]), r"weights must be .* \[2\]"),
        ("cross_entropy", datum([1, 2], target_tokens=[1, 9]), "ids from 1 to 9"),
        ("cross_entropy", datum([-1, 2], target_tokens=[1, 2]), "ids from -1"),
        ("cross_entropy", datum([1] * 9, target_tokens=[1] * 9), "9 tokens; the model holds 8"),
        (
            "ppo",
            datum(
                [1],
                target_tokens=tensor([[1, 2]]),
                logprobs=tensor([[0.0, 0.0]]),
                advantages=tensor([[1.0, 1.0]]),
            ),
            r"must have shape \[N\]",
        ),
        (
            "ppo",
            datum([1], target_tokens=[1], logprobs=[float("nan")], advantages=[1.0]),
            "logprobs must be finite.* 1 values that are not finite",
        ),
        (
            "importance_sampling",
            datum([1], target_tokens=[1], logprobs=[-1.0], advantages=[float("nan")]),
            "advantages must be finite.* 1 values that are not finite",
        ),
    ],
)
def test_data_a_loss_does_not_take_are_refused_with_their_number(
    name: str, wrong: tinker.Datum, message: str
) -> None:
    right = datum([1], target_tokens=[1], **{key: [0.0] for key in LOSSES[name].inputs})
    with pytest.raises(ValueError, match=f"Datum 1.*{message}"):
        make_examples([right, wrong], LOSSES[name], name, vocab_size=9, context_length=8)


def test_no_data_are_refused() -> None:
    with pytest.raises(ValueError, match="No data"):
        make_examples([], LOSSES["ppo"], "ppo", 9, 8)


@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.booleans(), st.sampled_from([(), (2,), (3,)])),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 100),
)
def test_micro_batches_hold_every_example_once_within_the_budget(
    kinds: list[tuple[int, bool, tuple[int, ...]]], budget: int
) -> None:
    examples = [
        DatumArrays(
            tokens=np.zeros(size, dtype=np.int64),
            targets=np.zeros((size, *candidates), dtype=np.int64),
            inputs={},
            active=np.full((size, *candidates), active),
            wanted=np.ones((size, *candidates), dtype=bool),
        )
        for size, active, candidates in kinds
    ]
    batches = micro_batches(examples, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(kinds)))
    for batch in batches:
        assert len({kinds[index][1] for index in batch}) == 1
        assert len(batch) == 1 or len(batch) * max(kinds[index][0] for index in batch) <= budget


def test_a_loss_of_your_own_that_fails_fails_the_next_step(
    service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    client = service.create_lora_training_client(model_dir("llama"), rank=2, seed=0)
    data = [supervised([1, 2, 3])]
    client.forward_backward(data, "cross_entropy")
    failing = client.forward_backward_custom(data, lambda data, rows: (rows[0].sum() * (1 / len([])), {}))
    step = client.optim_step(tinker.AdamParams(learning_rate=0.1))
    with pytest.raises(ZeroDivisionError):
        failing.result()
    with pytest.raises(
        RuntimeError, match=r"a forward_backward since the last step failed.*ZeroDivisionError"
    ):
        step.result()


def test_logprobs_and_slopes_of_a_large_vocabulary_are_exact() -> None:
    """By a float64 softmax; torch's in float32 is off by up to 1e-4 at the vocabulary of Gemma."""
    torch.manual_seed(0)
    logits = (4 * torch.randn(4, 262_144)).requires_grad_()
    targets = torch.arange(4)[:, None]
    logprobs = _TargetLogprobs.apply(logits, targets)
    (gradient,) = torch.autograd.grad(logprobs.sum(), logits)
    exact = logits.detach().double()
    torch.testing.assert_close(logprobs, exact.log_softmax(1).gather(1, targets).float(), rtol=0, atol=1e-5)
    one_hot = torch.zeros_like(exact).scatter_(1, targets, 1.0)
    torch.testing.assert_close(gradient, (one_hot - exact.softmax(1)).float(), rtol=2e-5, atol=1e-9)


TEXTS = [list(b"The answer is 42."), list(b"No, it is 7, because 3 + 4 = 7.")]


def masked(datum: tinker.Datum, mask: list[float], *names: str) -> tuple[tinker.Datum, tinker.Datum]:
    """The datum with a mask, and the same with what the loss reads set to 0 in its place."""
    inputs = dict(datum.loss_fn_inputs)
    zeroed = {name: inputs[name].to_numpy() * np.array(mask, dtype=np.float32) for name in names}
    return (
        tinker.Datum(
            model_input=datum.model_input, loss_fn_inputs=inputs | {"mask": np.array(mask, dtype=np.float32)}
        ),
        tinker.Datum(model_input=datum.model_input, loss_fn_inputs=inputs | zeroed),
    )


@pytest.mark.parametrize(("family", "trees"), [("llama", True), ("llama", False)])
@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo"])
def test_masked_targets_have_no_loss_and_no_logprob(
    name: str, family: str, trees: bool, service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    found: list[torch.Tensor] = []
    outputs: list[tinker.ForwardBackwardOutput] = []
    mask = [0.0] * 6 + [1.0, 0.0] * 5
    texts = [[*TEXTS[0][:12], 9, 8, 7, 6, number] for number in range(3)]  # they share a beginning
    if name == "cross_entropy":
        pairs = [masked(supervised(text, [1.0] * 16), mask, "weights") for text in texts]
    else:
        pairs = [masked(policy_datum(text, seed), mask, "advantages") for seed, text in enumerate(texts)]
    for data in zip(*pairs, strict=True):
        client = service.create_lora_training_client(model_dir(family), rank=2, seed=0)
        client._policy.base = replace(client._policy.base, takes_trees=trees)
        train(client, TEXTS, steps=1)
        outputs.append(client.forward_backward(list(data), name).result())
        found.append(torch.cat([gradient.flatten() for gradient in gradients(client).values()]))
    assert found[0].any()
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)
    assert outputs[0].metrics["loss:sum"] == pytest.approx(outputs[1].metrics["loss:sum"], rel=1e-5)
    for ours, whole in zip(outputs[0].loss_fn_outputs, outputs[1].loss_fn_outputs, strict=True):
        expected = np.where(np.array(mask) > 0, whole["logprobs"].to_numpy(), np.nan)
        np.testing.assert_allclose(ours["logprobs"].to_numpy(), expected, rtol=1e-5)
        assert not ours["elementwise_loss"].to_numpy()[np.array(mask) == 0].any()


def test_only_targets_that_no_mask_hides_cost_logits(
    service: LocalServiceClient, model_dir: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[int] = []

    def spy(module: Any, hidden: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
        places.append(len(hidden))
        return target_logprobs(module, hidden, targets, temperature)

    monkeypatch.setattr("viva.engine.losses.target_logprobs", spy)
    client = service.create_lora_training_client(model_dir("llama"), rank=2, seed=0)
    datum, _ = masked(policy_datum(TEXTS[0]), [0.0] * 9 + [1.0] * (len(TEXTS[0]) - 10))
    client.forward_backward([datum], "importance_sampling").result()
    assert sum(places) == len(TEXTS[0]) - 10


@pytest.mark.parametrize("name", NAMES)
def test_at_a_temperature_a_loss_is_that_of_a_model_whose_logits_are_divided_by_it(
    name: str, service: LocalServiceClient, model_dir: Callable[[str], str], tmp_path: Path
) -> None:
    module = AutoModelForCausalLM.from_pretrained(model_dir("llama"))
    assert not module.config.tie_word_embeddings
    with torch.no_grad():
        module.get_output_embeddings().weight.div_(0.5)
    module.save_pretrained(tmp_path)
    for file in Path(model_dir("llama")).glob("token*"):
        shutil.copy(file, tmp_path)
    data = [supervised(TEXTS[0]) if name == "cross_entropy" else policy_datum(TEXTS[0])]
    found = []
    for folder, config in ((model_dir("llama"), {"temperature": 0.5}), (str(tmp_path), None)):
        client = service.create_lora_training_client(folder, rank=2, seed=0, train_unembed=False)
        loss = client.forward_backward(data, name, config).result().metrics["loss:sum"]
        found.append((loss, gradients(client)))
    (loss, own), (expected, its) = found
    assert loss == pytest.approx(expected, rel=3e-6)
    assert own.keys() == its.keys()
    for key in own:
        np.testing.assert_allclose(own[key], its[key], rtol=1e-3, atol=1e-5)
    plain = service.create_lora_training_client(model_dir("llama"), rank=2, seed=0, train_unembed=False)
    assert plain.forward_backward(data, name).result().metrics["loss:sum"] != pytest.approx(loss, rel=3e-5)


def test_data_that_are_masked_whole_push_nothing(
    service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    client = service.create_lora_training_client(model_dir("llama"), rank=2, seed=0)
    num = len(TEXTS[0]) - 1
    datum, _ = masked(policy_datum(TEXTS[0]), [0.0] * num)
    output = client.forward_backward([datum], "dro").result()
    assert np.isnan(output.loss_fn_outputs[0]["logprobs"].to_numpy()).all()
    assert output.metrics["loss:sum"] == 0
    assert client.optim_step(tinker.AdamParams(learning_rate=0.1)).result().metrics == {"grad_norm": 0.0}
    wrong, _ = masked(policy_datum(TEXTS[0]), [1.0] * (num - 1) + [float("nan")])
    with pytest.raises(ValueError, match="mask must be finite"):
        client.forward_backward([wrong], "ppo")
