"""What is not a finite number ends the request it belongs to, and no other."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from tiny_engine import ints, params

from viva.engine import LocalSamplingClient, LocalServiceClient

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
