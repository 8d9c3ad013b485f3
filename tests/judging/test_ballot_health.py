from typing import Any

import pytest

from viva.judging.ballots import Ballots, Item, Preference, Tie, Vote, ballot_health

CYCLE: list[Vote] = [Preference(0, 1), Preference(1, 2), Preference(2, 0)]
CHAIN: list[Vote] = [Preference(0, 1), Preference(1, 2), Preference(0, 2)]


def health_of(ballots: Ballots, **known: Any) -> dict[str, float]:
    """Figures where nothing is known of the voters but what is given."""
    nothing: dict[str, Any] = {"forward": (), "lengths": {}, "unreadable": ()}
    return ballot_health(ballots, **(nothing | known))


def test_nothing_to_count_is_left_out() -> None:
    assert health_of({}) == {}


def test_silent_voters_and_ties_have_their_own_rates() -> None:
    health = health_of({0: [], 1: [Tie(0, 2), Preference(0, 3)], 2: [], 3: [Preference(0, 1)]})
    assert health == {"invalid_rate": 0.5, "tie_rate": pytest.approx(1 / 3), "unreadable_rate": 0.0}


def test_voters_whose_lines_could_not_be_read_have_a_rate_though_others_of_their_votes_count() -> None:
    health = health_of({0: [], 1: [Preference(0, 2)]}, unreadable=[1])
    assert (health["invalid_rate"], health["unreadable_rate"]) == (0.5, 0.5)


@pytest.mark.parametrize(("votes", "rate"), [(CYCLE, 1.0), (CHAIN, 0.0)])
def test_a_cycle_of_three_is_seen_in_the_majorities(votes: list[Vote], rate: float) -> None:
    assert health_of({7: votes, 8: votes})["cyclic_triads"] == rate


def test_a_triple_with_an_undecided_pair_is_no_triple() -> None:
    assert "cyclic_triads" not in health_of({7: CYCLE, 8: [Preference(1, 0)]})


def test_cycles_are_counted_over_all_triples() -> None:
    last: list[Vote] = [Preference(item, 3) for item in (0, 1, 2)]
    assert health_of({7: CYCLE + last})["cyclic_triads"] == 0.25


def test_order_flips_compare_the_two_halves_of_the_voters() -> None:
    ballots: dict[int, list[Vote]] = {
        0: [Preference(4, 5), Preference(4, 6)],
        1: [Preference(5, 4), Preference(4, 6)],
        2: [Preference(4, 5), Preference(5, 6)],
        3: [Tie(4, 5)],
    }
    assert health_of(ballots, forward=[0, 2])["order_flips"] == 0.5
    assert "order_flips" not in health_of(ballots, forward=[0, 1, 2, 3])
    assert "order_flips" not in health_of(ballots)


def test_self_preference_looks_only_at_votes_about_own_items() -> None:
    ballots: dict[int, list[Vote]] = {
        0: [Preference(0, 1), Preference(2, 0), Preference(1, 2), Tie(0, 3)],
        1: [Preference(1, 0), Preference(1, 2)],
    }
    assert health_of(ballots)["self_preference"] == 0.75
    assert "self_preference" not in health_of({0: [Preference(1, 2)]})


def test_length_preference_is_the_share_won_by_the_longer() -> None:
    lengths: dict[Item, int] = {0: 10, 1: 20, 2: 20}
    ballots: dict[int, list[Vote]] = {
        3: [Preference(1, 0), Preference(0, 2), Preference(1, 2)],
        4: [Preference(1, 0), Preference(2, 0), Tie(1, 2), Preference(9, 0)],
    }
    assert health_of(ballots, lengths=lengths)["length_preference"] == 0.75


def test_double_votes_are_refused() -> None:
    with pytest.raises(ValueError, match="voter 0 has 2 votes on 1 pairs"):
        health_of({0: [Preference(1, 2), Preference(1, 2)]})
