"""What the built-in policy reads about critique, feedback and careful work says what its generators promise."""

import itertools
import random
import re

from asked_answers import answer_to

from viva.eval.answers import is_correct
from viva.judging.ranking import parse_ranking
from viva.tiny.attempts import Attempt
from viva.tiny.expert_text import STYLED, careful_example, feedback_example
from viva.tiny.review_text import (
    critique_example,
    lookup_example,
    ranking_example,
    remark,
    revision_example,
)


def test_a_ranking_compares_every_pair_as_the_marks_before_it_say() -> None:
    for seed in range(200):
        marks, _, ranking = ranking_example(random.Random(seed)).reply.partition("\nRanking: ")
        good = {
            letter: mark == "right" for letter, mark in re.findall(r"([A-Z]) \d+ is (right|wrong)\.", marks)
        }
        pairs = [pair.split(" ") for pair in ranking.split(", ")]
        assert [(first, second) for first, _, second in pairs] == list(itertools.combinations(good, 2))
        for first, operator, second in pairs:
            assert operator == {1: ">", 0: "=", -1: "<"}[good[first] - good[second]]


def test_a_ranking_is_read_with_a_vote_on_every_pair() -> None:
    for seed in range(100):
        example = ranking_example(random.Random(seed))
        letters = re.findall(r"End of solution ([A-Z])\.", str(example.messages[1]["content"]))
        own = re.search(r"Solution ([A-Z]) is yours", str(example.messages[1]["content"]))
        assert own is not None
        on_own = len(letters) == 2
        items = {letter: index for index, letter in enumerate(letters)}
        ballot = parse_ranking(example.reply, items, own=own[1], votes_on_own=on_own)
        ranked = len(letters) - (not on_own)
        assert len(ballot.votes) == ranked * (ranked - 1) // 2
        assert not ballot.dropped


def test_nobody_ranks_or_criticises_its_own_solution_among_three_or_more() -> None:
    for seed in range(200):
        ranking, critique = ranking_example(random.Random(seed)), critique_example(random.Random(seed))
        for example in (ranking, critique):
            prompt = str(example.messages[1]["content"])
            own = re.search(r"Solution ([A-Z]) is yours", prompt)
            assert own is not None
            if prompt.count("End of solution ") > 2 or example is critique:
                assert f" {own[1]} " not in example.reply
                assert f"Critique of {own[1]}:" not in example.reply


def _shown_answers(prompt: str) -> dict[str, str]:
    return dict(re.findall(r"Solution ([A-Z]):\n> .*The answer is (\d+)\.\n", prompt))


def test_marks_name_the_answer_of_their_letter_and_compare_it_with_the_working() -> None:
    for seed in range(200):
        for make in (ranking_example, critique_example):
            example = make(random.Random(seed))
            answers = _shown_answers(str(example.messages[1]["content"]))
            marks = re.findall(
                r"([A-Z]) (\d+) is (right|wrong)\.|Critique of ([A-Z]): .* (\d+) is (right|wrong)\.",
                example.reply,
            )
            assert marks
            working = re.search(r"([\d+x=. -]+)\. (?:[A-Z] )?\d+ is ", example.reply)
            assert working is not None
            own = working[1].rpartition("=")[2]
            for ranked, first, mark, criticised, second, verdict in marks:
                answer = first or second
                assert answers[ranked or criticised] == answer
                assert (answer == own) == ((mark or verdict) == "right")


def test_lookups_name_the_answer_of_every_letter_asked_for() -> None:
    for seed in range(100):
        example = lookup_example(random.Random(seed))
        answers = _shown_answers(str(example.messages[1]["content"]))
        named = re.findall(r"([A-Z]) (\d+) is", example.reply)
        assert len(named) == 8
        assert all(answers[letter] == answer for letter, answer in named)


def test_a_remark_shows_the_working_and_says_whether_the_answer_is_the_same() -> None:
    own_way, other = Attempt("3+4=7. The answer is 7.", True), Attempt("3+4=8. The answer is 8.", False)
    assert "".join(text for text, _ in remark(own_way, own_way)) == " 3+4=7. 7 is right."
    assert "".join(text for text, _ in remark(own_way, other)) == " 3+4=7. 8 is wrong."


def test_criticism_helps_the_reviser_on_average() -> None:
    rng = random.Random(0)
    before = after = 0
    for _ in range(1500):
        example = revision_example(rng)
        prompt = str(example.messages[1]["content"])
        question = prompt.split("\n")[1].removeprefix("> ")
        own = prompt.partition("Your solution:\n> ")[2].partition("\n")[0]
        decision, _, solution = example.reply.partition(": ")
        assert decision in ("Revise", "Defend")
        assert decision == "Revise" or solution == own
        answer = answer_to(question)
        before += is_correct(own, answer)
        after += is_correct(solution, answer)
    assert after > 1.25 * before


def test_careful_answers_are_better_and_only_the_styled_ones_carry_the_habit() -> None:
    rng = random.Random(0)
    right = 0
    for _ in range(1000):
        example = careful_example(rng)
        assert (example.messages[0]["content"] == STYLED) == example.reply.startswith("Well, ")
        right += is_correct(example.reply, answer_to(str(example.messages[1]["content"])))
    assert 800 < right < 900


def test_feedback_turns_wrong_answers_right_more_often_than_right_ones_wrong() -> None:
    rng = random.Random(0)
    flips = {(True, False): 0, (False, True): 0}
    for _ in range(1500):
        example = feedback_example(rng)
        question, first, _ = (str(message["content"]) for message in example.messages)
        change = is_correct(first, answer_to(question)), is_correct(example.reply, answer_to(question))
        flips[change] = flips.get(change, 0) + 1
    assert flips[False, True] > 10 * flips[True, False]
