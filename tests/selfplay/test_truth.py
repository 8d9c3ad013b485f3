"""Figures about the truth: closed cases, symmetry, and scipy's formula worked by hand."""

import math

from hypothesis import assume, given
from hypothesis import strategies as st

from viva.judging.ballots import Preference, Tie, ballot_accuracy
from viva.judging.comparison import rank_correlation, reward_truth_gap
from viva.rewards.base import flips

groups = st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=7)


def _split(rows: list[tuple[int, bool]]) -> tuple[dict[int, float], dict[int, bool]]:
    return {i: float(s) for i, (s, _) in enumerate(rows)}, {i: c for i, (_, c) in enumerate(rows)}


def test_flips_count_only_where_there_was_something_to_lose_or_win():
    assert flips({0: True, 1: True, 2: False, 3: False}, {0: True, 1: False, 2: True, 3: False}) == {
        0: {"flip/right_to_wrong": 0.0},
        1: {"flip/right_to_wrong": 1.0},
        2: {"flip/wrong_to_right": 1.0},
        3: {"flip/wrong_to_right": 0.0},
    }


def test_gap_of_scores_that_follow_ignore_and_oppose_the_truth():
    correct = {0: True, 1: False}
    assert reward_truth_gap({0: 0.9, 1: 0.1}, correct) == 0.0
    assert reward_truth_gap({0: 0.5, 1: 0.5}, correct) == 0.5
    assert reward_truth_gap({0: 0.1, 1: 0.9}, correct) == 1.0
    assert reward_truth_gap({0: 0.1, 1: 0.9}, {0: True, 1: True}) is None


@given(groups)
def test_negated_scores_mirror_the_gap_and_the_correlation(rows: list[tuple[int, bool]]):
    scores, correct = _split(rows)
    negated = {agent_id: -score for agent_id, score in scores.items()}
    gap = reward_truth_gap(scores, correct)
    assume(gap is not None)
    assert gap is not None
    mirrored = reward_truth_gap(negated, correct)
    assert mirrored is not None
    assert math.isclose(gap + mirrored, 1.0)
    rho, opposite = rank_correlation(scores, correct), rank_correlation(negated, correct)
    assert (rho is None) == (opposite is None)
    if rho is not None and opposite is not None:
        assert math.isclose(rho, -opposite, abs_tol=1e-12)
        assert -1.0 - 1e-12 <= rho <= 1.0 + 1e-12


def test_correlation_of_four_agents_by_hand():
    # ranks of the scores 4 3 2 1, of being right 3.5 3.5 1.5 1.5: covariance 4, variances 5 and 4
    rho = rank_correlation({0: 0.9, 1: 0.7, 2: 0.3, 3: 0.1}, {0: True, 1: True, 2: False, 3: False})
    assert rho is not None
    assert math.isclose(rho, 4 / math.sqrt(20))


def test_no_correlation_without_variation():
    assert rank_correlation({0: 0.5, 1: 0.5}, {0: True, 1: False}) is None
    assert rank_correlation({0: 0.1, 1: 0.5}, {0: True, 1: True}) is None


def test_accuracy_of_ballots_counts_only_votes_on_a_right_and_a_wrong_solution():
    correct = {0: True, 1: False, 2: True}
    votes = (Preference(0, 1), Tie(1, 2), Preference(0, 2), Preference(("revised", 0), ("initial", 0)))
    assert ballot_accuracy({0: votes[:2], 1: (Preference(1, 2),)}, correct) == (1 + 0.5 + 0) / 3
    assert ballot_accuracy({0: votes[2:]}, correct) is None
