"""A judge that is asked once about the same words says what the judge behind it says."""

import asyncio

from viva.judging.comparison import VERDICT_PREFIX, TournamentPattern
from viva.judging.judge import JudgeOptions, PolicyRef, PolicySelfComparisonJudge
from viva.judging.remembered import RememberingJudge
from viva.testing import ScriptedSamplingClient, tiny_renderer

RENDERER = tiny_renderer()
BOTH = TournamentPattern.ALL_PAIRS_BOTH_WAYS
SOLUTIONS = {0: "It is 4.", 1: "It is 5.", 3: "Six."}


def judge_of(**options):
    client = ScriptedSamplingClient(
        renderer=RENDERER,
        script=lambda prompt, call: "It is 4.",
        next_token=lambda prompt: (
            {"A": (len(prompt) % 7 + 1) / 9, "B": 0.1}
            if prompt.endswith(VERDICT_PREFIX)
            else {"y": 0.6, "n": 0.2}
        ),
    )
    judge = PolicySelfComparisonJudge(PolicyRef(sampling_client=client), RENDERER, JudgeOptions(**options))
    return judge, client


async def judged(judge, solutions=SOLUTIONS, seed=0):
    return await judge.tournament("How many?", solutions, BOTH, seed)


def test_it_says_the_same_and_asks_once():
    plain, _ = judge_of()
    judge, client = judge_of()
    remembering = RememberingJudge(judge)
    expected = asyncio.run(judged(plain))
    assert asyncio.run(judged(remembering)) == expected
    assert asyncio.run(judged(remembering, seed=5)) == expected
    assert len(client.prompts) == 6
    renamed = asyncio.run(judged(remembering, {7: "It is 5.", 8: "It is 4."}))
    assert [(each.first, each.second) for each in renamed] == [(7, 8), (8, 7)]
    assert {each.score for each in renamed} <= {each.score for each in expected}
    assert len(client.prompts) == 6
    asyncio.run(judged(remembering, {0: "Seven.", 1: "It is 4."}))
    assert len(client.prompts) == 8
    assert remembering.described() == judge.described()


def test_an_own_answer_is_asked_for_once():
    judge, client = judge_of(answers_first=True)
    remembering = RememberingJudge(judge)

    async def twice():
        return [await judged(remembering), await judged(await remembering.for_question("How many?", 1))]

    first, second = asyncio.run(twice())
    assert first == second
    assert sum(not prompt.endswith(VERDICT_PREFIX) for prompt in client.prompts) == 1
    assert all("Your own answer:\n> It is 4.\n" in each.prompt for each in first)
    assert len(client.prompts) == 1 + 6


def test_answers_and_scores_are_those_of_the_judge_behind_it():
    judge, client = judge_of()
    remembering = RememberingJudge(judge)
    assert asyncio.run(remembering.answer([{"role": "user", "content": "How many?"}], 0)) == "It is 4."
    score = asyncio.run(remembering.score("How many?", "It is 4.", "It is right.", 0))
    assert score == asyncio.run(judge.score("How many?", "It is 4.", "It is right.", 0)) is not None
    assert len(client.prompts) == 3
