import asyncio
import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tiny_engine import (
    FAMILIES,
    gradients,
    ints,
    params,
    plain_logprobs,
    policy_datum,
    run,
    supervised,
    train,
    weights,
)

from viva.engine import LocalServiceClient, LocalTrainingClient

TEXTS = [list(b"The answer is 42."), list(b"No, it is 7, because 3 + 4 = 7."), list(b"ok")]
STEP = tinker.AdamParams(learning_rate=0.02)


@pytest.fixture
def client(service: LocalServiceClient, model_dir: Callable[[str], str]) -> LocalTrainingClient:
    """A fresh adapter, trained a little so that both of its factors matter."""
    trainer = service.create_lora_training_client(model_dir("qwen3"), rank=4, seed=0)
    train(trainer, TEXTS)
    return trainer


def logprobs_of(output: tinker.ForwardBackwardOutput) -> list[np.ndarray]:
    return [row["logprobs"].to_numpy() for row in output.loss_fn_outputs]


def gradient_of(client: LocalTrainingClient, data: list[tinker.Datum], loss: str, **config: float) -> Any:
    """The gradient of one forward_backward, which is then dropped."""
    client.forward_backward(data, loss, config or None).result()
    found = gradients(client)
    client._policy._clear_gradients()
    return found


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_at_a_temperature_are_the_samplers(client: LocalTrainingClient, temperature: float) -> None:
    sampler = client.save_weights_and_get_sampling_client()
    prompt = TEXTS[0]
    settings = tinker.SamplingParams(max_tokens=8, temperature=temperature, seed=3, stop=[])
    (sequence,) = sampler.sample(tinker.ModelInput.from_ints(prompt), 1, settings).result().sequences
    data = [supervised([*prompt, *sequence.tokens])]
    output = client.forward(data, "cross_entropy", {"temperature": temperature}).result()
    np.testing.assert_allclose(logprobs_of(output)[0][-8:], sequence.logprobs, atol=1e-5)
    plain = logprobs_of(client.forward(data, "cross_entropy").result())[0][-8:]
    assert (temperature == 1) == bool(np.allclose(plain, sequence.logprobs, atol=1e-3))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", [0, 4])
def test_logprobs_are_those_of_plain_transformers(
    family: str,
    rank: int,
    service: LocalServiceClient,
    model_dir: Callable[[str], str],
    plain_model: Callable[[str], Any],
) -> None:
    trainer = service.create_lora_training_client(model_dir(family), rank=rank, seed=0)
    output = trainer.forward_backward([supervised(text) for text in TEXTS], "cross_entropy").result()
    for text, logprobs in zip(TEXTS, logprobs_of(output), strict=True):
        np.testing.assert_allclose(logprobs, plain_logprobs(plain_model(family), text), atol=1e-4)
    total = -sum(float(row.sum()) for row in logprobs_of(output))
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("family", ["gemma3", "llama", "qwen3"])
@pytest.mark.parametrize("rank", [0, 4])
def test_what_is_sampled_has_the_logprobs_that_training_sees(
    family: str, rank: int, service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    trainer = service.create_lora_training_client(model_dir(family), rank=rank, seed=0)
    train(trainer, TEXTS, learning_rate=0.003 if rank == 0 else 0.03)
    sampler = trainer.save_weights_and_get_sampling_client()
    for sequence in sampler.sample(ints(TEXTS[0]), 3, params(max_tokens=20)).result().sequences:
        whole = TEXTS[0] + sequence.tokens
        seen = logprobs_of(trainer.forward([supervised(whole)], "cross_entropy").result())[0]
        np.testing.assert_allclose(sequence.logprobs, seen[len(TEXTS[0]) - 1 :], atol=1e-4)
        scored = np.array(sampler.compute_logprobs(ints(whole)).result()[1:])
        np.testing.assert_allclose(scored, seen, atol=1e-4)


def test_gradients_are_those_of_a_plain_backward_pass(
    client: LocalTrainingClient, plain_model: Callable[[str], Any]
) -> None:
    """The oracle: the whole model with the adapter's product added to its weights, full logits, autograd."""
    policy = client._policy
    model = copy.deepcopy(plain_model("qwen3"))
    factors = {
        name: value.detach().clone().requires_grad_(True) for name, value in policy._parameters.items()
    }
    merged: dict[str, torch.Tensor] = {}
    for name in factors:
        layer, _, part = name.rpartition(".")
        if part == "lora_A":
            delta = 8.0 * factors[f"{layer}.lora_B"] @ factors[name]
            merged[f"{layer}.weight"] = model.get_submodule(layer).weight.detach() + delta
    data = [policy_datum(text, seed) for seed, text in enumerate(TEXTS[:2])]
    total = torch.zeros(())
    for datum, text in zip(data, TEXTS, strict=False):
        logits = torch.func.functional_call(
            model, merged, (torch.tensor([text[:-1]]),), tie_weights=False
        ).logits[0]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(text[1:])[:, None])[:, 0]
        ratio = torch.exp(chosen - datum.loss_fn_inputs["logprobs"].to_torch())
        total = total - (ratio * datum.loss_fn_inputs["advantages"].to_torch()).sum()
    total.backward()
    found = gradient_of(client, data, "importance_sampling")
    assert set(found) == set(factors)
    for name, factor in factors.items():
        assert factor.grad is not None
        scale = factor.grad.abs().max().item()
        torch.testing.assert_close(found[name], factor.grad, atol=1e-4 * scale, rtol=1e-3)


@pytest.mark.parametrize("loss", ["cross_entropy", "dro", "importance_sampling", "ppo"])
def test_gradients_are_the_slopes_of_the_loss(client: LocalTrainingClient, loss: str) -> None:
    data = [supervised(TEXTS[1])] if loss == "cross_entropy" else [policy_datum(TEXTS[1], shift=2.0)]
    found = gradient_of(client, data, loss)
    parameters = client._policy._parameters
    name = max(found, key=lambda each: found[each].norm().item())
    direction = found[name] / found[name].norm()

    def loss_at(step: float) -> float:
        with torch.no_grad():
            parameters[name].add_(direction, alpha=step)
            value = client.forward(data, loss).result().metrics["loss:sum"]
            parameters[name].sub_(direction, alpha=step)
        return value

    slope = (loss_at(2e-3) - loss_at(-2e-3)) / 4e-3
    assert slope == pytest.approx(float((found[name] * direction).sum()), rel=0.03)


def test_gradients_accumulate_as_sums(client: LocalTrainingClient) -> None:
    data = [policy_datum(text, seed) for seed, text in enumerate(TEXTS)]
    at_once = gradient_of(client, data, "importance_sampling")
    for datum in data:
        client.forward_backward([datum], "importance_sampling").result()
    one_by_one = gradients(client)
    client._policy._clear_gradients()
    twice = gradient_of(client, data + data, "importance_sampling")
    for name, value in at_once.items():
        scale = value.abs().max().item()
        torch.testing.assert_close(one_by_one[name], value, atol=1e-5 * scale, rtol=1e-4)
        torch.testing.assert_close(twice[name], 2 * value, atol=2e-5 * scale, rtol=1e-4)


def test_batch_limits_change_neither_outputs_nor_gradients(
    service: LocalServiceClient, cramped_service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    data = [policy_datum(text * 2, seed) for seed, text in enumerate(TEXTS)]
    results = []
    for each in (service, cramped_service):
        trainer = each.create_lora_training_client(model_dir("qwen3"), rank=4, seed=0)
        output = trainer.forward_backward(data, "ppo").result()
        results.append((logprobs_of(output), output.metrics["loss:sum"], gradients(trainer)))
    (logprobs, total, found), (cramped_logprobs, cramped_total, cramped_found) = results
    assert cramped_total == pytest.approx(total, rel=1e-5)
    for ours, theirs in zip(cramped_logprobs, logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    for name, value in found.items():
        torch.testing.assert_close(
            cramped_found[name], value, atol=1e-5 * max(1, value.abs().max().item()), rtol=1e-3
        )


def test_forward_adds_no_gradient_and_gives_the_same_numbers(client: LocalTrainingClient) -> None:
    data = [policy_datum(text) for text in TEXTS]
    without = client.forward(data, "ppo").result()
    assert not gradients(client)
    with_gradient = client.forward_backward(data, "ppo").result()
    client._policy._clear_gradients()
    assert without.metrics == pytest.approx(with_gradient.metrics, rel=1e-6)
    for ours, theirs in zip(without.loss_fn_outputs, with_gradient.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(ours["logprobs"].to_numpy(), theirs["logprobs"].to_numpy(), atol=1e-6)
        np.testing.assert_allclose(
            ours["elementwise_loss"].to_numpy(), theirs["elementwise_loss"].to_numpy(), atol=1e-6
        )


def test_masked_targets_cost_nothing_even_with_absurd_inputs(client: LocalTrainingClient) -> None:
    sane = policy_datum(TEXTS[1])
    absurd = {key: value.to_numpy().copy() for key, value in sane.loss_fn_inputs.items()}
    absurd["logprobs"][absurd["advantages"] == 0] = -1e30
    wild = tinker.Datum(model_input=sane.model_input, loss_fn_inputs=absurd)
    calm_gradient = gradient_of(client, [sane], "importance_sampling")
    wild_gradient = gradient_of(client, [wild], "importance_sampling")
    assert all(torch.equal(calm_gradient[name], wild_gradient[name]) for name in calm_gradient)


def test_several_candidates_per_target_are_a_weighted_sum(client: LocalTrainingClient) -> None:
    text = TEXTS[0]
    num = len(text) - 1
    generator = np.random.default_rng(0)
    candidates = generator.integers(0, 256, size=(num, 3))
    weights = generator.random((num, 3)).astype(np.float32)
    weights[:4] = 0
    dense = tinker.Datum(
        model_input=ints(text[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(candidates),
            "weights": tinker.TensorData.from_torch_sparse(torch.from_numpy(weights)),
        },
    )
    columns = [
        tinker.Datum(
            model_input=ints(text[:-1]),
            loss_fn_inputs={"target_tokens": candidates[:, k], "weights": weights[:, k]},
        )
        for k in range(3)
    ]
    output = client.forward([dense, supervised(text)], "cross_entropy").result()
    apart = logprobs_of(client.forward(columns, "cross_entropy").result())
    np.testing.assert_allclose(logprobs_of(output)[0], np.stack(apart, axis=1), atol=1e-5)
    ours, theirs = (
        gradient_of(client, [dense], "cross_entropy"),
        gradient_of(client, columns, "cross_entropy"),
    )
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=1e-5 * max(1, value.abs().max().item()), rtol=1e-3)


def test_a_custom_loss_that_repeats_a_built_in_one_has_its_gradient(client: LocalTrainingClient) -> None:
    data = [policy_datum(text, seed) for seed, text in enumerate(TEXTS)]

    def importance(
        given: list[tinker.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        terms = [
            torch.exp(row - datum.loss_fn_inputs["logprobs"].to_torch())
            * datum.loss_fn_inputs["advantages"].to_torch()
            for datum, row in zip(given, logprobs, strict=True)
        ]
        return -torch.cat(terms).sum(), {"terms": float(len(terms))}

    built_in = client.forward(data, "importance_sampling").result()
    expected = gradient_of(client, data, "importance_sampling")
    output = client.forward_backward_custom(data, importance).result()
    found = gradients(client)
    client._policy._clear_gradients()
    assert output.metrics["terms"] == 3
    assert output.metrics["loss:sum"] == pytest.approx(built_in.metrics["loss:sum"], rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, atol=1e-5 * max(1, value.abs().max().item()), rtol=1e-3
        )


def test_a_custom_loss_that_ignores_a_datum_is_refused(client: LocalTrainingClient) -> None:
    future = client.forward_backward_custom(
        [supervised(text) for text in TEXTS], lambda data, logprobs: (logprobs[0].sum(), {})
    )
    with pytest.raises(ValueError, match="datum 1"):
        future.result()


def test_training_lowers_the_loss_of_what_is_trained(
    service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    for rank, learning_rate in ((0, 0.003), (4, 0.03)):
        trainer = service.create_lora_training_client(model_dir("llama"), rank=rank, seed=0)
        data = [supervised(text) for text in TEXTS]
        before = trainer.forward(data, "cross_entropy").result().metrics["loss:sum"]
        train(trainer, TEXTS, steps=15, learning_rate=learning_rate)
        assert trainer.forward(data, "cross_entropy").result().metrics["loss:sum"] < 0.5 * before


def test_operations_are_done_in_the_order_of_their_calls_even_if_never_awaited(
    service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    def make() -> LocalTrainingClient:
        return service.create_lora_training_client(model_dir("qwen3"), rank=4, seed=3)

    data = [supervised(text) for text in TEXTS]
    patient, hasty = make(), make()
    for _ in range(3):
        patient.forward_backward(data, "cross_entropy").result()
        patient.optim_step(STEP).result()
    for _ in range(3):
        hasty.forward_backward(data, "cross_entropy")
        hasty.optim_step(STEP)
    middle = hasty.save_weights_and_get_sampling_client()
    hasty.forward_backward(data, "cross_entropy")
    hasty.optim_step(STEP)
    expected = patient.save_weights_and_get_sampling_client().compute_logprobs(ints(TEXTS[0])).result()
    assert middle.compute_logprobs(ints(TEXTS[0])).result() == expected


async def test_the_calls_of_older_and_newer_code_both_work(
    service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    trainer = await service.create_lora_training_client_async(model_dir("qwen3"), rank=2)
    assert await trainer is trainer
    data = [supervised(TEXTS[0])]
    first = await trainer.forward_backward_async(data, "cross_entropy")
    second = await trainer.optim_step_async(STEP)
    assert (await first.result_async()).metrics["loss:sum"] > 0
    assert ((await second).metrics or {})["grad_norm"] > 0
    await trainer.forward_backward_custom(data, lambda data, rows: (-rows[0].sum(), {}))
    await trainer.optim_step(STEP)
    sampler = await trainer.save_weights_and_get_sampling_client_async("name")
    assert sampler.result() is sampler
    response = await sampler.sample_async(ints(TEXTS[0]), num_samples=2, sampling_params=params(max_tokens=3))
    assert [len(s.tokens) for s in response.sequences] == [3, 3]
    assert await sampler.compute_logprobs_async(ints([1])) == [None]
    assert (await trainer.get_info_async()).lora_rank == 2
    assert (await trainer.forward_async(data, "cross_entropy")).result().metrics["loss:sum"] > 0


def test_a_step_without_a_gradient_is_refused(client: LocalTrainingClient) -> None:
    with pytest.raises(RuntimeError, match="without a gradient"):
        client.optim_step(STEP).result()


@pytest.mark.parametrize("setting", [{"learning_rate": float("nan")}, {"beta2": -1.0}, {"beta1": 1.5}])
def test_a_step_with_settings_that_make_no_sense_is_refused_when_it_is_asked_for(
    client: LocalTrainingClient, setting: dict[str, float]
) -> None:
    (name,) = setting
    with pytest.raises(ValueError, match=f"{name} must be"):
        client.optim_step(tinker.AdamParams(**setting))


def test_a_step_takes_settings_of_this_optimiser_once(client: LocalTrainingClient) -> None:
    for arguments in ({}, {"optim_params": STEP, "adam_params": STEP}):
        with pytest.raises(ValueError, match="either"):
            client.optim_step(**arguments)
    with pytest.raises(TypeError, match="AdamParams, not dict"):
        client.optim_step({"learning_rate": 1.0})  # type: ignore[arg-type]
    client.forward_backward([supervised(TEXTS[0])], "cross_entropy")
    assert client.optim_step(adam_params=STEP).result().metrics


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_numbers_that_are_not_finite_fail_before_anything_changes(
    client: LocalTrainingClient, where: str
) -> None:
    before = weights(client)
    client.forward_backward([supervised(TEXTS[0])], "cross_entropy").result()
    inputs = {"target_tokens": TEXTS[0][1:], "logprobs": [-1e30] * 16, "advantages": [1.0] * 16}
    if where == "gradient":  # each loss is finite in float32, the gradient's square is not
        inputs |= {"logprobs": [-3.0] * 16, "advantages": [1e30] * 16}
    wild = tinker.Datum(model_input=ints(TEXTS[0][:-1]), loss_fn_inputs=inputs)
    backward = client.forward_backward([wild], "importance_sampling")
    step = client.optim_step(STEP)
    if where == "loss":
        with pytest.raises(FloatingPointError, match="The loss is"):
            backward.result()
        with pytest.raises(RuntimeError, match="weights are unchanged"):
            step.result()
    else:
        backward.result()
        with pytest.raises(FloatingPointError, match="weights are unchanged"):
            step.result()
    assert all(torch.equal(value, before[name]) for name, value in weights(client).items())
    client.forward_backward([supervised(TEXTS[0])], "cross_entropy")
    client.optim_step(STEP).result()
    assert any(not torch.equal(value, before[name]) for name, value in weights(client).items())


def test_wrong_data_fail_at_once_and_leave_the_gradient_alone(client: LocalTrainingClient) -> None:
    client.forward_backward([supervised(TEXTS[0])], "cross_entropy").result()
    kept = gradients(client)
    with pytest.raises(ValueError, match="Datum 0"):
        client.forward_backward([supervised(TEXTS[0])], "ppo")
    with pytest.raises(ValueError, match="Datum 0"):
        client.forward_backward_custom(
            [tinker.Datum(model_input=ints([1]), loss_fn_inputs={})], lambda data, rows: (rows[0].sum(), {})
        )
    assert all(torch.equal(value, gradients(client)[name]) for name, value in kept.items())
    client._policy._clear_gradients()


def test_the_base_model_is_never_written_to(
    service: LocalServiceClient, model_dir: Callable[[str], str], plain_model: Callable[[str], Any]
) -> None:
    for rank in (0, 4):
        trainer = service.create_lora_training_client(model_dir("qwen3"), rank=rank, seed=0)
        train(trainer, TEXTS)
        trainer.save_weights_and_get_sampling_client().sample(ints(TEXTS[0]), 1, params()).result()
    original = dict(plain_model("qwen3").named_parameters())
    for name, parameter in service._core.base_model(model_dir("qwen3")).module.named_parameters():
        assert torch.equal(parameter, original[name])


def test_what_a_client_says_about_itself(
    client: LocalTrainingClient, model_dir: Callable[[str], str]
) -> None:
    info = client.get_info()
    assert (info.model_name, info.is_lora, info.lora_rank) == (model_dir("qwen3"), True, 4)
    assert info.model_data.arch == "Qwen3ForCausalLM"
    assert (
        client.get_tokenizer().encode("hi") == list(b"hi")
        or client.get_tokenizer().decode(client.get_tokenizer().encode("hi")) == "hi"
    )


def test_two_async_programs_give_the_same_bits(model_dir: Callable[[str], str]) -> None:
    async def program(jitter: float) -> list[Any]:
        service = LocalServiceClient(device="cpu", seed=4)
        trainer = await service.create_lora_training_client_async(model_dir("qwen3"), rank=4)
        history: list[Any] = []

        async def agent(sampler: Any, number: int) -> tuple[list[int], list[float]]:
            tokens, logprobs = list(TEXTS[number % 3]), list[float]()
            for turn in range(3):
                if jitter:
                    time.sleep(jitter * ((number * 7 + turn) % 5))
                response = await sampler.sample(ints(tokens), 1, params(max_tokens=3 + number, seed=None))
                tokens += response.sequences[0].tokens
                logprobs += response.sequences[0].logprobs or []
            return tokens, logprobs

        for _ in range(2):
            sampler = await trainer.save_weights_and_get_sampling_client_async()
            results = await asyncio.gather(*(agent(sampler, number) for number in range(6)))
            backward = trainer.forward_backward(
                [supervised(tokens) for tokens, _ in results], "cross_entropy"
            )
            step = trainer.optim_step(STEP)
            history += [results, (await backward).metrics, (await step).metrics]
        return history

    assert run(program(0)) == run(program(0.002))


def test_data_that_push_nothing_have_a_gradient_of_zero(
    service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    text = list(b"nothing to learn")
    first, second = (
        service.create_lora_training_client(model_dir("qwen3"), rank=4, seed=0) for _ in range(2)
    )
    for client in (first, second):
        train(client, [text], steps=1)
    settings = tinker.AdamParams(learning_rate=0.03)
    first.forward_backward([supervised(text, [0.0] * (len(text) - 1))], "cross_entropy")
    assert first.optim_step(settings).result().metrics["grad_norm"] == 0.0
    # the step is one of momentum, as with any gradient
    data = [supervised(text)]
    moved, still = (
        client.forward(data, "cross_entropy").result().metrics["loss:sum"] for client in (first, second)
    )
    assert moved != still
