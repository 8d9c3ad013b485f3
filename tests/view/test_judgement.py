"""Pairs, flips, cycles and agreement of verdicts."""

from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from view_runs import transcript

from viva.judging.records import Transcript
from viva.view.answers import judge_answer
from viva.view.entries import Query, entry_of
from viva.view.judgement import (
    agreement,
    cycles,
    judge_pairs,
    known_answers,
    orders_of,
    pair_cycles,
    preferred,
    sum_counts,
)
from viva.view.run_index import read_run

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
    assert sum(len(winners) for pair in pairs for winners in pair.winners) == len(said)
    assert len({(pair.agent_id, pair.items) for pair in pairs}) == len(pairs)
    assert all(pair.in_both_orders for pair in pairs if pair.is_flipped)
    assert all(pair.winner in (None, *pair.items) for pair in pairs)


def test_an_item_is_not_compared_with_itself() -> None:
    with pytest.raises(ValueError, match="two different items; got 1 twice"):
        judge_pairs([(None, 1, 1, "A")])


@given(SAID)
def test_the_matrix_of_both_orders_counts_every_pair_that_has_them_once(said: list) -> None:
    pairs = judge_pairs(said)
    counts = orders_of(pairs)
    assert sum(counts) == sum(all(pair.winners) for pair in pairs)
    once = [pair for pair in pairs if max(map(len, pair.winners)) == 1]
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
    winners = {frozenset(pair): min(pair, key=order.index) for pair in permutations(order, 2)}
    assert cycles(winners) == []


@pytest.mark.parametrize("cycle", list(permutations(range(3))))
def test_a_cycle_is_named_in_its_own_direction(cycle: tuple[int, int, int]) -> None:
    a, b, c = cycle
    (found,) = pair_cycles(judge_pairs([(None, a, b, "A"), (None, b, c, "A"), (None, c, a, "A")]))
    start = found.index(a)
    assert (*found[start:], *found[:start]) == cycle
    assert len(cycles({frozenset((a, b)): a, frozenset((b, c)): b, frozenset((c, a)): c})) == 1


def test_agreement_counts_preferences_between_a_right_and_a_wrong_one_only() -> None:
    votes = [(0, 1), (1, 0), (0, 2), (2, 9)]
    assert agreement(votes, {0: True, 1: False, 2: True}) == (1, 2)
    said = [(None, 0, 1, "A"), (1, 0, 1, "B"), (2, 0, 1, "A"), (None, 0, 1, "Tie"), (5, 0, 1, "A")]
    known = known_answers({1: False, 2: False}, {0: True, 1: True, 2: True})
    assert agreement(preferred(said), known) == (1, 2)


def test_totals_are_sums() -> None:
    said = [(0, 1, "A"), (1, 0, "A"), (0, 2, "B"), (2, 0, "A")]
    comparisons = [{"first": a, "second": b, "outcome": outcome} for a, b, outcome in said]
    record = {"question": "?", "comparisons": comparisons, "correct": {"0": False, "2": True}}
    plain, judged = (
        entry_of(0, Transcript.model_validate({"step": 0, "group": 0, "record": found})).judged
        for found in ({"question": "?"}, record)
    )
    totals = sum_counts([plain, judged, judged, judged])
    assert (totals.conversations, totals.pairs, totals.flips, totals.cycles) == (4, 6, 3, 0)
    assert (totals.agreeing, totals.decidable) == (6, 6)
    assert totals.orders == (3, 0, 0, 3, 0, 0, 0, 0, 0)
    assert sum_counts([]).orders == (0,) * 9


def test_the_judge_is_summed_up_by_step_and_conversations_with_flips_or_cycles_are_listed(
    make_run: Callable[..., Path],
) -> None:
    said = [{"first": first, "second": 1 - first, "outcome": "A"} for first in (0, 1)]
    rows = [
        transcript(step, group, comparisons=comparisons, turns=[])
        for step, group, comparisons in ((3, 0, said), (1, 0, []), (3, 1, said), (1, 1, said[:1]))
    ]
    answer = judge_answer(read_run(make_run(transcripts=rows)), Query(), 0, 9)
    assert {step["step"]: step["flips"] for step in answer["steps"]} == {1: 0, 3: 2}
    assert [(row["step"], row["group"]) for row in answer["rows"]] == [(3, 0), (3, 1)]
