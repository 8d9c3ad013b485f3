"""Agreement with the judge's own answer: who is asked what, what is paid, and what training makes of a slow judge."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from solved import paid_agents, solutions

import viva
from viva.judging.comparison import Judge
from viva.judging.judge import JudgeOptions, PolicyRef
from viva.judging.records import ConversationRecord
from viva.rewards.base import Models
from viva.rewards.credit import group_advantages
from viva.testing import ScriptedSamplingClient, tiny_renderer

RENDERER = tiny_renderer()
REWARD = viva.rewards.judge_answer()


def judge_that_says(text, **options):
    client = ScriptedSamplingClient(renderer=RENDERER, script=lambda prompt, call: text)
    made = JudgeOptions(mode="verdict", **options).make(PolicyRef(sampling_client=client), RENDERER)
    return made, client


def asked(group, judge, system_prompt=None):
    return asyncio.run(REWARD.ask(group, "How many?", Models(judge=judge, system_prompt=system_prompt)))


def pay(texts, said, **given):
    return REWARD.pay(asked(solutions(texts, **given), judge_that_says(said)[0]))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 3))
def test_agreement_is_paid_and_nothing_else(numbers, own):
    assert pay([f"It is {each}." for each in numbers], f"So {own}.") == [
        float(each == own) for each in numbers
    ]


def test_answers_are_compared_by_equivalence_and_a_cut_reply_agrees_with_nothing():
    assert pay([r"\boxed{0.5x}", r"\boxed{x/2}", "x"], r"\boxed{\frac{x}{2}}") == [1.0, 1.0, 0.0]
    assert pay(["It is 4.", "It is 4."], "It is 4.", finished=[True, False]) == [1.0, 0.0]


@pytest.mark.parametrize("said", ["", "  "])
def test_without_the_judges_answer_nobody_earns(said):
    group = asked(solutions(["It is 4.", " "], answer="4"), judge_that_says(said)[0])
    assert REWARD.pay(group) == [0.0, 0.0]
    assert REWARD.figures(group) == {"judge_answer/given": 0.0, "judge_answer/agreement": 0.0}


def test_a_judge_that_is_cut_has_given_no_answer():
    judge, _ = judge_that_says("It is 4, and I go on and on.", max_tokens=9)
    assert asked(solutions(["It is 4."]), judge).judge_answer == ""


def test_the_judge_is_asked_once_what_the_policy_is_asked():
    judge, client = judge_that_says("It is 4.")
    asked(solutions(["It is 4.", "It is 5."]), judge, system_prompt="Be short.")
    (prompt,) = client.prompts
    assert "Be short." in prompt
    assert "How many?" in prompt
    assert "It is 5." not in prompt


def test_figures_tell_whether_the_judge_is_right_where_a_solution_agrees():
    judge, _ = judge_that_says("It is 5.")
    found = REWARD.figures(asked(solutions(["It is 4.", "It is 5."], answer="4"), judge))
    assert found == {"judge_answer/given": 1.0, "judge_answer/agreement": 0.5, "judge_answer/correct": 0.0}


def test_what_is_not_known_is_no_reward():
    with pytest.raises(ValueError, match="needs the judge's own answer, which is not known here"):
        REWARD.pay(solutions(["It is 4."]))
    with pytest.raises(ValueError, match="needs a judge; got none"):
        asked(solutions(["It is 4."]), None)

    class Compares(Judge):
        async def compare(self, question, solutions, first, second, seed):
            raise NotImplementedError

        def described(self):
            return {}

    with pytest.raises(ValueError, match="Compares compares solutions and gives no answers of its own"):
        asked(solutions(["It is 4."]), Compares())


def test_a_policy_follows_the_judge_and_not_its_own_majority():
    """Seven of ten replies say 1, the judge 2."""
    rng, share = random.Random(0), 0.7
    for _ in range(200):
        draws = [1 if rng.random() < share else 2 for _ in range(8)]
        advantages = group_advantages(pay([f"It is {each}." for each in draws], "It is 2."))
        for draw, advantage in zip(draws, advantages, strict=True):
            share += 0.02 * advantage * ((draw == 1) - share)
    assert share < 0.05


@pytest.mark.parametrize("name", ["judge_answer", "shuffled_judge_answer"])
def test_agents_are_paid_and_the_transcript_keeps_the_answer(name):
    judge, client = judge_that_says("1")
    rewards, record = paid_agents(viva.rewards.find_reward(name), judge)
    assert len(client.prompts) == 1
    assert record["judge_answer"] == "1"
    assert sorted(rewards) == [0.0, 1.0, 1.0]
    stored = ConversationRecord.model_validate(record)
    paid = asyncio.run(viva.rewards.find_reward(name).stored_pay(stored, 0))
    assert sorted(paid.values()) == [0.0, 1.0, 1.0]
