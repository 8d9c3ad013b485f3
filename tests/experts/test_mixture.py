import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from viva.experts.estimation import check_mixture
from viva.experts.estimation import mixture_factors as factors_of

names = st.sampled_from(["iid", "hint", "feedback", "talk"])
counts = st.dictionaries(names, st.integers(0, 40), min_size=1)
weights = st.floats(0, 1e6, allow_nan=False)


@st.composite
def mixtures(draw):
    n = draw(counts)
    w = {name: draw(weights) for name in [*n, "unused"]}
    assume(any(w.values()))
    return n, w


def mixture_factors(n, mixture):
    """Factors given how many samples each strategy has."""
    factors = factors_of([name for name, count in n.items() for _ in range(count)], mixture)
    assert list(factors) == sorted(name for name, count in n.items() if count)
    return factors


def mean_factor(n, factors):
    return math.fsum(n[name] * factors[name] for name in factors) / sum(n.values())


@given(mixtures())
def test_the_mean_factor_over_the_samples_is_one(mixture):
    n, w = mixture
    assume(any(n[name] and w[name] > 0 for name in n))
    assert mean_factor(n, mixture_factors(n, w)) == pytest.approx(1)


@given(mixtures())
def test_present_strategies_share_the_batch_by_their_weights(mixture):
    n, w = mixture
    total = math.fsum(w[name] for name in n if n[name])
    assume(total > 1e-3)
    factors = mixture_factors(n, w)
    for name in factors:
        assert n[name] * factors[name] / sum(n.values()) == pytest.approx(w[name] / total)


@given(mixtures(), st.floats(0.001, 1000))
def test_only_relative_weights_count(mixture, scale):
    n, w = mixture
    scaled = {name: weight * scale for name, weight in w.items()}
    assume(max(w.values()) > 1e-200)
    assert mixture_factors(n, scaled) == pytest.approx(mixture_factors(n, w))


@given(counts)
def test_without_weights_every_sample_counts_once(n):
    assert mixture_factors(n, None) == {name: 1.0 for name in n if n[name]}


@given(counts)
def test_weights_like_the_numbers_of_samples_change_nothing(n):
    assume(any(n.values()))
    assert mixture_factors(n, n) == pytest.approx({name: 1.0 for name in n if n[name]})


def test_a_strategy_without_samples_leaves_its_share_to_the_others():
    assert mixture_factors({"iid": 4, "hint": 0}, {"iid": 1, "hint": 3}) == {"iid": 1.0}


def test_nothing_is_trained_when_only_strategies_of_weight_zero_have_samples():
    assert mixture_factors({"iid": 0, "hint": 3}, {"iid": 1, "hint": 0}) == {"hint": 0.0}
    assert mixture_factors({}, {"iid": 1}) == {}


def test_the_seeds_example_has_the_values_one_computes_by_hand():
    assert mixture_factors({"iid": 6, "hint": 2}, {"iid": 0.5, "hint": 0.5}) == pytest.approx(
        {"iid": 0.5 * 8 / 6, "hint": 0.5 * 8 / 2}
    )


@pytest.mark.parametrize(
    ("mixture", "complaint"),
    [
        ({}, "at least one strategy"),
        ({"iid": -1.0}, "'iid' must be a finite number of 0 or more; got -1"),
        ({"iid": math.nan}, "'iid' must be a finite number"),
        ({"iid": math.inf}, "'iid' must be a finite number"),
        ({"iid": 0.0, "hint": 0.0}, "must be above 0"),
    ],
)
def test_weights_that_define_no_mixture_are_refused(mixture, complaint):
    with pytest.raises(ValueError, match=complaint):
        check_mixture(mixture)
    with pytest.raises(ValueError, match=complaint):
        mixture_factors({"iid": 1}, mixture)


def test_a_strategy_with_samples_and_no_weight_is_refused():
    with pytest.raises(ValueError, match=r"'hint' has samples but no mixture weight.*\['iid'\]"):
        mixture_factors({"iid": 1, "hint": 1}, {"iid": 1.0})
