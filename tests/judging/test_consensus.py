import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.judging.ballots import Preference, Tie, Vote, agreement, count_votes, majority, map_vote

ITEMS = (0, 1, 2, 3)


@st.composite
def some_votes(draw: st.DrawFn) -> Vote:
    one, other = draw(st.lists(st.sampled_from(ITEMS), min_size=2, max_size=2, unique=True))
    return draw(st.sampled_from((Preference(one, other), Tie(one, other))))


written = st.lists(st.lists(some_votes(), max_size=8), max_size=5)
groups = written.map(
    lambda lists: {
        voter: list(count_votes(votes, items=ITEMS, own=[voter]).votes) for voter, votes in enumerate(lists)
    }
)
both_ways = pytest.mark.parametrize("leave_one_out", [False, True])


def pair(one: int, other: int) -> frozenset[int]:
    return frozenset((one, other))


def test_the_majority_is_who_has_more_than_half_with_ties_split() -> None:
    votes: list[Vote] = [Preference(0, 1), Preference(0, 1), Preference(1, 0), Tie(0, 2), Preference(2, 0)]
    assert majority(votes) == {pair(0, 1): Preference(0, 1), pair(0, 2): Preference(2, 0)}


@pytest.mark.parametrize("votes", [[], [Tie(0, 1)], [Preference(0, 1), Preference(1, 0)]])
def test_equal_halves_have_no_majority(votes: list[Vote]) -> None:
    assert majority(votes) == {}


def test_a_pair_written_in_reverse_is_the_same_preference() -> None:
    assert majority([Preference(1, 0), Preference(1, 0)]) == {pair(0, 1): Preference(1, 0)}
    same = {voter: [Preference(1, 0)] for voter in (2, 3, 4)}
    assert agreement(same, leave_one_out=False) == {2: 1.0, 3: 1.0, 4: 1.0}
    split = {2: [Preference(0, 1)], 3: [Preference(1, 0)], 4: [Preference(0, 1)]}
    assert agreement(split, leave_one_out=False) == {2: 1.0, 3: 0.0, 4: 1.0}


def test_the_own_vote_is_inside_the_papers_majority_and_outside_the_other() -> None:
    ballots = {2: [Preference(0, 1)], 3: [Preference(0, 1)], 4: [Preference(1, 0)]}
    assert agreement(ballots, leave_one_out=False) == {2: 1.0, 3: 1.0, 4: 0.0}
    # without its own vote, voters 2 and 3 each face a split of one against one
    assert agreement(ballots, leave_one_out=True) == {2: None, 3: None, 4: 0.0}


def test_a_vote_that_nobody_else_cast_counts_only_for_the_paper() -> None:
    ballots = {0: [Preference(1, 2)]}
    assert agreement(ballots, leave_one_out=False) == {0: 1.0}
    assert agreement(ballots, leave_one_out=True) == {0: None}


def test_the_paper_divides_by_every_vote_also_where_there_is_no_majority() -> None:
    ballots = {
        0: [Preference(2, 1), Preference(3, 1), Preference(3, 2)],
        1: [Preference(2, 0), Preference(3, 0), Preference(3, 2)],
        2: [Preference(1, 0), Preference(3, 0), Preference(3, 1)],
        3: [Preference(0, 1), Preference(0, 2), Preference(1, 2)],
    }
    assert agreement(ballots, leave_one_out=False) == {0: 2 / 3, 1: 2 / 3, 2: 2 / 3, 3: 0.0}


def test_the_papers_agreement_varies_within_most_groups_of_four() -> None:
    rng = random.Random(0)

    def ballot(voter: int) -> list[Preference]:
        others = [item for item in ITEMS if item != voter]
        return [Preference(*rng.sample((one, other), 2)) for one in others for other in others if one < other]

    groups = [{voter: ballot(voter) for voter in ITEMS} for _ in range(500)]
    varying = [group for group in groups if len({*agreement(group, leave_one_out=False).values()}) > 1]
    assert 400 < len(varying) < 500


@given(groups)
def test_the_papers_agreement_is_its_formula(ballots: dict[int, list[Vote]]) -> None:
    most = majority([vote for votes in ballots.values() for vote in votes])
    expected = {
        voter: sum(vote in most.values() for vote in votes) / len(votes) if votes else None
        for voter, votes in ballots.items()
    }
    assert agreement(ballots, leave_one_out=False) == expected


def test_a_tie_is_worth_half_where_the_others_decide_and_nothing_in_the_paper() -> None:
    ballots = {0: [Tie(1, 2)], 3: [Preference(1, 2)], 4: [Preference(1, 2)]}
    assert agreement(ballots, leave_one_out=True)[0] == 0.5
    assert agreement(ballots, leave_one_out=False)[0] == 0.0


def test_calling_everything_a_tie_earns_nothing_in_the_paper() -> None:
    assert agreement({voter: [Tie(0, 1)] for voter in (2, 3)}, leave_one_out=False) == {2: 0.0, 3: 0.0}


@both_ways
def test_agreement_is_the_mean_over_the_pairs_that_count(leave_one_out: bool) -> None:
    ballots = {
        0: [Preference(1, 2), Preference(1, 3), Preference(2, 3)],
        4: [Preference(1, 2), Preference(3, 1), Tie(2, 3)],
        5: [Preference(1, 2), Preference(3, 1), Tie(2, 3)],
    }
    # on the pair of 2 and 3 there is no majority without voter 0, and with it only its own half vote
    expected = 0.5 if leave_one_out else 2 / 3
    assert agreement(ballots, leave_one_out=leave_one_out)[0] == pytest.approx(expected)


@both_ways
def test_silence_has_no_agreement(leave_one_out: bool) -> None:
    assert agreement({}, leave_one_out=leave_one_out) == {}
    ballots: dict[int, list[Vote]] = {0: [], 1: [Preference(2, 3)]}
    assert agreement(ballots, leave_one_out=leave_one_out)[0] is None


@both_ways
@given(groups, st.permutations(ITEMS))
def test_relabelling_items_changes_no_agreement(
    leave_one_out: bool, ballots: dict[int, list[Vote]], names: list[int]
) -> None:
    to = dict(zip(ITEMS, names, strict=True))
    renamed = {
        voter: [map_vote(vote, to.__getitem__) for vote in votes]  # pyright: ignore[reportArgumentType]
        for voter, votes in ballots.items()
    }
    assert agreement(renamed, leave_one_out=leave_one_out) == agreement(ballots, leave_one_out=leave_one_out)


@both_ways
@given(groups)
def test_reversing_all_votes_changes_no_agreement(
    leave_one_out: bool, ballots: dict[int, list[Vote]]
) -> None:
    mirrored = {
        voter: [Preference(v.loser, v.winner) if isinstance(v, Preference) else v for v in votes]
        for voter, votes in ballots.items()
    }
    assert agreement(mirrored, leave_one_out=leave_one_out) == agreement(ballots, leave_one_out=leave_one_out)


@both_ways
@given(groups, st.randoms(use_true_random=False))
def test_the_order_of_voters_and_votes_changes_nothing(
    leave_one_out: bool, ballots: dict[int, list[Vote]], rng: random.Random
) -> None:
    voters = list(ballots)
    rng.shuffle(voters)
    shuffled = {voter: rng.sample(ballots[voter], len(ballots[voter])) for voter in voters}
    assert agreement(shuffled, leave_one_out=leave_one_out) == agreement(ballots, leave_one_out=leave_one_out)


@given(written, st.integers(2, 5))
def test_ballot_stuffing_changes_no_agreement(lists: list[list[Vote]], times: int) -> None:
    honest, stuffed = (
        {
            voter: count_votes(votes * repeats, items=ITEMS, own=[voter]).votes
            for voter, votes in enumerate(lists)
        }
        for repeats in (1, times)
    )
    for leave_one_out in (False, True):
        assert agreement(stuffed, leave_one_out=leave_one_out) == agreement(
            honest, leave_one_out=leave_one_out
        )


@given(groups)
def test_a_majority_of_the_others_is_what_is_left_without_the_voter(ballots: dict[int, list[Vote]]) -> None:
    result = agreement(ballots, leave_one_out=True)
    for voter, votes in ballots.items():
        others = majority([vote for other, those in ballots.items() if other != voter for vote in those])
        points = [
            0.5 if isinstance(vote, Tie) else float(others[key] == vote)
            for vote in votes
            if (
                key := frozenset(
                    (vote.first, vote.second) if isinstance(vote, Tie) else (vote.winner, vote.loser)
                )
            )
            in others
        ]
        assert result[voter] == (sum(points) / len(points) if points else None)


def test_double_votes_are_refused() -> None:
    with pytest.raises(ValueError, match="voter 0 has 2 votes on 1 pairs"):
        agreement({0: [Preference(1, 2), Preference(2, 1)]}, leave_one_out=True)
