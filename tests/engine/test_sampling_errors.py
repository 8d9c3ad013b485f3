"""Requests that fail, are cancelled or are refused: what becomes of them, and of the others."""

import asyncio
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tiny_engine import (
    ints,
    needs_targets,
    params,
    run,
    sample,
)

from viva.engine import EngineLimits, LocalSamplingClient, LocalServiceClient
from viva.engine.attention import RaggedCache
from viva.engine.sequences import SequenceTable

PROMPT = list(b"What is 2 + 3? ")


def test_a_cancelled_request_leaves_the_batch_and_the_others_alone(client: LocalSamplingClient) -> None:
    decoder = client._source.result().decoder

    async def program() -> tinker.SampleResponse:
        doomed = asyncio.create_task(client.sample_async(ints(PROMPT), 2, params(max_tokens=100)))
        kept = client.sample(ints(PROMPT), 1, params(max_tokens=50, seed=8))
        while not decoder.has_work():  # a pause of so many milliseconds may last for all tokens
            await asyncio.sleep(0)
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        return await kept

    assert run(program()).sequences[0].tokens == sample(client, PROMPT, max_tokens=50, seed=8)[0].tokens
    assert not client._core.pump.run_unit()


def test_logits_that_are_not_numbers_fail_their_request_and_are_not_remembered(
    service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    sampler = service.create_sampling_client(base_model=model_dir("llama"))
    expected = sample(sampler, PROMPT, max_tokens=4)[0].tokens
    decoder = sampler._source.result().decoder
    get_module = decoder._get_module
    broken = get_module().__class__  # the same model with one weight that is not a number
    with torch.no_grad():
        module = service._core.base_model(model_dir("llama")).decode_copy()
        assert isinstance(module, broken)
        module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.clone().fill_(float("nan")))
    decoder._get_module = lambda: module
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(sampler, PROMPT, 2)
    decoder._get_module = get_module
    assert sample(sampler, PROMPT, max_tokens=4)[0].tokens == expected


def test_a_request_of_another_thread_may_come_while_a_batch_is_chosen(
    client: LocalSamplingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Any] = []
    lookup = SequenceTable.lookup

    def submit() -> None:
        late.append(client.sample(ints([9, 9, 9]), 1, params(max_tokens=2)))

    def interrupted(table: SequenceTable, request: Any) -> Any:
        if not late:
            thread = threading.Thread(target=submit)
            thread.start()
            thread.join()
        return lookup(table, request)

    monkeypatch.setattr(SequenceTable, "lookup", interrupted)
    early = [client.sample(ints([5, 6, 7, last]), 1, params(max_tokens=2)) for last in range(2)]
    assert [len(future.result().sequences) for future in early] == [1, 1]
    assert len(late[0].result().sequences) == 1


def test_a_request_that_was_refused_takes_no_number(model_dir: Callable[[str], str]) -> None:
    def drawn(*, refused: bool) -> list[int]:
        own = LocalServiceClient(device="cpu").create_sampling_client(base_model=model_dir("qwen3"))
        if refused:
            with pytest.raises(ValueError, match="top_p"):
                own.sample(ints(PROMPT), 1, params(top_p=2.0))
        return sample(own, PROMPT, max_tokens=8)[0].tokens

    assert drawn(refused=True) == drawn(refused=False)


def test_an_error_of_one_batch_fails_its_requests_and_no_others(
    service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    sampler = service.create_sampling_client(base_model=model_dir("llama"))
    decoder = sampler._source.result().decoder
    prefill = decoder._prefill

    def failing(prompts: Any) -> bool:
        if any(len(prompt.tokens) > 40 for prompt in prompts):
            raise RuntimeError("out of memory")
        return prefill(prompts)

    decoder._prefill = failing
    decoder._limits = EngineLimits(prefill_tokens=41)
    bad = sampler.sample(ints([1] * 41), 1, params())
    good = sampler.sample(ints(PROMPT), 1, params())
    with pytest.raises(RuntimeError, match="out of memory"):
        bad.result()
    assert len(good.result().sequences[0].tokens) == 8


def test_an_error_within_a_pass_over_prompts_leaves_nothing_to_the_next_ones(
    model_dir: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = LocalServiceClient(device="cpu", limits=EngineLimits(prefill_tokens=4))
    sampler = service.create_sampling_client(base_model=model_dir("llama"))
    begin = list(range(1, 30))
    asked = [[*begin, 50 + number] for number in range(3)]
    expected = [sample(sampler, each, max_tokens=4)[0].tokens for each in asked]
    opened, failed = RaggedCache.open, list[int]()

    def failing(cache: RaggedCache, layer: int, like: torch.Tensor, heads: int, size: int) -> torch.Tensor:
        if layer == 1 and like.shape[2] > 40 and not failed:
            cache._stores[0].fill_(math.nan)  # as it is where memory ran out
            failed.append(layer)
            raise RuntimeError("out of memory")
        return opened(cache, layer, like, heads, size)

    monkeypatch.setattr(RaggedCache, "open", failing)
    bad = sampler.sample(ints([40] * 60), 1, params())
    good = [sampler.sample(ints(each), 1, params(max_tokens=4)) for each in asked]
    with pytest.raises(RuntimeError, match="out of memory"):
        bad.result()
    assert [each.result().sequences[0].tokens for each in good] == expected


def test_an_error_between_two_tokens_reaches_its_requests_and_no_others_wait_for_ever(
    service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    sampler = service.create_sampling_client(base_model=model_dir("llama"))
    expected = sample(sampler, PROMPT, max_tokens=4)[0].tokens
    decoder = sampler._source.result().decoder
    decode, calls = decoder._decode, iter(range(100))

    def failing() -> bool:
        if next(calls) == 2:
            raise RuntimeError("out of memory")
        return decode()

    decoder._decode = failing

    other = service.create_sampling_client(base_model=model_dir("llama"))

    async def program() -> list[int]:
        # awaited before the error: nobody else will ask the engine to go on
        going_on = asyncio.create_task(other.sample_async(ints(PROMPT), 1, params(max_tokens=40)))
        with pytest.raises(RuntimeError, match="out of memory"):
            await sampler.sample(ints(PROMPT), 2, params(max_tokens=50))
        async with asyncio.timeout(20):
            return list((await going_on).sequences[0].tokens)

    assert run(program())[:4] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 400}, "exceed the context"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop": [""]}, "empty string"),
        ({"stop": [999]}, "outside 0 to 259"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_once(
    client: LocalSamplingClient, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        client.sample(ints(PROMPT), 1, params(**changes))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.sample(ints([]), 1, params()), "empty"),
        (lambda c: c.sample(ints([260]), 1, params()), "token ids from 260"),
        (lambda c: c.sample(ints([1] * 256), 1, params(max_tokens=None)), "exceed the context"),
        (lambda c: c.sample(ints([1] * 300), 1, params()), "holds 256"),
        (lambda c: c.sample(ints([1]), 0, params()), "num_samples"),
        (lambda c: c.sample(ints([1]), 1, params(), prompt_alt_tokens_k=2), "prompt_alt_tokens_k"),
        (lambda c: c.sample(ints([1]), 1, params(), topk_prompt_logprobs=-1), "topk_prompt_logprobs"),
        (lambda c: c.sample(ints([1]), 1, params(), topk_sample_logprobs=-1), "topk_sample_logprobs"),
        (lambda c: c.sample(ints([1, 2]), 1, params(), prompt_logprobs_last_n=1), "include_prompt_logprobs"),
        (lambda c: c.compute_logprobs(ints([1, 2]), 2), "from 1 to 1"),
    ],
)
def test_requests_that_make_no_sense_are_refused_at_once(
    client: LocalSamplingClient, call: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(client)


@needs_targets
@pytest.mark.parametrize(
    ("ids", "message"), [([[9999]], "outside -1 to 259"), ([[1], [2]], r"shape \[1, K\]")]
)
def test_targets_that_do_not_fit_the_prompt_are_refused(
    client: LocalSamplingClient, ids: list[list[int]], message: str
) -> None:
    targets = tinker.TensorData.from_numpy(np.array(ids))
    with pytest.raises(ValueError, match=message):
        client.sample(ints([1, 2]), 1, params(), target_prompt_logprobs=targets)
