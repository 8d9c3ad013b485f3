"""Random programs of agents under all limits, and keys of other weights."""

import asyncio
import itertools
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tiny_engine import ints, params, run, supervised, train

from viva.engine import EngineLimits, LocalSamplingClient, LocalServiceClient, decoder
from viva.engine.requests import block_digests
from viva.engine.sequences import PrefixCache, SequenceTable

Call = tuple[list[int], int, dict[str, Any]]


@pytest.fixture(scope="module")
def alone(model_dir: Callable[[str], str]) -> Callable[[str], LocalSamplingClient]:
    """Samplers that reuse nothing, asked one request at a time."""
    service = LocalServiceClient(device="cpu", limits=EngineLimits(prefix_cache_bytes=0))
    return lambda family: service.create_sampling_client(base_model=model_dir(family))


async def agent(
    client: LocalSamplingClient, dice: random.Random, opening: list[int]
) -> list[tuple[Call, tinker.SampleResponse]]:
    """A conversation: prompts that extend one another, several samples, now and then a cancelled request."""
    history, seen = list(opening), list[tuple[Call, tinker.SampleResponse]]()
    for _ in range(dice.randrange(1, 4)):
        for _ in range(dice.randrange(40)):
            await asyncio.sleep(0)
        history = history + [dice.randrange(200) for _ in range(dice.randrange(1, 6))]
        call = (
            history,
            dice.choice([1, 1, 2, 4]),
            {"max_tokens": dice.randrange(1, 12), "seed": dice.randrange(5)},
        )
        future = client.sample(ints(call[0]), call[1], params(**call[2]), dice.random() < 0.3)
        if dice.random() < 0.15:
            waiting = asyncio.create_task(future.result_async())
            await asyncio.sleep(0)
            waiting.cancel()
            continue
        response = await future
        seen.append((call, response))
        history = history + response.sequences[0].tokens
    return seen


@pytest.mark.parametrize("family", ["gemma2", "mistral", "qwen3"])
@pytest.mark.parametrize("trial", range(6))
def test_any_program_gets_what_each_of_its_requests_gets_alone(
    family: str,
    trial: int,
    model_dir: Callable[[str], str],
    alone: Callable[[str], LocalSamplingClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("viva.engine.sequences.LEAST_GAIN", [1, 1, 1024][trial % 3])
    dice = random.Random(trial)
    limits = EngineLimits(
        decode_rows=dice.choice([1, 2, 5, 64]),
        prefill_tokens=dice.choice([8, 64, 4096]),
        prefix_cache_bytes=dice.choice([0, 5000, 2**28]),
        logits=dice.choice([300, 2**25]),
    )
    client = LocalServiceClient(device="cpu", limits=limits).create_sampling_client(
        base_model=model_dir(family)
    )
    openings = [[dice.randrange(200) for _ in range(size)] for size in (5, 33, 50)]

    async def program() -> list[list[tuple[Call, tinker.SampleResponse]]]:
        agents = [agent(client, dice, dice.choice(openings)) for _ in range(6)]
        return list(await asyncio.gather(*agents))

    reference = alone(family)
    for (prompt, number, settings), response in itertools.chain(*run(program())):
        expected = reference.sample(ints(prompt), number, params(**settings), True).result()
        for ours, theirs in zip(response.sequences, expected.sequences, strict=True):
            assert ours.tokens == theirs.tokens
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
        if response.prompt_logprobs is not None:
            np.testing.assert_allclose(
                response.prompt_logprobs[1:], (expected.prompt_logprobs or [])[1:], atol=1e-4
            )
    while client._core.pump.run_unit():
        pass  # what was cancelled leaves
    decoder = client._source.result().decoder
    assert not decoder.has_work()
    assert not decoder._running.sequences
    assert decoder._running._stored.num_bytes <= limits.prefix_cache_bytes
    assert decoder._running.cache.num_bytes <= limits.prefix_cache_bytes


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_a_seed_gives_the_same_tokens_in_any_of_a_hundred_batches(
    family: str,
    model_dir: Callable[[str], str],
    alone: Callable[[str], LocalSamplingClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("viva.engine.sequences.LEAST_GAIN", 1)
    dice = random.Random(0)
    client = LocalServiceClient(device="cpu").create_sampling_client(base_model=model_dir(family))
    openings = [[], *([dice.randrange(200) for _ in range(size)] for size in (17, 40))]
    calls: list[Call] = []
    for seed in range(12):
        prompt = openings[seed % 3] + [dice.randrange(200) for _ in range(dice.randrange(1, 9))]
        calls.append((prompt, dice.choice([1, 2, 3]), {"max_tokens": dice.randrange(1, 8), "seed": seed}))
    expected = [
        alone(family).sample(ints(prompt), number, params(**settings)).result()
        for prompt, number, settings in calls
    ]
    for _ in range(100):
        if dice.random() < 0.5:
            client._source.result().decoder.forget()
        batch = dice.choices(range(len(calls)), k=dice.randrange(1, 8))
        futures = [client.sample(ints(calls[i][0]), calls[i][1], params(**calls[i][2])) for i in batch]
        for index, future in zip(batch, futures, strict=True):
            for ours, theirs in zip(future.result().sequences, expected[index].sequences, strict=True):
                assert ours.tokens == theirs.tokens


def test_rows_that_begin_alike_hold_one_copy_of_their_beginning(
    service: LocalServiceClient, model_dir: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("viva.engine.sequences.LEAST_GAIN", 1)
    client = service.create_sampling_client(base_model=model_dir("qwen3"))
    decoder, shared = client._source.result().decoder, list(range(36))
    client.sample(ints([*shared, 1]), 1, params(max_tokens=30))
    decoder.run_unit()
    decoder.run_unit()
    (first,) = decoder._running.sequences
    assert (first.prefix, first.num_own) == (None, 38)
    client.sample(ints([*shared, 2]), 1, params(max_tokens=30))
    decoder.run_unit()
    assert [row.num_own for row in decoder._running.sequences] == [6, 5]  # 32 tokens, four blocks, are shared
    client.sample(ints([*shared, 3]), 3, params(max_tokens=30))
    decoder.run_unit()
    rows = decoder._running.sequences
    assert [row.num_own for row in rows] == [6, 5, 5, 5, 5]
    assert len({id(row.prefix) for row in rows}) == 1
    prefix = weakref.ref(rows[-1].prefix)
    while decoder.has_work():
        decoder.run_unit()
    del first, rows
    assert prefix() is None


def test_a_groups_prompt_is_computed_once(
    service: LocalServiceClient, model_dir: Callable[[str], str], fed: list[tuple[int, ...]]
) -> None:
    client = service.create_sampling_client(base_model=model_dir("qwen3"))
    prompt = list(range(30))
    futures = [client.sample(ints(prompt), 5, params(max_tokens=3, seed=seed)) for seed in range(2)]
    for future in futures:
        future.result()
    assert fed == [(1, 30), (10, 1), (10, 1)]


def test_sampling_holds_no_more_logits_at_once_than_the_limit(
    model_dir: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_at_once: list[int] = []
    head_logits = decoder.head_logits

    def counting(module: Any, hidden: Any) -> Any:
        rows_at_once.append(len(hidden))
        return head_logits(module, hidden)

    monkeypatch.setattr(decoder, "head_logits", counting)
    tokens = []
    for logits in (2**20, 520):
        service = LocalServiceClient(device="cpu", limits=EngineLimits(logits=logits))
        sampler = service.create_sampling_client(base_model=model_dir("llama"))
        response = sampler.sample(ints([1, 2, 3]), 5, params(max_tokens=2)).result()
        tokens.append([sequence.tokens for sequence in response.sequences])
    assert tokens[0] == tokens[1]
    assert rows_at_once == [5, 5, 2, 2, 1, 2, 2, 1]  # a row has 260 logits


NUM_SCORED = 4
CHECKS = 20


def play(trial: int, folder: str, state_dir: Path) -> None:
    """Random operations on two adapters. After each, samplers of all ages score ends of texts they have seen before."""
    dice = random.Random(trial)
    service = LocalServiceClient(device="cpu", state_dir=state_dir)
    opening = [dice.randrange(200) for _ in range(33)]
    texts = [opening + [dice.randrange(200) for _ in range(dice.randrange(5, 20))] for _ in range(3)]
    trainers = [service.create_lora_training_client(folder, rank=2, seed=seed) for seed in range(2)]
    states: list[tuple[Any, str]] = []
    samplers: list[tuple[Any, list[np.ndarray]]] = []

    def snapshot(trainer: Any) -> None:
        outputs = (
            trainer.forward([supervised(text) for text in texts], "cross_entropy").result().loss_fn_outputs
        )
        seen = [np.array(output["logprobs"].data)[-NUM_SCORED:] for output in outputs]
        samplers.append((trainer.save_weights_and_get_sampling_client(), seen))

    for trainer in trainers:
        train(trainer, texts, learning_rate=0.05)
        snapshot(trainer)
    for check in range(CHECKS):
        trainer = dice.choice(trainers)
        if check % 4 == 3:
            match dice.choice(["step", "save", "load"] if states else ["step", "save"]):
                case "step":
                    train(trainer, [dice.choice(texts)], steps=2, learning_rate=0.05)
                case "save":
                    states.append((trainer, trainer.save_state(f"{check}").result().path))
                case _:
                    trainer, path = dice.choice(states)
                    trainer.load_state(path).result()
            snapshot(trainer)
        (sampler, seen), index = dice.choice(samplers), dice.randrange(len(texts))
        response = sampler.sample(
            ints(texts[index]),
            dice.choice([1, 3]),
            params(max_tokens=2),
            include_prompt_logprobs=True,
            prompt_logprobs_last_n=NUM_SCORED,
        ).result()
        np.testing.assert_allclose(response.prompt_logprobs[-NUM_SCORED:], seen[index], atol=1e-4)


@pytest.mark.parametrize("trial", range(10))
def test_every_sampler_serves_its_own_weights(
    trial: int, model_dir: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("viva.engine.sequences.LEAST_GAIN", 1)
    play(trial, model_dir("qwen3"), tmp_path)


def test_the_check_fails_if_snapshots_are_not_kept_apart(
    model_dir: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyones = PrefixCache(2**28)
    monkeypatch.setattr(SequenceTable, "forget", lambda table: setattr(table, "_stored", everyones))
    for module in ("sampling_client", "sequences"):
        monkeypatch.setattr(
            f"viva.engine.{module}.block_digests", lambda tokens, client: block_digests(tokens)
        )
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        play(0, model_dir("qwen3"), tmp_path)
