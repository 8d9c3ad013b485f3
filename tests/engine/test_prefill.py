"""Which prompts are computed together, and the room that is made for the rows that start from them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tinker

from viva.engine import EngineLimits, LocalServiceClient

LENGTHS = (5, 30, 22, 4, 28)


def decoder_with(
    service: LocalServiceClient,
    model: str,
    num_samples: int,
    max_tokens: int = 2,
    lengths: Sequence[int] = LENGTHS,
) -> Any:
    """A decoder for which a prompt of every length waits."""
    sampler: Any = service.create_sampling_client(base_model=model)
    for index, length in enumerate(lengths):
        prompt = tinker.ModelInput.from_ints([index + 1] * length)
        sampler.sample(prompt, num_samples, tinker.SamplingParams(max_tokens=max_tokens, seed=index))
    decoder = sampler._source.result().decoder
    decoder._limits = EngineLimits()
    return decoder


@pytest.mark.parametrize(
    ("padding", "batches"),
    [(0, [[30], [28], [22], [5], [4]]), (10, [[30, 28, 22], [5, 4]]), (1000, [[30, 28, 22, 5, 4]])],
)
def test_prompts_of_similar_length_are_computed_together(
    service: LocalServiceClient,
    model_dir: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    padding: int,
    batches: list[list[int]],
) -> None:
    monkeypatch.setattr("viva.engine.decoder._MOST_PADDING", padding)
    decoder = decoder_with(service, model_dir("llama"), 1)
    prefill, found = decoder._prefill, []

    def counting(prompts: Any) -> bool:
        found.append([len(prompt.tokens) for prompt in prompts])
        return prefill(prompts)

    decoder._prefill = counting
    while decoder.has_work():
        decoder.run_unit()
    assert found == batches


@pytest.mark.parametrize(("max_tokens", "rows"), [(2, 4 * len(LENGTHS)), (1, 4)])
def test_there_is_room_at_once_for_all_rows_that_will_be_live_together(
    service: LocalServiceClient,
    model_dir: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    max_tokens: int,
    rows: int,
) -> None:
    monkeypatch.setattr("viva.engine.decoder._MOST_PADDING", 0)
    decoder = decoder_with(service, model_dir("llama"), 4, max_tokens)
    rooms: set[int] = set()
    for _ in LENGTHS:
        decoder.run_unit()
        rooms.add(decoder._running.cache.rows)
    assert rooms == {rows}


def test_many_short_prompts_after_a_long_one_take_no_more_room_than_by_themselves(
    service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    sampler: Any = service.create_sampling_client(base_model=model_dir("llama"))
    params = tinker.SamplingParams(max_tokens=2, seed=0)

    def sizes(*lengths: int) -> tuple[list[list[int]], int]:
        futures = [sampler.sample(tinker.ModelInput.from_ints([7] * length), 1, params) for length in lengths]
        tokens = [list(future.result().sequences[0].tokens) for future in futures]
        return tokens, sampler._source.result().decoder._running.cache.num_bytes

    many = range(3, 23)
    alone = sizes(*many)
    _, long = sizes(200)
    sampler._source.result().decoder.forget()
    again = sizes(*many)
    assert again == alone
    assert long < alone[1]


def test_rows_behind_one_shared_prompt_have_no_room_for_it(
    service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    held: list[int] = []
    for length in (5, 200):
        decoder = decoder_with(service, model_dir("llama"), 8, max_tokens=4, lengths=[length])
        for _ in range(2):  # the store of prompts is freed when decoding begins
            decoder.run_unit()
        assert len(decoder._running.sequences) == 8
        held.append(decoder._running.cache.num_bytes + decoder._running.prefilled.num_bytes)
        while decoder.has_work():
            decoder.run_unit()
    assert held[0] == held[1] > 0
