import itertools
import random
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from viva.judging.ballots import (
    Item,
    Preference,
    Tie,
    Vote,
    count_votes,
    map_vote,
    pair_of,
    pooled,
)

ITEMS: list[Item] = [0, 1, 2, ("initial", 0), ("revised", 0)]

items = st.sampled_from(ITEMS)


@st.composite
def some_votes(draw: st.DrawFn) -> Vote:
    one, other = draw(st.lists(items, min_size=2, max_size=2, unique=True))
    return draw(st.sampled_from((Preference(one, other), Preference(other, one), Tie(one, other))))


ballots = st.lists(some_votes(), max_size=12)


def test_a_tie_is_the_same_in_both_orders_and_a_preference_is_not() -> None:
    assert Tie(0, 1) == Tie(1, 0)
    assert len({Tie(0, 1), Tie(1, 0)}) == 1
    assert Preference(0, 1) != Preference(1, 0)
    assert Tie(0, 1) != Preference(0, 1)
    assert Tie(0, 1) != "tie"


@pytest.mark.parametrize("kind", [Preference, Tie])
def test_nothing_is_compared_with_itself(kind: type[Vote]) -> None:
    with pytest.raises(ValueError, match=r"two different items; got 3 twice"):
        kind(3, 3)


@given(ballots)
def test_every_vote_is_kept_or_counted_once(votes: list[Vote]) -> None:
    allowed = [0, 1, ("initial", 0)]
    ballot = count_votes(votes, items=allowed, own=[1])
    assert len(ballot.votes) + sum(ballot.dropped.values()) == len(votes)
    assert all(count > 0 for count in ballot.dropped.values())
    assert len({pair_of(vote) for vote in ballot.votes}) == len(ballot.votes)
    assert all(pair_of(vote) <= {0, ("initial", 0)} for vote in ballot.votes)


@given(ballots)
def test_a_counted_ballot_stays_as_it_is(votes: list[Vote]) -> None:
    ballot = count_votes(votes, items=ITEMS)
    again = count_votes(ballot.votes, items=ITEMS)
    assert again.votes == ballot.votes
    assert again.dropped == {}


@given(ballots, st.integers(1, 4), st.randoms(use_true_random=False))
def test_repeating_and_reordering_lines_changes_no_vote(
    votes: list[Vote], times: int, rng: random.Random
) -> None:
    stuffed = votes * times
    rng.shuffle(stuffed)
    assert set(count_votes(stuffed, items=ITEMS).votes) == set(count_votes(votes, items=ITEMS).votes)


@given(ballots, st.permutations(ITEMS))
def test_relabelling_permutes_the_ballot(votes: list[Vote], names: list[Item]) -> None:
    to = dict(zip(ITEMS, names, strict=True)).__getitem__
    renamed = count_votes([map_vote(vote, to) for vote in votes], items=ITEMS, own=[to(0)])
    ballot = count_votes(votes, items=ITEMS, own=[0])
    assert renamed.votes == tuple(map_vote(vote, to) for vote in ballot.votes)
    assert renamed.dropped == ballot.dropped


@pytest.mark.parametrize(
    ("votes", "kept", "dropped"),
    [
        ([Preference(0, 1), Preference(0, 1)], [Preference(0, 1)], {"repeated": 1}),
        ([Preference(0, 1), Preference(1, 0)], [], {"contradiction": 2}),
        ([Preference(0, 1), Tie(1, 0), Preference(0, 1)], [], {"contradiction": 2, "repeated": 1}),
        ([Tie(0, 1), Tie(1, 0)], [Tie(0, 1)], {"repeated": 1}),
        ([Preference(0, 9)], [], {"unknown_item": 1}),
        ([Preference(0, 2), Tie(2, 1), Preference(1, 0)], [Preference(1, 0)], {"own": 2}),
    ],
)
def test_every_cause_has_its_name(votes: list[Vote], kept: list[Vote], dropped: dict[str, int]) -> None:
    ballot = count_votes(votes, items=[0, 1, 2], own=[2])
    assert list(ballot.votes) == kept
    assert ballot.dropped == dropped


def test_votes_are_pooled_by_voter_whatever_the_order_of_arrival() -> None:
    assert pooled({2: [Tie(0, 1)], 0: [Preference(1, 2)]}) == [Preference(1, 2), Tie(0, 1)]


def test_two_votes_of_one_voter_on_a_pair_are_refused() -> None:
    with pytest.raises(ValueError, match=r"voter 3 has 2 votes on 1 pairs\. Count .* count_votes"):
        pooled({3: [Preference(0, 1), Preference(1, 0)]})


@given(some_votes())
def test_votes_survive_the_way_through_json(vote: Vote) -> None:
    adapter = TypeAdapter[Vote](Vote)
    assert adapter.validate_json(adapter.dump_json(vote)) == vote
    assert adapter.validate_python(asdict(vote)) == vote


@pytest.mark.parametrize(
    "data",
    [
        {"winner": 0},
        {"winner": 0, "second": 1},
        {"winner": 1, "loser": 1},
        {"winner": "A", "loser": 1},
        {"first": ["a", "b"], "second": 0},
    ],
)
def test_what_is_no_vote_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        TypeAdapter[Vote](Vote).validate_python(data)


def test_a_long_ballot_is_counted_in_linear_time() -> None:
    honest = [Preference(one, other) for one, other in itertools.combinations(range(26), 2)]
    assert count_votes(honest * 300, items=range(26)).dropped == {"repeated": 299 * len(honest)}
