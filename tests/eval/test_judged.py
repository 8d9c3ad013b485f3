"""Win rates, a judge's health and agreement against closed forms and tables by hand; length control by simulation."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from viva.eval.estimates import LengthTerm, length_controlled_win_rate
from viva.eval.judged import (
    JudgedPair,
    agreement_figures,
    cohen_kappa,
    figures_of_judges,
    judge_pairs,
    judged_figures,
    paired,
)
from viva.eval.records import WRONG, Asked
from viva.eval.rubric import score_answers
from viva.judging.comparison import Comparison, Judge, JudgeError, Outcome
from viva.judging.records import Criterion

A, B, TIE, INVALID = Outcome.A, Outcome.B, Outcome.TIE, Outcome.INVALID
SCORES = {A: -1.0, B: 1.0, TIE: 0.0, INVALID: None}
MIRRORED = {A: B, B: A, TIE: TIE, INVALID: INVALID}


def answer(text, right=False):
    return replace(WRONG, text=text, right=right)


def pair(forward, backward, texts=("one", "other"), right=(False, False), known=None):
    """A pair by its verdicts: the first policy is shown as A in the first one, as B in the second."""
    return JudgedPair(
        question="q",
        known=known,
        answers=tuple(answer(*each) for each in zip(texts, right, strict=True)),
        comparisons=tuple(
            Comparison(first=first, second=1 - first, outcome=outcome, score=SCORES[outcome])
            for first, outcome in ((0, forward), (1, backward))
        ),
    )


def figures(pairs_P_N, resamples=200):
    return judged_figures(pairs_P_N, resamples=resamples, seed=0)


def values(pairs_P_N):
    return {name: figure.value for name, figure in figures(pairs_P_N).items()}


OUTCOMES = st.sampled_from([A, B, TIE, INVALID])
TEXTS = st.tuples(st.text("ab ", min_size=1, max_size=9), st.text("ab ", min_size=1, max_size=9))
PAIRS = st.builds(pair, OUTCOMES, OUTCOMES, TEXTS)
PROMPTS = st.lists(st.lists(PAIRS, min_size=1, max_size=3), min_size=1, max_size=6)


def test_every_figure_of_a_table_worked_out_by_hand():
    found = values(
        [
            [pair(A, B, ("longer", "short"), (True, False), "k")],  # the first policy twice
            [pair(A, A, ("short", "longer"), (True, False), "k")],  # a flip
            [pair(TIE, B, ("same!", "equal"))],
            [pair(INVALID, A, ("short", "longer"))],  # the second policy
        ]
    )
    assert found["win_rate"] == pytest.approx((2 + 1 + 1.5 + 0) / 7)
    assert found["win_rate/shown_first"] == pytest.approx((1 + 1 + 0.5) / 3)
    assert found["win_rate/shown_second"] == pytest.approx((1 + 0 + 1 + 0) / 4)
    assert found["tie_rate"] == pytest.approx(1 / 7)
    assert found["identical_rate"] == 0
    assert found["invalid_rate"] == pytest.approx(1 / 8)
    assert found["failed_rate"] == 0
    assert found["flip_rate"] == pytest.approx(1 / 2)
    assert found["first_shown_rate"] == pytest.approx(4 / 6)  # A of A, B, A, A, B, A
    assert found["longer_rate"] == pytest.approx((2 + 1 + 1) / 5)
    assert found["accuracy"] == pytest.approx((2 + 1) / 4)
    assert found["pair_accuracy"] == pytest.approx((1 + 0.5) / 2)
    assert "win_rate/expected" not in found


@given(pairs_P_N=PROMPTS)
def test_the_win_rate_is_the_mean_of_all_readable_points(pairs_P_N):
    points = {(0, A): 1, (0, B): 0, (1, A): 0, (1, B): 1, (0, TIE): Fraction(1, 2), (1, TIE): Fraction(1, 2)}
    said = [
        points[each.first, each.outcome]
        for pairs in pairs_P_N
        for one in pairs
        for each in one.comparisons
        if each.outcome is not INVALID
    ]
    found = figures(pairs_P_N, resamples=2)["win_rate"].value
    assert found == (pytest.approx(float(sum(said, Fraction(0)) / len(said))) if said else None)


@given(pairs_P_N=PROMPTS)
def test_swapping_the_policies_mirrors_every_win_rate_and_leaves_the_judge_as_it_is(pairs_P_N):
    swapped = [
        [
            JudgedPair(
                question=one.question,
                known=one.known,
                answers=one.answers[::-1],
                comparisons=tuple(
                    Comparison(first=1 - c.first, second=1 - c.second, outcome=c.outcome, score=c.score)
                    for c in reversed(one.comparisons)
                ),
            )
            for one in pairs
        ]
        for pairs in pairs_P_N
    ]
    found, other = figures(pairs_P_N), figures(swapped)
    mirrors = {
        "win_rate/shown_first": "win_rate/shown_second",
        "win_rate/shown_second": "win_rate/shown_first",
    }
    for name, figure in found.items():
        wanted = other[mirrors.get(name, name)]
        if name.startswith("win_rate") and figure.value is not None:
            assert wanted.value == pytest.approx(1 - figure.value, abs=1e-9)
            if figure.low is not None and name == "win_rate":
                assert (wanted.low, wanted.high) == pytest.approx((1 - figure.high, 1 - figure.low), abs=1e-9)
        else:
            assert wanted.value == (None if figure.value is None else pytest.approx(figure.value))


def test_the_expected_win_rate_is_by_the_probabilities():
    pairs = [
        JudgedPair(
            question="q",
            known=None,
            answers=(answer("x"), answer("y")),
            comparisons=(
                Comparison(first=0, second=1, outcome=A, score=-0.4, probabilities=(0.6, 0.2, 0.2)),
                Comparison(first=1, second=0, outcome=A, score=-0.2, probabilities=(0.5, 0.3, 0.2)),
            ),
        )
    ]
    found = values([pairs])
    assert found["win_rate"] == 0.5
    assert found["win_rate/expected"] == pytest.approx((0.7 + 0.4) / 2)  # p(win) + p(tie) / 2


def test_the_interval_is_that_of_resampled_prompts():
    """Prompts of 4 pairs each that agree entirely: 8 prompts carry the information of 8 verdicts, not of 64."""
    pairs_P_N = [[pair(A, B)] * 4 if place % 2 else [pair(B, A)] * 4 for place in range(8)]
    found = figures(pairs_P_N, resamples=20000)["win_rate"]
    sums = np.random.default_rng(1).binomial(8, 0.5, size=20000) / 8
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(sums, (0.025, 0.975))), abs=0.07)
    assert found.high - found.low > 0.6


# length


def likes_length(rng, num_pairs, mean, strength):
    """A judge that looks at lengths only; the first policy writes longer answers."""
    ratios = rng.normal(mean, 0.6, num_pairs)
    chances = 0.5 + 0.5 * np.tanh(0.5 * strength * ratios)
    return [
        LengthTerm(prompt=place, log_ratio=ratio, points=float(rng.random() < chance), num_verdicts=1)
        for place, (ratio, chance) in enumerate(zip(ratios, chances, strict=True))
    ]


@pytest.mark.parametrize("strength", [3.0, 1000.0])
def test_a_judge_that_only_likes_length_is_at_a_half_at_equal_length(strength):
    rngs = [np.random.default_rng(seed) for seed in range(20)]
    worlds = [likes_length(rng, 200, 0.5, strength) for rng in rngs]
    found = [length_controlled_win_rate(terms, 200, resamples=100, seed=0) for terms in worlds]
    assert all(sum(term.points for term in terms) / 200 > 0.6 for terms in worlds)
    assert np.mean([each.value for each in found]) == pytest.approx(0.5, abs=0.05)
    assert sum(each.low < 0.5 < each.high for each in found) >= 15


@given(
    points=st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=4, max_size=20),
)
def test_without_differences_in_length_it_is_the_win_rate(points):
    terms = [
        LengthTerm(prompt=place, log_ratio=0.0, points=value, num_verdicts=2)
        for place, value in enumerate(points)
    ]
    found = length_controlled_win_rate(terms, len(terms), resamples=10, seed=0)
    assert found.value == pytest.approx(sum(points) / len(points), abs=0.02)  # the prior's pull


def test_the_regression_is_where_a_general_optimiser_ends():
    terms = likes_length(np.random.default_rng(0), 200, 0.3, 2.0)
    ratios = np.array([term.log_ratio for term in terms])
    x = ratios / np.sqrt(np.mean(ratios**2))
    y = np.array([term.points for term in terms])

    def loss(parameters):
        logits = parameters[0] + parameters[1] * x
        likelihood = y * -np.logaddexp(0, -logits) + (1 - y) * -np.logaddexp(0, logits)
        return -likelihood.sum() + (parameters**2).sum() / 200

    alpha, _ = minimize(loss, np.zeros(2), method="BFGS", options={"gtol": 1e-8}).x
    found = length_controlled_win_rate(terms, 200, resamples=2, seed=0).value
    assert found == pytest.approx(1 / (1 + math.exp(-alpha)), abs=1e-6)


def test_nothing_is_said_of_equal_lengths_where_one_policy_always_writes_more():
    terms = [LengthTerm(prompt=place, log_ratio=0.5, points=1.0, num_verdicts=2) for place in range(5)]
    found = length_controlled_win_rate(terms, 5, resamples=10, seed=0)
    assert (found.value, found.low, found.high) == (None, None, None)
    assert length_controlled_win_rate([], 5, resamples=10, seed=0).value is None


# agreement


def test_kappa_of_a_table_worked_out_by_hand():
    """Cohen's own form: 20 both yes, 5 and 10 of two minds, 15 both no: p_o = 0.7, p_e = 0.5."""
    assert cohen_kappa(np.array([[20.0, 5.0], [10.0, 15.0]])) == pytest.approx(0.4)
    assert cohen_kappa(np.array([[7.0, 0.0], [0.0, 0.0]])) is None
    assert cohen_kappa(np.zeros((3, 3))) is None


def test_judges_agree_pair_by_pair_and_a_flip_is_no_winner():
    one = [[pair(A, B)], [pair(B, A)], [pair(A, A)], [pair(A, B)], [pair(INVALID, INVALID)]]
    other = [[pair(A, B)], [pair(B, A)], [pair(TIE, TIE)], [pair(B, A)], [pair(A, B)]]
    found = agreement_figures(one, other, resamples=100, seed=0)
    assert found["agreement"].value == pytest.approx(3 / 4)
    # classes 2, 1, 1 by one judge and 1, 1, 2 by the other
    expected = (2 * 1 + 1 * 1 + 1 * 2) / 16
    assert found["kappa"].value == pytest.approx((3 / 4 - expected) / (1 - expected))
    assert found["kappa"].num_problems == 4
    names = figures_of_judges({"x": one, "y": other}, resamples=10, seed=0)
    assert {"judge/x/win_rate", "judge/y/win_rate", "judges/x+y/kappa"} <= names.keys()


# judging


class Scripted(Judge):
    """A judge that prefers the text that is later in the alphabet, and fails at a word."""

    def __init__(self):
        self.asked = []

    async def compare(self, question, solutions, first, second, seed):
        self.asked.append((question, solutions[first], solutions[second], seed))
        if "crash" in solutions.values():
            raise JudgeError("no reply: 503")
        outcome = A if solutions[first] > solutions[second] else B
        return Comparison(first=first, second=second, outcome=outcome, score=SCORES[outcome])

    def described(self):
        return {"system_prompt": "", "prefill": ""}


class AnswersFirst(Scripted):
    """It prefers what it answers itself, and cannot answer one question."""

    answers_first = True

    async def answer(self, messages, seed):
        self.asked.append((messages[0]["content"], "own", seed))
        if messages[0]["content"] == "q":
            raise JudgeError("no reply: 504")
        return "a"

    async def compare(self, question, solutions, first, second, seed):
        if solutions[first] == solutions[second]:
            return Comparison(first=first, second=second, outcome=TIE, score=0.0, was_asked=False)
        assert self.own_answer == "a"
        outcome = A if solutions[first] == self.own_answer else B
        return Comparison(first=first, second=second, outcome=outcome, score=SCORES[outcome])

    async def score(self, question, text, criterion, seed):
        return float(text == self.own_answer)


async def test_a_judge_that_answers_first_does_so_once_a_prompt_and_one_that_cannot_gives_no_verdict():
    def answered(**texts):
        return [Asked(question=q, answer=None, answers=tuple(map(answer, own))) for q, own in texts.items()]

    judge = AnswersFirst()
    first, second = answered(p="ab", q="x", same="s"), answered(p="ba", q="y", same="s")
    p, q, _ = await judge_pairs(judge, paired(first, second), seed=1)
    assert [each[:2] for each in judge.asked] == [("p", "own"), ("q", "own")]
    assert [each.points for each in p] == [[1.0, 1.0], [0.0, 0.0]]
    assert [each.failure for each in q[0].comparisons] == ["no reply: 504"] * 2

    judge.asked.clear()
    ((one, other), (failed,)) = await score_answers(
        judge, [Criterion(text="is right")] * 2, first[:2], seed=1
    )
    assert [each[:2] for each in judge.asked] == [("p", "own"), ("q", "own")]
    assert [[each.value for each in scores] for scores in (one, other)] == [[1.0, 1.0], [0.0, 0.0]]
    assert [(each.value, each.failure) for each in failed] == [(None, "no reply: 504")] * 2


async def test_every_pair_is_judged_in_both_orders_and_a_judge_that_fails_is_no_verdict():
    first = [
        Asked(question=q, answer=None, answers=(answer(text),)) for q, text in (("p", "b"), ("q", "crash"))
    ]
    second = [Asked(question=q, answer=None, answers=(answer(text),)) for q, text in (("p", "a"), ("q", "x"))]
    judge = Scripted()
    judged = await judge_pairs(judge, paired(first, second), seed=1)
    assert [each[:3] for each in judge.asked if each[0] == "p"] == [("p", "b", "a"), ("p", "a", "b")]
    assert len({each[3] for each in judge.asked}) == 4
    (good,), (bad,) = judged
    assert good.points == [1.0, 1.0]
    assert [each.failure for each in bad.comparisons] == ["no reply: 503"] * 2
    assert {each.outcome for each in bad.comparisons} == {INVALID}
    found = values(judged)
    assert (found["win_rate"], found["failed_rate"], found["invalid_rate"]) == (1.0, 0.5, 0.5)
