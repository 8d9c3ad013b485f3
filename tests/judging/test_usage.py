"""Tokens are counted where a model is asked: by role, in every task, and in every meter that is on."""

import asyncio

import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st

from viva.judging.comparison import VERDICT_PREFIX, TournamentPattern
from viva.judging.judge import PolicyRef, PolicySelfComparisonJudge, sample
from viva.judging.usage import Meter, Usage, count_tokens, metering
from viva.testing import ScriptedSamplingClient, tiny_renderer

RENDERER = tiny_renderer()

amounts = st.lists(
    st.tuples(st.sampled_from(["policy", "judge", "scorer"]), st.integers(0, 9), st.integers(0, 9))
)


@given(amounts, amounts)
def test_an_inner_meter_counts_its_part_and_an_outer_one_all(before, inside):
    outer, inner = Meter(), Meter()
    with metering(outer):
        for role, prompt, sampled in before:
            count_tokens(role, prompt=prompt, sampled=sampled)
        with metering(inner):
            for role, prompt, sampled in inside:
                count_tokens(role, prompt=prompt, sampled=sampled)
    count_tokens("judge", prompt=5, sampled=5)  # nobody listens any more
    assert inner.total.total == sum(prompt + sampled for _, prompt, sampled in inside)
    assert outer.total.total == sum(prompt + sampled for _, prompt, sampled in [*before, *inside])
    assert set(inner.by_role) == {role for role, *_ in inside}


async def test_tasks_that_are_started_meanwhile_count_with_their_own_meter():
    async def play(number):
        meter = Meter()
        with metering(meter):
            await asyncio.gather(*(asyncio.create_task(ask(number)) for _ in range(3)))
        return meter.by_role["policy"]

    async def ask(number):
        await asyncio.sleep(0)
        count_tokens("policy", prompt=number, sampled=1)

    found = await asyncio.gather(play(10), play(20))
    assert found == [Usage(prompt_tokens=30, sampled_tokens=3), Usage(prompt_tokens=60, sampled_tokens=3)]


@pytest.mark.parametrize("num_samples", [1, 3])
async def test_a_prompt_counts_in_full_for_every_sample_and_only_under_a_role(num_samples):
    client = ScriptedSamplingClient(renderer=RENDERER, script=lambda prompt, call: "yes")
    prompt, meter = tinker.ModelInput.from_ints([1, 2, 3, 4, 5]), Meter()
    params = tinker.SamplingParams(max_tokens=9, temperature=1.0, seed=0)
    with metering(meter):
        await sample(client, prompt, params, num_samples)
        assert meter.by_role == {}
        response = await sample(client, prompt, params, num_samples, role="judge")
    sampled = sum(len(sequence.tokens) for sequence in response.sequences)
    assert meter.by_role == {"judge": Usage(prompt_tokens=5 * num_samples, sampled_tokens=sampled)}


async def test_a_judges_comparisons_are_counted_and_those_of_the_same_words_cost_nothing():
    client = ScriptedSamplingClient(renderer=RENDERER, next_token=lambda prompt: {"A": 1.0})
    judge, meter = PolicySelfComparisonJudge(PolicyRef(sampling_client=client), RENDERER), Meter()
    with metering(meter):
        await judge.tournament("Which?", {0: "x", 1: "y", 2: "x"}, TournamentPattern.ALL_PAIRS_BOTH_WAYS, 0)
    assert len(client.prompts) == 4
    assert all(prompt.endswith(VERDICT_PREFIX) for prompt in client.prompts)
    used = meter.by_role["judge"]
    assert used.sampled_tokens == 4  # one label each
    assert used.prompt_tokens > 4 * len(VERDICT_PREFIX)
