"""Pairs, flips, cycles and agreement of verdicts."""

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.judging.ballots import Preference
from viva.judging.records import Transcript
from viva.view.answers import judge_by_step, judge_totals, telling
from viva.view.entries import entry_of
from viva.view.judgement import (
    agreement_of_comparisons,
    agreement_of_votes,
    cycles_of_ballots,
    judge_pairs,
    orders_of,
    pair_cycles,
)

SAID = st.lists(
    st.tuples(
        st.none() | st.integers(0, 2),
        st.integers(0, 3),
        st.integers(0, 3),
        st.sampled_from(["A", "B", "Tie", "invalid"]),
    ).filter(lambda item: item[1] != item[2]),
    max_size=30,
)


@given(SAID)
def test_every_comparison_is_in_one_pair_and_a_flip_needs_both_orders(said: list) -> None:
    pairs = judge_pairs(said)
    assert sum(len(pair.winners) for pair in pairs) == len(said)
    assert len({(pair.agent_id, pair.items) for pair in pairs}) == len(pairs)
    assert all(pair.in_both_orders for pair in pairs if pair.is_flipped)
    assert all(pair.winner in (None, *pair.items) for pair in pairs)


@given(SAID)
def test_the_matrix_of_both_orders_counts_every_pair_that_has_them_once(said: list) -> None:
    pairs = judge_pairs(said)
    counts = orders_of(pairs)
    assert sum(counts) == sum(len(set(pair.orders)) == 2 for pair in pairs)
    once = [pair for pair in pairs if len(pair.orders) == len(set(pair.orders))]
    flips = orders_of(once)
    assert flips[0] + flips[4] == sum(pair.is_flipped for pair in once)


@pytest.mark.parametrize(
    ("outcomes", "place"),
    [
        ("AA", 0),
        ("AB", 1),
        ("BA", 3),
        ("BB", 4),
        (("A", "Tie"), 2),
        (("invalid", "B"), 7),
        (("Tie", "Tie"), 8),
    ],
)
def test_each_pair_of_verdicts_has_its_place(outcomes: str, place: int) -> None:
    pairs = judge_pairs([(None, 0, 1, outcomes[0]), (None, 1, 0, outcomes[1])])
    assert [index for index, count in enumerate(orders_of(pairs)) if count] == [place]


@pytest.mark.parametrize(
    ("outcomes", "flipped", "winner"),
    [("AA", True, None), ("AB", False, 0), ("BA", False, 1), ("BB", True, None), (("A", "Tie"), False, 0)],
)
def test_a_flip_is_a_winner_that_changes_with_the_order(outcomes, flipped: bool, winner: int | None) -> None:
    (pair,) = judge_pairs([(None, 0, 1, outcomes[0]), (None, 1, 0, outcomes[1])])
    assert (pair.is_flipped, pair.winner) == (flipped, winner)


@given(st.permutations(range(4)))
def test_an_order_has_no_cycle(order: list[int]) -> None:
    said = [
        (None, one, other, "A" if order.index(one) < order.index(other) else "B")
        for one, other in permutations(order, 2)
    ]
    assert pair_cycles(judge_pairs(said)) == []
    votes = [Preference(one, other) for place, one in enumerate(order) for other in order[place + 1 :]]
    assert cycles_of_ballots({0: votes}) == []


@pytest.mark.parametrize("cycle", list(permutations(range(3))))
def test_a_cycle_is_named_in_its_own_direction(cycle: tuple[int, int, int]) -> None:
    a, b, c = cycle
    (found,) = pair_cycles(judge_pairs([(None, a, b, "A"), (None, b, c, "A"), (None, c, a, "A")]))
    start = found.index(a)
    assert (*found[start:], *found[:start]) == cycle
    assert len(cycles_of_ballots({7: [Preference(a, b), Preference(b, c), Preference(c, a)]})) == 1


def test_agreement_counts_preferences_between_a_right_and_a_wrong_one_only() -> None:
    votes = [(0, 1), (1, 0), (0, 2), (2, 9)]
    found = agreement_of_votes(votes, {0: True, 1: False, 2: True})
    assert (found.num_right, found.num_pairs) == (1, 2)
    said = [(None, 0, 1, "A"), (1, 0, 1, "B"), (2, 0, 1, "A"), (None, 0, 1, "Tie"), (5, 0, 1, "A")]
    found = agreement_of_comparisons(said, {1: False, 2: False}, {0: True, 1: True, 2: True})
    assert (found.num_right, found.num_pairs) == (1, 2)


PLAIN = entry_of(
    0, Transcript.model_validate({"step": 0, "group": 0, "record": {"question": "How many pens?"}})
)


def test_totals_are_sums_also_by_step() -> None:
    said = [(0, 1, "A"), (1, 0, "A"), (0, 2, "B"), (2, 0, "A")]
    comparisons = [{"first": a, "second": b, "outcome": outcome} for a, b, outcome in said]
    record = {"question": "?", "comparisons": comparisons, "correct": {"0": False, "2": True}}
    judged = [
        entry_of(0, Transcript.model_validate({"step": step, "group": 0, "record": record}))
        for step in (3, 1, 3)
    ]
    totals = judge_totals([PLAIN, *judged])
    assert (totals.conversations, totals.pairs, totals.flips, totals.cycles) == (4, 6, 3, 0)
    assert (totals.agreeing, totals.decidable) == (6, 6)
    assert totals.orders == (3, 0, 0, 3, 0, 0, 0, 0, 0)
    assert {step: sums.flips for step, sums in judge_by_step([PLAIN, *judged]).items()} == {0: 0, 1: 1, 3: 2}
    assert judge_totals([]).orders == (0,) * 9


def test_conversations_with_flips_or_cycles_are_worth_a_look() -> None:
    flips, cycles = replace(PLAIN, num_flips=1), replace(PLAIN, num_cycles=1)
    assert telling([PLAIN, flips, cycles]) == [flips, cycles]
