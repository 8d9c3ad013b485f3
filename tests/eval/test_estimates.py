"""Estimates at k against the means over all choices of k answers, and intervals by resampling problems."""

import math
import random
from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.eval import estimates
from viva.eval.estimates import compare, ladder, majority_at_k, pass_at_k, plurality, summarise

VOTES = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.booleans()), min_size=1, max_size=8
)
"""Any answers; one vote may be graded both ways."""


def by_enumeration(votes, k, value):
    chosen = [value(subset) for subset in combinations(votes, k)]
    return sum(chosen) / len(chosen)


def most_frequent_is_right(subset):
    """Each vote that is most frequent wins its share, and counts by the share of right answers that say it."""
    counts = Counter(vote for vote, _ in subset if vote is not None)
    if not counts:
        return 0.0
    winners = [vote for vote, count in counts.items() if count == max(counts.values())]
    shares = []
    for winner in winners:
        graded = [right for vote, right in subset if vote == winner]
        shares.append(sum(graded) / len(graded))
    return sum(shares) / len(winners)


@given(votes=VOTES, data=st.data())
def test_maj_at_k_is_the_mean_over_all_choices(votes, data):
    k = data.draw(st.integers(1, len(votes)))
    assert majority_at_k(votes, k) == pytest.approx(
        by_enumeration(votes, k, most_frequent_is_right), abs=1e-12
    )


@given(votes=VOTES, data=st.data())
def test_pass_at_k_is_the_mean_over_all_choices(votes, data):
    k = data.draw(st.integers(1, len(votes)))
    wanted = by_enumeration(votes, k, lambda subset: float(any(right for _, right in subset)))
    assert pass_at_k(len(votes), sum(right for _, right in votes), k) == pytest.approx(wanted, abs=1e-12)


@given(votes=VOTES)
def test_the_plurality_is_maj_at_n(votes):
    assert plurality(votes) == pytest.approx(majority_at_k(votes, len(votes)), abs=1e-12)
    assert plurality(votes) == pytest.approx(most_frequent_is_right(votes), abs=1e-12)


@given(votes=VOTES, seed=st.integers(0, 9))
def test_the_order_of_answers_decides_nothing(votes, seed):
    shuffled = random.Random(seed).sample(votes, len(votes))
    for k in range(1, len(votes) + 1):
        assert majority_at_k(shuffled, k) == majority_at_k(votes, k)


@given(num_answers=st.integers(1, 300), data=st.data())
def test_pass_at_k_is_a_chance_that_grows_with_k(num_answers, data):
    num_right = data.draw(st.integers(0, num_answers))
    k = data.draw(st.integers(1, num_answers))
    chance = pass_at_k(num_answers, num_right, k)
    assert 0.0 <= chance <= 1.0
    assert chance <= pass_at_k(num_answers, num_right, min(k + 1, num_answers))
    assert pass_at_k(num_answers, num_right, 1) == pytest.approx(num_right / num_answers)
    assert (chance == 0.0) == (num_right == 0)


@given(
    votes=st.lists(st.sampled_from([("right", True), ("b", False), (None, False)]), min_size=1, max_size=40)
)
def test_maj_at_1_is_the_share_of_right_answers(votes):
    assert majority_at_k(votes, 1) == pytest.approx(sum(right for _, right in votes) / len(votes))


def test_values_known_from_the_paper_and_by_hand():
    assert pass_at_k(10, 3, 10) == 1.0
    assert pass_at_k(5, 1, 2) == pytest.approx(0.4)
    assert pass_at_k(200, 1, 100) == pytest.approx(0.5)
    votes = [("72", True), ("72", True), ("70", False)]
    assert majority_at_k(votes, 2) == pytest.approx((1.0 + 0.5 + 0.5) / 3)
    assert majority_at_k(votes, 3) == 1.0


def test_answers_that_say_nothing_cast_no_vote_but_count():
    assert plurality([(None, False)] * 5 + [("72", True)]) == 1.0
    assert plurality([(None, False)] * 3) == 0.0
    assert majority_at_k([(None, False), ("72", True)], 1) == 0.5


def test_many_answers_are_counted_with_little_work(monkeypatch):
    votes = [("right", True)] * 60 + [(str(number % 80), False) for number in range(196)]
    calls = []
    monkeypatch.setattr(estimates, "comb", lambda n, k: calls.append(n) or math.comb(n, k))
    assert 0.99 < majority_at_k(votes, 128) <= 1.0
    assert len(calls) < 500_000


def test_the_ladder_ends_with_all_answers():
    assert [ladder(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [
        *([], [2], [2, 3], [2, 4]),
        *([2, 4, 5], [2, 4, 8], [2, 4, 8, 9]),
    ]


@pytest.mark.parametrize("k", [0, -1, 4])
def test_k_out_of_range_is_refused(k):
    with pytest.raises(ValueError, match="k must be from 1 to the number of answers, 3"):
        pass_at_k(3, 1, k)
    with pytest.raises(ValueError, match="k must be from 1 to the number of answers, 3"):
        majority_at_k([("a", True)] * 3, k)


def test_more_right_answers_than_answers_are_refused():
    with pytest.raises(ValueError, match="the number of right answers must be from 0 to 3; got 4"):
        pass_at_k(3, 4, 1)


TERMS = st.lists(st.tuples(st.integers(0, 3), st.integers(3, 5)), min_size=2, max_size=12)


def shares(values):
    return [(float(value), 1.0) for value in values]


def test_a_figure_is_a_ratio_of_sums_over_problems():
    figure = summarise({"a": [(1, 4), (2, 2), (0, 0)]}, resamples=200, seed=0)["a"]
    assert figure.value == 0.5
    assert figure.num_problems == 2


def test_the_quantiles_are_those_of_all_draws_from_three_problems():
    values = (0.0, 0.25, 1.0)
    means = sorted(sum(draw) / 3 for draw in product(values, repeat=3))
    figure = summarise({"a": shares(values)}, resamples=20_000, seed=1)["a"]
    # the 27 draws have the quantiles 0 (up to 1/27 of them) and 1 (from 26/27 on)
    assert (figure.low, figure.high) == (means[0], means[-1])


def test_an_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        figure = summarise({"a": shares(rng.random(60) < 0.4)}, resamples=300, seed=trial)["a"]
        hits += figure.low <= 0.4 <= figure.high
    assert 0.89 <= hits / 200 <= 0.99


@given(terms=TERMS)
def test_the_interval_holds_the_extremes_of_no_problem_outside(terms):
    figure = summarise({"a": terms}, resamples=200, seed=0)["a"]
    ratios = [above / below for above, below in terms]
    if figure.low is not None:
        assert min(ratios) - 1e-9 <= figure.low <= figure.high <= max(ratios) + 1e-9


@given(terms=TERMS)
def test_the_same_seed_gives_the_same_interval(terms):
    assert summarise({"a": terms}, resamples=100, seed=3) == summarise({"a": terms}, resamples=100, seed=3)


def test_where_all_problems_agree_there_is_no_interval():
    figure = summarise({"a": shares([1.0] * 9)}, resamples=100, seed=0)["a"]
    assert (figure.value, figure.low, figure.high) == (1.0, None, None)


def test_a_figure_without_anything_below_the_line_has_no_value():
    figure = summarise({"a": [(0, 0), (0, 0)]}, resamples=100, seed=0)["a"]
    assert (figure.value, figure.low, figure.num_problems) == (None, None, 0)


def test_a_figure_that_most_draws_do_not_have_gets_no_interval():
    terms = [(1, 2), *[(0, 0)] * 9]
    figure = summarise({"a": terms}, resamples=400, seed=0)["a"]
    assert figure.value == 0.5
    assert figure.low is None


def test_figures_keep_their_order_and_may_be_of_different_problems():
    figures = {"b": shares([0, 1]), "a": shares([0, 1, 1]), "c": shares([1, 0])}
    assert list(summarise(figures, resamples=100, seed=0)) == ["b", "a", "c"]


def test_a_constant_gain_on_every_problem_has_no_spread_when_paired():
    hard = np.linspace(0, 0.8, 30)
    found = compare({"a": shares(hard + 0.1)}, {"a": shares(hard)}, resamples=500, seed=0)["a"]
    assert found.difference == pytest.approx(0.1)
    assert found.low is None
    noisy = hard + 0.1 + np.tile([0.01, -0.01], 15)
    found = compare({"a": shares(noisy)}, {"a": shares(hard)}, resamples=500, seed=0)["a"]
    alone = summarise({"a": shares(noisy)}, resamples=500, seed=0)["a"]
    assert found.low == pytest.approx(0.1, abs=0.01)
    assert found.high - found.low < (alone.high - alone.low) / 10


def test_only_what_both_have_is_compared_and_the_sign_is_first_less_second():
    found = compare({"a": shares([1, 1]), "b": shares([0, 1])}, {"a": shares([0, 1])}, resamples=100, seed=0)
    assert list(found) == ["a"]
    assert (found["a"].value, found["a"].against, found["a"].difference) == (1.0, 0.5, 0.5)


def test_a_difference_to_nothing_is_nothing():
    found = compare({"a": [(1, 1), (0, 1)]}, {"a": [(0, 0), (0, 0)]}, resamples=100, seed=0)["a"]
    assert (found.value, found.against, found.difference, found.low) == (0.5, None, None, None)


def test_other_numbers_of_problems_cannot_be_compared():
    with pytest.raises(ValueError, match="a is of 2 problems here and 3 there"):
        compare({"a": shares([1, 1])}, {"a": shares([1, 1, 1])}, resamples=100, seed=0)


def test_no_problems_are_refused():
    with pytest.raises(ValueError, match="a needs at least one problem"):
        summarise({"a": []}, resamples=100, seed=0)


def test_more_draws_than_are_held_at_a_time_are_all_counted():
    figure = summarise({"a": shares([0, 1])}, resamples=1234, seed=0)["a"]
    assert (figure.low, figure.high) == (0.0, 1.0)
    assert not math.isnan(figure.low)
