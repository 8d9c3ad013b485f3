import asyncio
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engine import (
    EOS,
    IM_END,
    ints,
    make_tokenizer,
    needs_targets,
    params,
    plain_logprobs,
    run,
    sample,
    train,
)

from viva.engine import LocalSamplingClient, LocalServiceClient

PROMPT = list(b"What is 2 + 3? ")


@pytest.fixture(scope="module")
def plain(plain_model: Callable[[str], Any]) -> Any:
    return plain_model("qwen3")


@pytest.mark.parametrize("family", ["gemma3", "llama", "mistral", "qwen3"])
def test_greedy_tokens_are_those_of_generate(
    family: str,
    service: LocalServiceClient,
    model_dir: Callable[[str], str],
    plain_model: Callable[[str], Any],
) -> None:
    sampler = service.create_sampling_client(base_model=model_dir(family))
    expected = plain_model(family).generate(
        torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(PROMPT) :]
    assert sample(sampler, PROMPT, max_tokens=20, temperature=0)[0].tokens == expected.tolist()


def test_logprobs_are_those_of_plain_transformers(client: LocalSamplingClient, plain: Any) -> None:
    for sequence in sample(client, PROMPT, 3, max_tokens=15):
        expected = plain_logprobs(plain, PROMPT + sequence.tokens)[len(PROMPT) - 1 :]
        np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)


def test_logprobs_are_those_of_the_tempered_and_truncated_distribution(
    client: LocalSamplingClient, plain: Any
) -> None:
    sequence = sample(client, PROMPT, temperature=0.7, top_k=4, max_tokens=10)[0]
    for position, (token, logprob) in enumerate(zip(sequence.tokens, sequence.logprobs or [], strict=True)):
        with torch.no_grad():
            logits = plain(torch.tensor([PROMPT + sequence.tokens[:position]])).logits[0, -1] / 0.7
        kept = logits.topk(4)
        assert token in kept.indices
        assert logprob == pytest.approx(float(logits[token] - kept.values.logsumexp(0)), abs=1e-4)


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 1.5}, {"top_p": 0.6}, {"top_k": 3, "temperature": 0.8}]
)
def test_first_tokens_occur_as_often_as_the_model_says(
    client: LocalSamplingClient, plain: Any, changes: dict[str, Any]
) -> None:
    num = 2000
    counts = Counter(s.tokens[0] for s in sample(client, PROMPT, num, max_tokens=1, seed=5, **changes))
    with torch.no_grad():
        logits = plain(torch.tensor([PROMPT])).logits[0, -1].double() / changes.get("temperature", 1.0)
    values, order = logits.softmax(-1).sort(descending=True)
    kept = (values.cumsum(0) - values < changes.get("top_p", 1.0)).sum().item()
    kept = min(kept, changes.get("top_k", 10**9))
    expected = dict(
        zip(order[:kept].tolist(), (values[:kept] / values[:kept].sum() * num).tolist(), strict=True)
    )
    assert set(counts) <= set(expected)
    common = [token for token, value in expected.items() if value >= 5]
    rest = num - sum(expected[token] for token in common)
    statistic = sum((counts[token] - expected[token]) ** 2 / expected[token] for token in common)
    if rest > 1:
        statistic += (num - sum(counts[token] for token in common) - rest) ** 2 / rest
    degrees = max(1, len(common) - (rest <= 1))
    limit = degrees * (1 - 2 / (9 * degrees) + 4 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < limit


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.integers(1, 45), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=12)
)
def test_a_batch_of_many_gives_what_each_request_gets_alone(
    client: LocalSamplingClient, requests: list[tuple[int, int, int]]
) -> None:
    prompts = [[(7 * seed + 3 * i) % 256 for i in range(size)] for size, _, seed in requests]

    async def together() -> list[tinker.SampleResponse]:
        calls = [
            client.sample(ints(prompt), 1, params(max_tokens=length, seed=seed))
            for prompt, (_, length, seed) in zip(prompts, requests, strict=True)
        ]
        return list(await asyncio.gather(*calls))

    for prompt, (_, length, seed), response in zip(prompts, requests, run(together()), strict=True):
        alone = sample(client, prompt, max_tokens=length, seed=seed)[0]
        assert response.sequences[0].tokens == alone.tokens
        np.testing.assert_allclose(response.sequences[0].logprobs, alone.logprobs, atol=1e-5)


def test_a_request_that_joins_in_the_middle_changes_nothing_for_the_others(
    client: LocalSamplingClient,
) -> None:
    first = client.sample(ints(PROMPT), 2, params(max_tokens=30, seed=1))
    for _ in range(9):
        assert client._core.pump.run_unit()
    second = client.sample(ints(PROMPT[3:]), 2, params(max_tokens=6, seed=2))
    for sequence, alone in zip(
        first.result().sequences, sample(client, PROMPT, 2, max_tokens=30, seed=1), strict=True
    ):
        assert sequence.tokens == alone.tokens
        np.testing.assert_allclose(sequence.logprobs, alone.logprobs, atol=1e-5)
    alone = sample(client, PROMPT[3:], 2, max_tokens=6, seed=2)
    assert [s.tokens for s in second.result().sequences] == [s.tokens for s in alone]


def test_small_limits_give_the_same_samples(
    client: LocalSamplingClient, cramped_service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    cramped = cramped_service.create_sampling_client(base_model=model_dir("qwen3"))
    prompts = [PROMPT, PROMPT[:9], PROMPT * 4, [*PROMPT, 1, 2, 3]]

    async def ask(sampler: LocalSamplingClient) -> list[tinker.SampleResponse]:
        return list(
            await asyncio.gather(*(sampler.sample(ints(p), 5, params(max_tokens=7)) for p in prompts))
        )

    for ours, theirs in zip(run(ask(cramped)), run(ask(client)), strict=True):
        assert [s.tokens for s in ours.sequences] == [s.tokens for s in theirs.sequences]


def test_samples_of_a_request_differ_and_do_not_depend_on_their_number(client: LocalSamplingClient) -> None:
    few, many = sample(client, PROMPT, 2, max_tokens=12), sample(client, PROMPT, 5, max_tokens=12)
    assert [s.tokens for s in few] == [s.tokens for s in many[:2]]
    assert len({tuple(s.tokens) for s in many}) == 5
    if hasattr(many[0], "sequence_id"):  # newer versions of the SDK
        assert len({s.sequence_id for s in many}) == 5


def test_requests_without_a_seed_differ_from_one_another_but_not_between_runs(
    model_dir: Callable[[str], str],
) -> None:
    def draw(seed: int) -> list[list[int]]:
        sampler = LocalServiceClient(device="cpu", seed=seed).create_sampling_client(
            base_model=model_dir("llama")
        )
        return [sample(sampler, PROMPT, seed=None, max_tokens=12)[0].tokens for _ in range(2)]

    first = draw(0)
    assert first[0] != first[1]
    assert draw(0) == first
    assert draw(1) != first


def test_stop_ids_end_a_sample_and_belong_to_it(client: LocalSamplingClient) -> None:
    free = sample(client, PROMPT, max_tokens=30, seed=3)[0].tokens
    stop = free[11]
    first = free.index(stop)
    sequence = sample(client, PROMPT, max_tokens=30, seed=3, stop=[stop])[0]
    assert (sequence.tokens, sequence.stop_reason) == (free[: first + 1], "stop")
    last = sample(client, PROMPT, max_tokens=first + 1, seed=3, stop=[stop])[0]
    assert last.stop_reason == "stop"
    assert sample(client, PROMPT, max_tokens=first, seed=3, stop=[stop])[0].stop_reason == "length"


@pytest.mark.parametrize("as_list", [False, True])
def test_stop_strings_end_a_sample_where_their_last_token_falls(
    client: LocalSamplingClient, as_list: bool
) -> None:
    tokenizer = make_tokenizer()
    free = sample(client, PROMPT, max_tokens=40, seed=4)[0].tokens
    for start in range(5, 30):
        stop = tokenizer.decode(free[start : start + 3])
        if "\ufffd" in stop or len(stop) != 3:
            continue
        end = next(n for n in range(1, 41) if stop in tokenizer.decode(free[:n]))
        sequence = sample(client, PROMPT, max_tokens=40, seed=4, stop=[stop, "never"] if as_list else stop)[0]
        assert (sequence.tokens, sequence.stop_reason) == (free[:end], "stop")
        return
    pytest.fail("no readable text of three characters in the sample; choose another seed")


@pytest.mark.parametrize("stop", [None, "never", ["never"]])
def test_without_stop_tokens_a_sample_ends_at_the_models_end_of_text(
    client: LocalSamplingClient, stop: str | list[str] | None
) -> None:
    """Regression: under stop strings, base models ran past the end of text."""
    sequences = sample(client, PROMPT, 64, max_tokens=60, stop=stop, temperature=2.0)
    ended = [s for s in sequences if s.stop_reason == "stop"]
    assert ended
    assert all(s.tokens[-1] == EOS and EOS not in s.tokens[:-1] for s in ended)
    assert all(EOS not in s.tokens for s in sequences if s.stop_reason == "length")


def test_given_stop_tokens_replace_the_end_of_text(client: LocalSamplingClient) -> None:
    sequences = sample(client, PROMPT, 64, max_tokens=60, stop=[IM_END], temperature=2.0)
    assert any(EOS in s.tokens for s in sequences)
    assert all((s.tokens[-1] == IM_END) == (s.stop_reason == "stop") for s in sequences)


def test_prompt_logprobs_are_untempered_and_plain(client: LocalSamplingClient, plain: Any) -> None:
    response = client.sample(
        ints(PROMPT), 1, params(temperature=0.3), include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result()
    assert response.prompt_logprobs is not None
    assert response.prompt_logprobs[0] is None
    np.testing.assert_allclose(response.prompt_logprobs[1:], plain_logprobs(plain, PROMPT), atol=1e-4)
    top = response.topk_prompt_logprobs
    assert top is not None
    assert top[0] is None
    with torch.no_grad():
        wanted = plain(torch.tensor([PROMPT])).logits[0].log_softmax(-1).topk(3)
    for position in range(1, len(PROMPT)):
        assert top[position] is not None
        assert [token for token, _ in top[position] or []] == wanted.indices[position - 1].tolist()


def test_compute_logprobs_scores_what_was_asked_for(client: LocalSamplingClient, plain: Any) -> None:
    expected = plain_logprobs(plain, PROMPT)
    whole = client.compute_logprobs(ints(PROMPT)).result()
    np.testing.assert_allclose(whole[1:], expected, atol=1e-4)
    part = client.compute_logprobs(ints(PROMPT), prompt_logprobs_last_n=4).result()
    assert part[:-4] == [None] * (len(PROMPT) - 4)
    np.testing.assert_allclose(part[-4:], expected[-4:], atol=1e-4)
    assert client.compute_logprobs(ints([5])).result() == [None]


@needs_targets
def test_chosen_targets_are_scored_at_chosen_positions(client: LocalSamplingClient, plain: Any) -> None:
    ids = np.full((len(PROMPT) - 1, 2), -1)
    ids[-1] = [65, 66]
    ids[3, 0] = 7
    response = client.sample(
        ints(PROMPT), 1, params(max_tokens=1), target_prompt_logprobs=tinker.TensorData.from_numpy(ids)
    ).result()
    assert response.target_prompt_logprobs is not None
    scores = response.target_prompt_logprobs.to_numpy()
    with torch.no_grad():
        wanted = plain(torch.tensor([PROMPT])).logits[0].log_softmax(-1).numpy()
    np.testing.assert_allclose(scores[-1], wanted[-2, [65, 66]], atol=1e-4)
    assert scores[3, 0] == pytest.approx(wanted[3, 7], abs=1e-4)
    assert np.count_nonzero(scores) == 3


@needs_targets
def test_alternatives_of_sampled_tokens_contain_what_was_drawn_greedily(client: LocalSamplingClient) -> None:
    response = client.sample(
        ints(PROMPT), 2, params(temperature=0, max_tokens=4), topk_sample_logprobs=3
    ).result()
    plain_request = client.sample(ints(PROMPT), 1, params(temperature=0, max_tokens=4)).result()
    for sequence in response.sequences:
        top = sequence.topk_logprobs
        assert top is not None
        assert [row[0][0] for row in top if row] == sequence.tokens
        np.testing.assert_allclose([row[0][1] for row in top if row], sequence.logprobs, atol=1e-5)
    assert plain_request.sequences[0].topk_logprobs is None


def test_a_known_beginning_is_not_computed_again_and_changes_nothing(
    service: LocalServiceClient, model_dir: Callable[[str], str], plain: Any, fed: list[tuple[int, ...]]
) -> None:
    sampler = service.create_sampling_client(base_model=model_dir("qwen3"))
    opening = PROMPT * 3
    first = sample(sampler, opening, max_tokens=20)[0]
    longer = opening + first.tokens + [9, 8, 7]
    fed.clear()
    response = sampler.sample(ints(longer), 1, params(max_tokens=5), True).result()
    assert fed[0] == (1, len(longer))  # the whole prompt is scored
    np.testing.assert_allclose(response.prompt_logprobs[1:], plain_logprobs(plain, longer), atol=1e-4)
    fed.clear()
    again = sample(sampler, longer, max_tokens=5)[0]
    assert fed[0] <= (1, 16)
    assert again.tokens == response.sequences[0].tokens
    fed.clear()
    tails = [sampler.sample(ints([*longer[:-2], tail]), 1, params(max_tokens=2)) for tail in range(6)]
    for tail, future in enumerate(tails):
        tokens = [*longer[:-2], tail, *future.result().sequences[0].tokens]
        expected = plain_logprobs(plain, tokens)[-2:]
        np.testing.assert_allclose(future.result().sequences[0].logprobs, expected, atol=1e-4)


def test_what_was_computed_before_a_training_operation_is_not_reused_after_it(
    service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    sampler = service.create_sampling_client(base_model=model_dir("qwen3"))
    trainer = service.create_lora_training_client(model_dir("qwen3"), rank=2, seed=0)
    cold = [s.logprobs for s in sample(sampler, PROMPT * 4, 2)]
    sample(sampler, PROMPT * 6, 2)
    assert sampler._source.result().decoder._running._stored._nodes
    train(trainer, [PROMPT], steps=1)
    assert not sampler._source.result().decoder._running._stored._nodes
    assert [s.logprobs for s in sample(sampler, PROMPT * 4, 2)] == cold


def test_prompts_that_share_a_new_beginning_compute_it_once(
    service: LocalServiceClient, model_dir: Callable[[str], str], plain: Any, fed: list[tuple[int, ...]]
) -> None:
    sampler = service.create_sampling_client(base_model=model_dir("qwen3"))
    shared = PROMPT * 8
    futures = [sampler.sample(ints([*shared, tail, tail]), 1, params(max_tokens=1)) for tail in range(10)]
    for tail, future in enumerate(futures):
        sequence = future.result().sequences[0]
        expected = plain_logprobs(plain, [*shared, tail, tail, *sequence.tokens])[-1]
        assert sequence.logprobs == pytest.approx([float(expected)], abs=1e-4)
    assert len(shared) < sum(map(math.prod, fed)) < 3 * len(shared)


def test_a_snapshot_keeps_its_weights_while_training_goes_on(
    service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    trainer = service.create_lora_training_client(model_dir("qwen3"), rank=4, seed=0)
    before = trainer.save_weights_and_get_sampling_client()
    early = sample(before, PROMPT, 2)
    train(trainer, [PROMPT])
    after = trainer.save_weights_and_get_sampling_client()
    train(trainer, [PROMPT])
    assert [s.logprobs for s in sample(before, PROMPT, 2)] == [s.logprobs for s in early]
    assert [s.logprobs for s in sample(after, PROMPT, 2)] != [s.logprobs for s in early]
    assert before.get_base_model() == model_dir("qwen3")


def test_max_tokens_none_goes_to_the_end_of_the_context(client: LocalSamplingClient) -> None:
    assert len(sample(client, [3] * 240, max_tokens=None)[0].tokens) == 16
