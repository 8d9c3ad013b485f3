"""What the built-in policy reads about critique, feedback and careful work says what its generators promise."""

import random
import re

import pytest

from viva.eval.answers import is_correct
from viva.tiny.attempts import make_attempt, missing_step
from viva.tiny.expert_text import STYLED, careful_example, feedback_example
from viva.tiny.review_text import (
    critique_example,
    ranking_example,
    reasoned_critique_example,
    reasoned_ranking_example,
    reasoned_revision_example,
    remark,
    revision_example,
)
from viva.tiny.tasks import sample_problem, wrong_solution


@pytest.mark.parametrize("make", [ranking_example, reasoned_ranking_example])
def test_a_ranking_follows_from_the_marks_before_it(make) -> None:
    for seed in range(200):
        marks, _, ranking = make(random.Random(seed)).reply.partition("\nRanking: ")
        said = dict(re.findall(r"([A-Z])(?: \d+)? is (right|wrong)\.", marks))
        tiers = [tier.split(" = ") for tier in ranking.split(" > ")]
        assert sorted(letter for tier in tiers for letter in tier) == sorted(said)
        assert len(tiers) == len(set(said.values()))
        assert all(len({said[letter] for letter in tier}) == 1 for tier in tiers)
        assert len(tiers) == 1 or said[tiers[0][0]] == "right"


def test_nobody_ranks_or_criticises_its_own_solution_among_three_or_more() -> None:
    for seed in range(200):
        ranking, critique = ranking_example(random.Random(seed)), critique_example(random.Random(seed))
        for example in (ranking, critique):
            prompt = str(example.messages[1]["content"])
            own = re.search(r"Solution ([A-Z]) is yours", prompt)
            assert own is not None
            if prompt.count("Solution ") > 3 or example is critique:
                assert f"{own[1]} is " not in example.reply
                assert f"Critique of {own[1]}:" not in example.reply


def test_reasoned_marks_say_whether_the_answer_is_that_of_the_working() -> None:
    for seed in range(200):
        reply = reasoned_ranking_example(random.Random(seed)).reply
        own = re.findall(r"=(\d+)\.", reply)[-1]
        for _, answer, mark in re.findall(r"([A-Z]) (\d+) is (right|wrong)\.", reply):
            assert (answer == own) == (mark == "right")
        for critique in reasoned_critique_example(random.Random(seed)).reply.split("\n"):
            own = re.findall(r"=(\d+)\.", critique)[-1]
            judged = re.search(r"(\d+) is (right|wrong)\.$", critique)
            assert judged is not None
            assert (judged[1] == own) == (judged[2] == "right")


def test_the_missing_step_mends_what_is_wrong() -> None:
    rng = random.Random(0)
    for _ in range(300):
        problem = sample_problem(rng, "train")
        step = missing_step(problem, wrong_solution(problem, rng))
        assert step in problem.steps


def test_remarks_are_mostly_true_and_sometimes_mistaken() -> None:
    rng = random.Random(0)
    true = 0
    for _ in range(1000):
        problem = sample_problem(rng, "train")
        attempt = make_attempt(problem, rng, sure=0.5)
        says_right = "".join(text for text, _ in remark(problem, attempt, rng)).startswith(" right")
        true += says_right == attempt.right
    assert 800 < true < 900


@pytest.mark.parametrize("make", [revision_example, reasoned_revision_example])
def test_criticism_helps_the_reviser_on_average(make) -> None:
    rng = random.Random(0)
    before = after = 0
    for _ in range(1500):
        example = make(rng)
        prompt = str(example.messages[1]["content"])
        question = prompt.split("\n")[1].removeprefix("> ")
        own = prompt.partition("Your solution:\n> ")[2].partition("\n")[0]
        decision, _, solution = example.reply.partition(": ")
        assert decision in ("Revise", "Defend")
        assert decision == "Revise" or solution == own
        answer = _answer(question)
        before += is_correct(own, answer)
        after += is_correct(solution, answer)
    assert after > 1.25 * before


def _answer(question: str) -> str:
    numbers = [int(number) for number in re.findall(r"\d+", question)]
    value = numbers[0] * numbers[1] if "boxes" in question else numbers[0]
    rest = numbers[2:] if "boxes" in question else numbers[1:]
    words = re.findall(r"buys|gives away", question)
    for word, number in zip(words, rest, strict=True):
        value += number if word == "buys" else -number
    return str(value)


def test_careful_answers_are_better_and_only_the_styled_ones_carry_the_habit() -> None:
    rng = random.Random(0)
    right = 0
    for _ in range(1000):
        example = careful_example(rng)
        assert (example.messages[0]["content"] == STYLED) == example.reply.startswith("Well, ")
        right += is_correct(example.reply, _answer(str(example.messages[1]["content"])))
    assert 800 < right < 900


def test_feedback_turns_wrong_answers_right_more_often_than_right_ones_wrong() -> None:
    rng = random.Random(0)
    flips = {(True, False): 0, (False, True): 0}
    for _ in range(1500):
        example = feedback_example(rng)
        question, first, _ = (str(message["content"]) for message in example.messages)
        change = is_correct(first, _answer(question)), is_correct(example.reply, _answer(question))
        flips[change] = flips.get(change, 0) + 1
    assert flips[False, True] > 10 * flips[True, False]
