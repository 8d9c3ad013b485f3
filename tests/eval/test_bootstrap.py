"""Intervals by resampling problems: what they cover, what is paired, and when there are none."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.eval.bootstrap import compare, summarise

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
