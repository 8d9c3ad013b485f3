"""Rubrics as rewards: who is asked what, the weighted mean by hand, what is kept, and what is refused."""

import asyncio
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from solved import paid_agents, solutions

import viva
from viva.judging.comparison import JudgeError
from viva.judging.judge import JudgeOptions, PolicyRef
from viva.judging.records import ConversationRecord, Criterion
from viva.judging.rubric import CRITERION_PREFIX, CRITERION_SYSTEM_PROMPT, RIGHT
from viva.rewards.base import Models
from viva.rewards.credit import group_advantages
from viva.testing import ScriptedSamplingClient, tiny_renderer

RENDERER = tiny_renderer()
TWO = viva.rewards.rubric({"It is polite.": 3.0, "It is short.": 1.0})
CHANCES = {"low": 0.25, "high": 0.75}


def judge_of(next_token, script=lambda prompt, call: "", **options):
    client = ScriptedSamplingClient(renderer=RENDERER, script=script, next_token=next_token)
    return JudgeOptions(**options).make(PolicyRef(sampling_client=client), RENDERER), client


def yes_of(chance_of):
    """Labels of a judge by the answer and the criterion that a prompt shows."""

    def next_token(prompt):
        if not prompt.endswith(CRITERION_PREFIX):
            return {}
        (answer,) = re.findall(r"\nAnswer:\n> (.*)\nEnd of the answer", prompt)
        (criterion,) = re.findall(r"Criterion:\n> (.*)\n", prompt)
        chance = chance_of(answer, criterion)
        return {"y": 0.8 * chance, "n": 0.8 * (1 - chance), "x": 0.2}

    return next_token


def asked(reward, group, judge):
    return asyncio.run(reward.ask(group, "How many?", Models(judge=judge)))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5, unique=True))
def test_the_reward_is_the_weighted_mean_of_the_probabilities_of_yes(scores):
    texts = [f"{polite} {short}" for polite, short in scores]

    def chance(answer, criterion):
        return int(answer.split()["short" in criterion]) / 10

    judge, client = judge_of(yes_of(chance))
    group = asked(TWO, solutions(texts), judge)
    expected = [(3 * polite / 10 + short / 10) / 4 for polite, short in scores]
    assert TWO.pay(group) == pytest.approx(expected)
    assert len(client.prompts) == 2 * len(scores)
    means = [math.fsum(column) / 10 / len(scores) for column in zip(*scores, strict=True)]
    assert list(TWO.figures(group).values()) == pytest.approx(means)


def test_without_criteria_the_judge_is_asked_whether_the_answer_is_right_once_for_the_same_words():
    judge, client = judge_of(yes_of(lambda answer, criterion: CHANCES[answer]))
    reward = viva.rewards.rubric()
    assert reward.pay(asked(reward, solutions(["low", "high", "low"]), judge)) == pytest.approx(
        [0.25, 0.75, 0.25]
    )
    assert len(client.prompts) == 2
    assert all(RIGHT.text in prompt and CRITERION_SYSTEM_PROMPT in prompt for prompt in client.prompts)


def test_a_judge_that_answers_first_answers_once_and_scores_behind_its_answer():
    judge, client = judge_of(
        yes_of(lambda answer, criterion: CHANCES[answer]), lambda prompt, call: "It is 7.", answers_first=True
    )
    asked(TWO, solutions(["low", "high"]), judge)
    own, *others = client.prompts
    assert "How many?" in own
    assert len(others) == 4
    assert all("Your own answer:\n> It is 7.\nEnd of your own answer.\nAnswer:" in each for each in others)


def test_a_score_that_cannot_be_read_is_no_reward():
    judge, _ = judge_of(lambda prompt: {"y": 0.05, "n": 0.04, "x": 0.91})
    group = asked(TWO, solutions(["a"]), judge)
    assert group.rubric == {0: (None, None)}
    assert TWO.figures(group) == {}
    with pytest.raises(JudgeError, match=r"could not be read about solution 0 .* got \[None, None\]"):
        TWO.pay(group)
    tolerant, _ = judge_of(lambda prompt: {"y": 0.05, "n": 0.05, "x": 0.9}, max_off_set_mass=1.0)
    assert TWO.pay(asked(TWO, solutions(["a"]), tolerant)) == pytest.approx([0.5])


def test_what_is_not_known_is_no_reward():
    with pytest.raises(ValueError, match="needs a judge's score by each criterion, which is not known here"):
        TWO.pay(solutions(["a"]))
    with pytest.raises(ValueError, match="needs a judge; got none"):
        asked(TWO, solutions(["a"]), None)


@pytest.mark.parametrize(
    ("criteria", "message"),
    [
        ([], "criteria must be one or more that differ"),
        (
            "It is short.",
            "criteria must be one or more that differ, like ['It is short.']; got 'It is short.'",
        ),
        (["a", "a "], "criteria must be one or more that differ"),
        ([" "], "a criterion needs a text; got ''"),
        ({"a": 0}, "the criterion 'a' needs a weight above 0, or none; got 0"),
        ({"a": math.inf}, "needs a weight above 0"),
    ],
)
def test_what_are_no_criteria_is_refused(criteria, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        viva.rewards.rubric(criteria)


def test_a_policy_moves_to_what_its_judge_holds_true():
    """A share of replies says a, and the judge finds b likelier, by 0.1."""
    judge, _ = judge_of(yes_of(lambda answer, criterion: 0.5 if answer == "a" else 0.6))
    reward, share = viva.rewards.rubric(), 0.7
    pay = dict(zip("ab", reward.pay(asked(reward, solutions(["a", "b"]), judge)), strict=True))
    for step in range(300):
        draws = ["a" if (number + step / 300) / 8 < share else "b" for number in range(8)]
        advantages = group_advantages([pay[each] for each in draws])
        for draw, advantage in zip(draws, advantages, strict=True):
            share += 0.2 * advantage * ((draw == "a") - share)
    assert share < 0.2


@pytest.mark.parametrize("name", ["rubric", "shuffled_rubric"])
def test_agents_are_paid_and_the_transcript_is_paid_alike_by_the_criteria_that_the_run_had(name):
    judge, client = judge_of(
        yes_of(lambda answer, criterion: 0.5 if "short" in criterion else int(answer) / 4)
    )
    reward = viva.rewards.find_reward(name)
    rewards, record = paid_agents(reward.around(TWO), judge)
    assert len(client.prompts) == 4
    expected = [(3 * digit / 4 + 0.5) / 4 for digit in (1, 1, 2)]
    assert sorted(rewards) == pytest.approx(expected)
    stored = ConversationRecord.model_validate(record)
    assert stored.criteria == (Criterion(text="It is polite.", weight=3.0), Criterion(text="It is short."))
    assert stored.judge.system_prompt == CRITERION_SYSTEM_PROMPT
    paid = asyncio.run(viva.rewards.find_reward(name).stored_pay(stored, 0))
    assert sorted(paid.values()) == pytest.approx(expected)
