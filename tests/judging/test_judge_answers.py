"""A judge that answers the question itself before it compares."""

from typing import Any

import pytest
import tinker
from scripted_judges import BOTH, RENDERER, SOLUTIONS, client_of, judge_of, prefers_later

from viva.judging.comparison import (
    JUDGE_SYSTEM_PROMPT,
    VERDICT_PREFIX,
)
from viva.testing import (
    CHAT_TOKENS,
    ScriptedSamplingClient,
)


def says(answer: str) -> Any:
    return lambda prompt, call: "A" if prompt.endswith(VERDICT_PREFIX) else answer


@pytest.mark.parametrize("style", list(CHAT_TOKENS))
async def test_a_judge_that_answers_first_reads_its_answer_in_every_comparison(style: str) -> None:
    client = client_of(style, script=says("it is\n4"), next_token=prefers_later)
    judge = judge_of(client, style, answers_first=True)
    plain = judge_of(client_of(style, script=says("4"), next_token=prefers_later), style)
    found = await judge.tournament("2 + 2?", SOLUTIONS, BOTH, seed=1)
    assert found == await plain.tournament("2 + 2?", SOLUTIONS, BOTH, seed=1)
    asked, *compared = client.prompts
    assert "2 + 2?" in asked
    assert JUDGE_SYSTEM_PROMPT not in asked
    assert len(compared) == 6
    own = "> 2 + 2?\nYour own answer:\n> it is\n> 4\nEnd of your own answer.\nSolution A:\n"
    assert all(own in prompt for prompt in compared)
    assert all(own in comparison.prompt for comparison in found)


async def test_the_answer_is_greedy_asked_once_for_both_orders_and_by_a_comparison_alone() -> None:
    asked: list[tinker.SamplingParams] = []

    class Watched(ScriptedSamplingClient):
        def sample(self, prompt: Any, num_samples: int, sampling_params: Any, **options: Any) -> Any:
            asked.append(sampling_params)
            return super().sample(prompt, num_samples, sampling_params, **options)

    client = Watched(renderer=RENDERER, script=says("4"), next_token=prefers_later)
    judge = judge_of(client, answers_first=True, max_tokens=40)
    one, other = await judge.tournament("2 + 2?", {0: "zero", 2: "two"}, BOTH, seed=1)
    assert (one.first, one.second, other.first, other.second) == (0, 2, 2, 0)
    assert [(each.temperature, each.max_tokens) for each in asked] == [(0.0, 40), (1.0, 1), (1.0, 1)]
    alone = await judge.compare("2 + 2?", SOLUTIONS, 0, 2, seed=1)
    assert (alone, alone.prompt) == (one, one.prompt)
    assert judge.own_answer == ""


async def test_an_answer_that_was_cut_is_none() -> None:
    client = client_of(script=says("a long answer"), next_token=prefers_later)
    judge = judge_of(client, answers_first=True, max_tokens=2)
    found = await judge.tournament("q", SOLUTIONS, BOTH, seed=1)
    assert len(client.prompts) == 1 + len(found)
    assert all("own answer" not in comparison.prompt for comparison in found)


async def test_nothing_is_answered_where_there_is_nothing_to_compare() -> None:
    client = client_of(script=says("4"), next_token=prefers_later)
    await judge_of(client, answers_first=True).tournament("q", dict.fromkeys(range(3), "4"), BOTH, seed=1)
    assert client.prompts == []
