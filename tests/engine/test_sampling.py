import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinker import SamplingParams

from viva.engine import sampling
from viva.engine.sampling import draw_tokens, truncation_mask, uniform_numbers

logit = st.floats(-8, 8, allow_nan=False)
rules = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 1, 2, 5, 100]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
)
number = st.floats(0, 1, exclude_max=True)


@pytest.fixture(params=["kernels", "torch"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens drawn by the compiled kernel, or as where it is not for them."""
    if request.param == "torch":
        monkeypatch.setattr(sampling, "can_compile", lambda logits: False)


@st.composite
def batches(draw: Any) -> tuple[torch.Tensor, list[SamplingParams], list[float]]:
    rows, size = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    values = draw(st.lists(st.lists(logit, min_size=size, max_size=size), min_size=rows, max_size=rows))
    return (
        torch.tensor(values, dtype=torch.float32),
        draw(st.lists(rules, min_size=rows, max_size=rows)),
        draw(st.lists(number, min_size=rows, max_size=rows)),
    )


def reference_distribution(logits: np.ndarray, rule: SamplingParams) -> np.ndarray:
    """Tempered, truncated, renormalised probabilities, one step at a time."""
    if rule.temperature == 0:
        chosen = np.zeros(len(logits))
        chosen[int(np.argmax(logits))] = 1.0
        return chosen
    scaled = logits.astype(np.float64) / rule.temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = sorted(range(len(logits)), key=lambda token: (-scaled[token], token))
    kept = order[: rule.top_k] if rule.top_k > 0 else order
    mass = sum(probabilities[token] for token in kept)
    nucleus, reached = [], 0.0
    for token in kept:
        if nucleus and rule.top_p < 1 and reached >= rule.top_p - 1e-15:
            break
        nucleus.append(token)
        reached += probabilities[token] / mass
    result = np.zeros(len(logits))
    result[nucleus] = probabilities[nucleus]
    return result / result.sum()


@given(batches())
def test_a_drawn_token_is_where_its_number_falls_in_the_distribution(batch: Any) -> None:
    logits, rule_list, numbers = batch
    draws = draw_tokens(logits, rule_list, numbers)
    for row, (rule, uniform) in enumerate(zip(rule_list, numbers, strict=True)):
        expected = reference_distribution(logits[row].numpy(), rule)
        token = draws.tokens[row]
        assert expected[token] > 0
        below = expected[:token].sum()
        assert rule.temperature == 0 or below - 1e-6 <= uniform <= below + expected[token] + 1e-6
        shown = (
            reference_distribution(logits[row].numpy(), SamplingParams())
            if rule.temperature == 0
            else expected
        )
        assert draws.logprobs[row] == pytest.approx(math.log(shown[token]), abs=1e-6)


@given(batches())
def test_a_row_does_not_depend_on_its_batch(batch: Any) -> None:
    logits, rule_list, numbers = batch
    together = draw_tokens(logits, rule_list, numbers, 3)
    for row in range(len(rule_list)):
        alone = draw_tokens(logits[row : row + 1], rule_list[row : row + 1], numbers[row : row + 1], 3)
        assert alone.tokens[0] == together.tokens[row]
        assert alone.logprobs[0] == together.logprobs[row]
        assert np.array_equal(alone.alternatives[0][0], together.alternatives[0][row])


@given(batches())
def test_top_k_keeps_exactly_k_and_the_most_likely_is_always_kept(batch: Any) -> None:
    logits, rule_list, _ = batch
    keep = truncation_mask(logits.double(), rule_list)
    for row, rule in enumerate(rule_list):
        assert keep[row, int(logits[row].argmax())]
        if rule.top_k > 0:
            assert keep[row].sum() <= rule.top_k
            if rule.top_p == 1:
                assert keep[row].sum() == min(rule.top_k, logits.shape[1])


@given(
    st.sampled_from([1, 127, 128, 129, 255, 256, 300, 1000]),
    st.integers(0, 2**32 - 1),
    st.lists(st.one_of(number, st.just(0.0), st.just(math.nextafter(1, 0))), min_size=1, max_size=4),
)
def test_many_tokens_are_searched_as_one_row_would_be(size: int, seed: int, numbers: list[float]) -> None:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(len(numbers), size)) * 4
    values[rng.random(values.shape) < 0.3] = -np.inf
    values[:, rng.integers(size)] = 1.0
    logits = torch.tensor(values, dtype=torch.float32)
    draws = draw_tokens(logits, [SamplingParams()] * len(numbers), numbers)
    for row, uniform in enumerate(numbers):
        expected = reference_distribution(logits[row].numpy(), SamplingParams())
        token = draws.tokens[row]
        assert expected[token] > 0
        assert expected[:token].sum() - 1e-6 <= uniform <= expected[: token + 1].sum() + 1e-6
        assert draws.logprobs[row] == pytest.approx(math.log(expected[token]), abs=1e-5)


def test_the_largest_number_below_one_draws_a_possible_token() -> None:
    logits = torch.tensor([[0.0, 0.0, -200.0], [0.0, float("-inf"), float("-inf")]])
    draws = draw_tokens(logits, [SamplingParams(), SamplingParams()], [math.nextafter(1, 0)] * 2)
    assert draws.tokens == [1, 0]


def test_alternatives_are_sorted_and_excluded_tokens_have_no_probability() -> None:
    draws = draw_tokens(torch.tensor([[1.0, 3.0, 2.0, 0.0]]), [SamplingParams(top_k=2)], [0.5], 4)
    assert draws.alternatives is not None
    tokens, logprobs = draws.alternatives
    assert tokens[0, :2].tolist() == [1, 2]
    assert np.isinf(logprobs[0, 2:]).all()
    assert np.exp(logprobs[0, :2]).sum() == pytest.approx(1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_are_marked_for_their_row_only(bad: float) -> None:
    draws = draw_tokens(torch.tensor([[0.0, 1.0], [0.0, bad]]), [SamplingParams()] * 2, [0.5] * 2)
    assert draws.finite == [True, False]


@given(st.integers(-(2**70), 2**70), st.integers(0, 1000))
def test_a_stream_depends_on_seed_index_and_position_alone(seed: int, index: int) -> None:
    first, second = uniform_numbers(seed, index), uniform_numbers(seed, index)
    values = [next(first) for _ in range(130)]
    assert values == [next(second) for _ in range(130)]
    assert all(0 <= value < 1 for value in values)
    assert len(set(values)) == 130


def test_streams_of_neighbouring_seeds_and_samples_are_unrelated() -> None:
    streams = [uniform_numbers(seed, index) for seed in range(20) for index in range(20)]
    values = np.array([[next(stream) for _ in range(50)] for stream in streams])
    correlation = np.corrcoef(values)
    np.fill_diagonal(correlation, 0)
    assert np.abs(correlation).max() < 0.75
    assert abs(values.mean() - 0.5) < 0.01


@pytest.mark.parametrize(
    "rule",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.7),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.7),
        SamplingParams(temperature=1.3, top_k=8, top_p=0.8),
    ],
)
def test_frequencies_follow_the_distribution(rule: SamplingParams) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 1.5
    num = 20_000
    numbers = [next(uniform_numbers(11, index)) for index in range(num)]
    draws = draw_tokens(logits.expand(num, -1), [rule] * num, numbers)
    counts = np.bincount(draws.tokens, minlength=12)
    expected = reference_distribution(logits.numpy(), rule) * num
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    degrees = int(possible.sum()) - 1
    # Wilson-Hilferty: the cube root of a chi-square per degree is nearly normal; 4 standard deviations
    limit = degrees * (1 - 2 / (9 * degrees) + 4 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < limit
