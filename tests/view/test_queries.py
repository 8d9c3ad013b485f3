"""Filters and pages over entries."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.view.entries import Entry, entry_of
from viva.view.queries import Query, facets, page_of, parse_query, select

PLAIN = entry_of(0, {"step": 0, "group": 0, "record": {"question": "How many pens?"}})

ENTRIES = st.builds(
    lambda step, group, right, mended, reward, failures, void: replace(
        PLAIN,
        step=step,
        group=group,
        num_right=right,
        num_graded=2,
        num_mended=mended,
        reward_mean=reward,
        num_failures=failures,
        is_void=void,
    ),
    st.integers(0, 9),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(-2, 2),
    st.none() | st.floats(-1, 1),
    st.integers(0, 1),
    st.booleans(),
)


@given(st.lists(ENTRIES))
def test_right_mixed_and_wrong_part_the_graded_and_states_overlap_only_in_failures(
    entries: list[Entry],
) -> None:
    parts = [select(entries, Query(answers=answers)) for answers in ("right", "mixed", "wrong", "unknown")]
    assert sum(map(len, parts)) == len(entries)
    sound, failed, void = (select(entries, Query(state=state)) for state in ("sound", "failed", "void"))
    assert len(sound) + sum(entry in failed or entry in void for entry in entries) == len(entries)


@given(st.lists(ENTRIES), st.integers(0, 9), st.integers(0, 9), st.floats(-1, 1))
def test_bounds_hold_and_what_has_no_reward_matches_no_bound(
    entries: list[Entry], low: int, high: int, reward: float
) -> None:
    found = select(entries, Query(step_from=low, step_to=high, reward_from=reward))
    assert all(low <= entry.step <= high for entry in found)
    assert all(entry.reward_mean is not None and entry.reward_mean >= reward for entry in found)


@given(st.lists(ENTRIES), st.integers(1, 7))
def test_pages_are_the_list_in_pieces(entries: list[Entry], size: int) -> None:
    pages = [page_of(entries, page, size) for page in range(len(entries) // size + 1)]
    assert [entry for page in pages for entry in page] == entries
    assert not page_of(entries, len(entries) + 1, size)


@given(st.lists(ENTRIES))
def test_orders_sort_and_no_reward_comes_last(entries: list[Entry]) -> None:
    steps = [entry.step for entry in select(entries, Query(order="-step"))]
    assert steps == sorted(steps, reverse=True)
    for order in ("reward", "-reward"):
        rewards = [entry.reward_mean for entry in select(entries, Query(order=order))]
        known = [value for value in rewards if value is not None]
        assert rewards[: len(known)] == sorted(known, reverse=order == "-reward")


def test_a_request_is_a_query_and_empty_values_ask_for_nothing() -> None:
    assert parse_query({"page": "3", "step_from": "", "answers": ""}) == Query()
    given_query = {
        "step_from": "2",
        "reward_to": "0.5",
        "strategy": "iid",
        "text": "PENS",
        "order": "-reward",
    }
    query = parse_query(given_query)
    assert query == Query(step_from=2, reward_to=0.5, strategy="iid", text="PENS", order="-reward")
    assert select([PLAIN], Query(text="PENS")) == [PLAIN]
    assert select([PLAIN], Query(text="boxes")) == []


@pytest.mark.parametrize(
    "values",
    [
        {"step_from": "x"},
        {"reward_to": "nan"},
        {"reward_from": "inf"},
        {"answers": "some"},
        {"state": "?"},
        {"order": "1"},
    ],
)
def test_what_means_nothing_is_refused(values: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_query(values)


def test_facets_count() -> None:
    entries = [
        replace(PLAIN, step=step, strategy=name, num_pairs=2, num_flips=step)
        for step, name in ((0, "a"), (1, "b"), (2, "a"))
    ]
    counted = [{"name": "a", "count": 2}, {"name": "b", "count": 1}]
    assert facets(entries) == {"strategies": counted, "steps": [0, 2]}
    assert facets([]) == {"strategies": [], "steps": None}
