"""pass@k and maj@k against the means over all choices of k answers, one by one."""

import math
import random
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.eval import at_k
from viva.eval.at_k import ladder, majority_at_k, pass_at_k, plurality

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
    monkeypatch.setattr(at_k, "comb", lambda n, k: calls.append(n) or math.comb(n, k))
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
