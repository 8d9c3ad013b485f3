"""Rows of several adapters in one batch: each is computed by its own, over one copy of the base's weights."""

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_engine import FAMILIES, ints, params, plain_logprobs, run, supervised, train

from viva.engine import LocalServiceClient
from viva.engine.adapters import Adapter, AdapterRows

TEXTS = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 8, 7, 6, 5]]


def opened(service: LocalServiceClient, model: str) -> list[Any]:
    """Trained adapters of two ranks and of one kind of layer, and the base itself."""
    settings = [{"rank": 2}, {"rank": 4}, {"rank": 3, "train_mlp": False, "train_unembed": False}]
    samplers: list[Any] = []
    for seed, options in enumerate(settings):
        trainer = service.create_lora_training_client(model, seed=seed, **options)
        train(trainer, [TEXTS[seed % 2]], learning_rate=0.05)
        samplers.append(trainer.save_weights_and_get_sampling_client())
    return [*samplers, service.create_sampling_client(base_model=model)]


def ask(samplers: Sequence[Any], calls: Sequence[tuple[int, list[int], int]]) -> list[tinker.SampleResponse]:
    """Answers to all calls (which sampler, prompt, samples), asked at once."""

    async def program() -> list[tinker.SampleResponse]:
        return list(
            await asyncio.gather(
                *(
                    samplers[who].sample(ints(prompt), number, params(seed=seed), True).result_async()
                    for seed, (who, prompt, number) in enumerate(calls)
                )
            )
        )

    return run(program())


def assert_same(ours: Sequence[tinker.SampleResponse], theirs: Sequence[tinker.SampleResponse]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        for one, two in zip(mine.sequences, other.sequences, strict=True):
            assert one.tokens == two.tokens
            np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-4)
        np.testing.assert_allclose(mine.prompt_logprobs[1:], other.prompt_logprobs[1:], atol=1e-4)


def calls_of(dice: random.Random, count: int, num_samplers: int = 4) -> list[tuple[int, list[int], int]]:
    beginning = [dice.randrange(200) for _ in range(33)]
    return [
        (
            dice.randrange(num_samplers),
            beginning[: dice.choice([0, 16, 33])]
            + [dice.randrange(200) for _ in range(dice.randrange(1, 6))],
            dice.choice([1, 2, 3]),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_several_adapters_gives_what_merged_copies_give(
    family: str, model_dir: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and their beginnings are those of several adapters, which must share no keys."""
    monkeypatch.setattr("viva.engine.sequences.LEAST_GAIN", 1)
    calls = calls_of(random.Random(1), 24)
    together, apart = (
        opened(LocalServiceClient(device="cpu", shared_batch=is_shared), model_dir(family))
        for is_shared in (True, False)
    )
    found = ask(together, calls)
    assert_same(found, ask(apart, calls))
    together[0]._source.result().decoder.forget()
    alone = [
        together[who].sample(ints(prompt), number, params(seed=seed), True).result()
        for seed, (who, prompt, number) in enumerate(calls)
    ]
    assert_same(found, alone)


@pytest.fixture(scope="module")
def shared(model_dir: Callable[[str], str]) -> tuple[list[Any], list[Any]]:
    model = model_dir("llama")
    service, own = (LocalServiceClient(device="cpu", shared_batch=each) for each in (True, False))
    return opened(service, model), opened(own, model)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(split=st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_greedy_rows_are_those_of_each_adapter_alone_however_they_are_split(
    split: list[int], shared: tuple[list[Any], list[Any]]
) -> None:
    greedy = params(temperature=0, max_tokens=5)
    together, apart = shared

    async def program() -> list[tinker.SampleResponse]:
        calls = [together[who].sample(ints([7, row, 3]), 1, greedy) for row, who in enumerate(split)]
        return list(await asyncio.gather(*(call.result_async() for call in calls)))

    for row, (who, response) in enumerate(zip(split, run(program()), strict=True)):
        alone = apart[who].sample(ints([7, row, 3]), 1, greedy).result().sequences[0]
        assert response.sequences[0].tokens == alone.tokens
        np.testing.assert_allclose(response.sequences[0].logprobs, alone.logprobs, atol=1e-4)


def test_the_comparison_fails_if_rows_have_one_anothers_adapters(
    shared: tuple[list[Any], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rightly = AdapterRows.set
    calls = [(who, [5, 4, 3, 2, 1], 1) for who in (0, 1, 2, 3)]
    expected = ask(shared[1], calls)
    assert_same(ask(shared[0], calls), expected)
    for sampler in shared[0]:
        sampler._source.result().decoder.forget()

    def turned(rows: AdapterRows, adapters: Sequence[Adapter]) -> None:
        rightly(rows, [*adapters[1:], *adapters[:1]])

    monkeypatch.setattr(AdapterRows, "set", turned)
    with pytest.raises(AssertionError):
        assert_same(ask(shared[0], calls), expected)


def test_adapters_and_the_base_share_one_decoder_and_one_copy_of_the_weights(
    shared: tuple[list[Any], list[Any]],
) -> None:
    for samplers, decoders in zip(shared, (1, 4), strict=True):
        assert len({id(sampler._source.result().decoder) for sampler in samplers}) == decoders
    ask(shared[0], [(who, [1, 2], 1) for who in range(4)])
    assert len(shared[0][0]._core._copies) == 1


def test_all_rows_of_all_adapters_take_one_pass_through_the_base(
    shared: tuple[list[Any], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = shared[0][0]._source.result().decoder
    decoder.forget()
    rows: list[int] = []
    forward = decoder._steps.forward

    def counting(*given: Any, tokens: Sequence[int], **where: Any) -> Any:
        rows.append(len(tokens))
        return forward(*given, tokens=tokens, **where)

    monkeypatch.setattr(decoder._steps, "forward", counting)
    ask(shared[0], [(who, [1, 2, 3], 2) for who in range(4)])
    assert rows == [8] * 7


def test_a_sampler_stays_what_it_was_and_has_the_trainers_logprobs(
    model_dir: Callable[[str], str], tmp_path: Path
) -> None:
    service = LocalServiceClient(device="cpu", shared_batch=True, state_dir=tmp_path)
    trainers = [service.create_lora_training_client(model_dir("qwen3"), rank=4, seed=seed) for seed in (0, 1)]
    seen: list[tuple[Any, list[float]]] = []
    for _ in range(3):
        for trainer in trainers:
            train(trainer, [TEXTS[0]], steps=1, learning_rate=0.05)
            output = trainer.forward([supervised(TEXTS[0])], "cross_entropy").result().loss_fn_outputs[0]
            seen.append((trainer.save_weights_and_get_sampling_client(), output["logprobs"].data))
        futures = [sampler.compute_logprobs(ints(TEXTS[0])) for sampler, _ in seen]
        for future, (_, logprobs) in zip(futures, seen, strict=True):
            np.testing.assert_allclose(future.result()[1:], logprobs, atol=1e-4)
    assert len({tuple(logprobs) for _, logprobs in seen}) == 6


def test_a_full_set_of_weights_has_a_batch_of_its_own(
    model_dir: Callable[[str], str], plain_model: Callable[[str], Any]
) -> None:
    service = LocalServiceClient(device="cpu", shared_batch=True)
    trainer = service.create_lora_training_client(model_dir("llama"), rank=0)
    base = service.create_sampling_client(base_model=model_dir("llama"))
    whole = trainer.save_weights_and_get_sampling_client()
    assert whole._source.result().decoder is not base._source.result().decoder
    expected = plain_logprobs(plain_model("llama"), TEXTS[0]).numpy()
    for sampler in (whole, base):
        np.testing.assert_allclose(sampler.compute_logprobs(ints(TEXTS[0])).result()[1:], expected, atol=1e-4)


def test_an_adapter_that_is_no_number_spoils_nobody_elses_rows(model_dir: Callable[[str], str]) -> None:
    good, bad, *_ = opened(LocalServiceClient(device="cpu", shared_batch=True), model_dir("llama"))
    expected = good.sample(ints([4, 5, 6]), 1, params()).result().sequences[0].tokens
    for tensor in bad._source.result().adapter.tensors.values():
        tensor.fill_(float("nan"))
    futures = [sampler.sample(ints([4, 5, 6]), 1, params()) for sampler in (good, bad)]
    assert futures[0].result().sequences[0].tokens == expected
    with pytest.raises(FloatingPointError, match="not finite"):
        futures[1].result()


def test_torch_computes_what_the_kernel_does(
    shared: tuple[list[Any], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_of(random.Random(2), 12)
    found = ask(shared[0], calls)
    decoder = shared[0][0]._source.result().decoder
    decoder.forget()
    decoder._rows.set([])
    monkeypatch.setattr("viva.engine.adapters.can_compile", lambda tensor: False)
    assert_same(ask(shared[0], calls), found)
    decoder._rows.set([])
