"""Targets that a mask hides: no loss, no logprob, no logits."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tiny_engine import gradients, policy_datum, supervised, train

from viva.engine import LocalServiceClient
from viva.engine.losses import target_logprobs

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
