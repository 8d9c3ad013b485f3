"""Fits far from the middle, cycles over comparisons of both orders, and letters at the ends of lines."""

import itertools
import math

import pytest

from viva.judging.ballots import Item, Preference, Tie, count_votes, map_vote, pair_of, pooled
from viva.judging.bradley_terry import Duel, fit_bradley_terry
from viva.judging.comparison import (
    Comparison,
    NoValidComparisonsError,
    Outcome,
    judge_accuracy,
    judge_health,
    win_minus_loss,
)
from viva.judging.ranking import parse_ranking


@pytest.mark.parametrize("weight", [1e2, 1e3, 1e4, 1e6])
@pytest.mark.parametrize("precision", [1.0, 0.1, 0.01])
def test_many_votes_that_all_agree_are_fitted_whatever_the_prior(weight: float, precision: float) -> None:
    """Regression: with 100 of them and a prior of 0.1, rounding in the objective hid that a step was good."""
    fit = fit_bradley_terry(
        [Duel(first=0, second=1, share=1.0, weight=weight)], (0, 1), prior_precision=precision
    )
    pull = weight / (1.0 + math.exp(fit.strengths[0] - fit.strengths[1]))
    assert precision * fit.strengths[0] == pytest.approx(pull, rel=1e-6)
    assert fit.strengths[1] == pytest.approx(-fit.strengths[0])


def test_weights_of_very_different_sizes_are_fitted_together() -> None:
    duels = [
        Duel(first=0, second=1, share=0.0, weight=211.0),
        Duel(first=0, second=2, share=0.0, weight=87_907.0),
        Duel(first=0, second=3, share=0.17, weight=0.0032),
        Duel(first=1, second=2, share=1.0, weight=0.022),
        Duel(first=1, second=3, share=0.82, weight=0.011),
        Duel(first=2, second=3, share=0.0, weight=70_920.0),
    ]
    for precision in (1e-4, 1e-3, 1e-2):
        strengths = fit_bradley_terry(duels, range(4), prior_precision=precision).strengths
        for item in range(4):
            pull = math.fsum(
                duel.weight * (duel.share - chance) * (1 if duel.first == item else -1)
                for duel in duels
                for chance in [1 / (1 + math.exp(strengths[duel.second] - strengths[duel.first]))]
                if item in (duel.first, duel.second)
            )
            assert precision * strengths[item] == pytest.approx(pull, abs=1e-6)


def test_the_place_of_a_show_is_fitted_only_when_asked() -> None:
    duels = [Duel(first=0, second=1, share=0.9, weight=5.0, first_shown_first=True)]
    plain, with_position = (
        fit_bradley_terry(duels, (0, 1)),
        fit_bradley_terry(duels, (0, 1), with_position=True),
    )
    assert plain.position == 0.0
    assert with_position.position > 0.1
    assert plain.strengths[0] > with_position.strengths[0] > 0
    assert len(with_position.covariance) == len(with_position.covariance[0]) == 2


def test_shares_and_weights_at_the_ends_of_their_ranges_are_allowed() -> None:
    for share in (0.0, 1.0):
        Duel(first=0, second=1, share=share, weight=0.0)
    silent = fit_bradley_terry([Duel(first=0, second=1, share=1.0, weight=0.0)], (0, 1))
    assert silent.scores == {0: 0.5, 1: 0.5}


def test_a_cycle_is_of_the_sums_over_both_orders() -> None:
    """Each agent beats the next one clearly in one order and loses a little in the other."""
    comparisons = [
        comparison
        for better, worse in ((0, 1), (1, 2), (2, 0))
        for comparison in (
            Comparison(first=worse, second=better, outcome=Outcome.B, score=1.0),
            Comparison(first=better, second=worse, outcome=Outcome.B, score=0.2),
        )
    ]
    for order in itertools.permutations(comparisons):
        assert judge_health(order)["judge/cyclic_triads"] == 1.0
    broken = [
        Comparison(first=one.second, second=one.first, outcome=one.outcome, score=one.score)
        if {one.first, one.second} == {0, 2}
        else one
        for one in comparisons
    ]
    for order in itertools.permutations(broken):
        assert judge_health(order)["judge/cyclic_triads"] == 0.0


def test_cycles_are_a_share_of_the_triples_all_of_whose_pairs_are_decided() -> None:
    def beats(better: int, worse: int) -> Comparison:
        return Comparison(first=worse, second=better, outcome=Outcome.B, score=0.5)

    cycle = [beats(0, 1), beats(1, 2), beats(2, 0)]
    ranked = [beats(0, 3), beats(1, 3)]  # decides 0, 1, 3; leaves 0, 2, 3 and 1, 2, 3 open
    assert judge_health([*cycle, *ranked])["judge/cyclic_triads"] == 0.5
    assert "judge/cyclic_triads" not in judge_health([beats(0, 1), beats(1, 2)])


def test_what_a_judge_gave_to_anything_but_a_label_is_a_mean_over_those_that_tell() -> None:
    def told(mass: float | None, place: int) -> Comparison:
        return Comparison(first=0, second=place, outcome=Outcome.TIE, score=0.0, off_set_mass=mass)

    health = judge_health([told(0.1, 1), told(None, 2), told(0.3, 3)])
    assert health["judge/off_set_mass"] == pytest.approx(0.2)
    assert "judge/off_set_mass" not in judge_health([told(None, 1)])


def test_an_error_about_missing_comparisons_tells_what_is_known_of_the_judge() -> None:
    invalid = Comparison(first=0, second=1, outcome=Outcome.INVALID, score=None)
    with pytest.raises(NoValidComparisonsError, match=r"agents \[0, 1\] have no valid comparison") as told:
        win_minus_loss([invalid], [0, 1])
    assert told.value.metrics["judge/invalid_rate"] == 1.0
    assert NoValidComparisonsError("nothing").metrics == {}


@pytest.mark.parametrize(("first_is_right", "accuracy"), [(True, 0.0), (False, 1.0)])
def test_a_judge_is_right_where_it_prefers_what_is_right(first_is_right: bool, accuracy: float) -> None:
    second_wins = Comparison(first=0, second=1, outcome=Outcome.B, score=1.0)
    assert judge_accuracy([second_wins], {0: first_is_right, 1: not first_is_right}) == {
        "judge/accuracy": accuracy,
        "judge/pair_accuracy": accuracy,
    }


@pytest.mark.parametrize("line", ["A > X", "A > X.", "1) A > X;", "- Agent A > Agent X,", "A > X\t"])
def test_any_letter_may_stand_at_the_end_of_a_line(line: str) -> None:
    assert parse_ranking(line, {"A": 0, "X": 1}).preferences == (Preference(0, 1),)
    assert parse_ranking("X > A", {"A": 0, "X": 1}).preferences == (Preference(1, 0),)


def test_votes_are_kept_in_the_order_in_which_their_pairs_were_named() -> None:
    written = [Preference(2, 1), Tie(0, 1), Preference(0, 2), Tie(1, 0), Preference(3, 0)]
    ballot = count_votes(written, items=[0, 1, 2], own=())
    assert ballot.votes == (Preference(2, 1), Tie(0, 1), Preference(0, 2))
    assert ballot.dropped == {"repeated": 1, "unknown_item": 1}
    clashing = count_votes(
        [Preference(0, 1), Preference(1, 0), Tie(0, 1), Tie(1, 2)], items=[0, 1, 2], own=[2]
    )
    assert clashing.votes == ()
    assert clashing.dropped == {"contradiction": 3, "own": 1}


def test_votes_of_a_group_are_pooled_by_voter() -> None:
    ballots = {5: [Preference(0, 1)], 2: [Tie(1, 2), Preference(2, 0)]}
    assert pooled(ballots) == [Tie(1, 2), Preference(2, 0), Preference(0, 1)]
    with pytest.raises(ValueError, match=r"voter 2 has 2 votes on 1 pairs"):
        pooled({2: [Tie(1, 2), Preference(2, 1)]})


def test_a_vote_keeps_its_direction_under_other_names() -> None:
    def renamed(item: Item) -> Item:
        return ("revised", item) if isinstance(item, int) else item

    assert map_vote(Preference(3, 1), renamed) == Preference(("revised", 3), ("revised", 1))
    assert pair_of(map_vote(Tie(3, 1), renamed)) == {("revised", 3), ("revised", 1)}
    with pytest.raises(ValueError, match="two different items"):
        map_vote(Preference(3, 1), lambda item: 0)
