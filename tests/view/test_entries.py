"""Entries of conversations: which a page lists, and which a report shows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.judging.records import Transcript
from viva.view.entries import Entry, Query, choose, count_strategies, entry_of, page_of, parse_query, select

PLAIN = entry_of(
    0, Transcript.model_validate({"step": 0, "group": 0, "record": {"question": "How many pens?"}})
)

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


@pytest.mark.parametrize(
    ("rewards", "mean"),
    [([0.0, 0.0], 0.0), ([None, 0.5], 0.5), ([None, None], None), (None, None)],
)
def test_seats_without_a_reward_are_null_and_zero_in_older_files(
    rewards: list[float | None] | None, mean: float | None
) -> None:
    row = {"step": 0, "group": 0, "void": False, "void_reason": None, "failures": [], "rewards": rewards}
    assert entry_of(0, Transcript.parse("line 1", row)).reward_mean == mean


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


def test_strategies_are_counted() -> None:
    entries = [replace(PLAIN, step=step, strategy=name) for step, name in ((0, "a"), (1, "b"), (2, "a"))]
    counted = [{"name": "a", "count": 2}, {"name": "b", "count": 1}]
    assert count_strategies(entries) == counted


RECORDED = entry_of(
    0, Transcript.model_validate({"step": 0, "group": 0, "record": {"question": "How many?"}})
)


def entries(draw: st.DrawFn) -> list[Entry]:
    places = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), unique=True).map(sorted))
    return [
        replace(
            RECORDED,
            step=step,
            group=group,
            is_void=draw(st.booleans()),
            has_record=draw(st.booleans()),
            num_failures=draw(st.integers(0, 2)),
            num_right=draw(st.integers(0, 3)),
            num_graded=draw(st.sampled_from([0, 3])),
            num_mended=draw(st.integers(-2, 2)),
            reward_min=0.0,
            reward_max=draw(st.floats(0, 2)),
            offset=offset,
        )
        for offset, (step, group) in enumerate(places)
    ]


@given(st.composite(entries)())
def test_every_choice_is_recorded_and_shown_once(found: list[Entry]) -> None:
    choices = [entry for entry, _ in choose(found)]
    assert len(choices) <= 7
    assert len({entry.offset for entry in choices}) == len(choices)
    assert all(entry.has_record for entry in choices)
    recorded = [entry for entry in found if entry.has_record]
    assert bool(choices) == bool(recorded)
    failed = any(entry.is_void or entry.num_failures for entry in recorded)
    assert failed == any(entry.is_void or entry.num_failures for entry in choices)


def test_best_and_worst_go_by_right_answers_where_they_are_known() -> None:
    rights = [1, 3, 0, 2]
    found = [replace(RECORDED, step=step, num_right=right, num_graded=3) for step, right in enumerate(rights)]
    reasons = {entry.step: reason for entry, reason in choose(found)}
    assert reasons[0] == "the first conversation of the run"
    assert reasons[3] == "the first conversation of the last step"
    assert "most agents right" in reasons[1]
    assert "fewest agents right" in reasons[2]


def test_without_answers_they_go_by_how_clearly_the_judge_decided() -> None:
    spreads = [0.5, 2.0, 0.1, 0.4]
    found = [
        replace(RECORDED, step=step, reward_min=0.0, reward_max=spread) for step, spread in enumerate(spreads)
    ]
    reasons = {entry.step: reason for entry, reason in choose(found)}
    assert "most clearly" in reasons[1]
    assert "least difference" in reasons[2]


def test_the_conversations_that_revision_mended_and_spoiled_most_are_shown() -> None:
    mended = [0, 1, 2, -1, 0]
    found = [replace(RECORDED, step=s, num_right=1, num_graded=2, num_mended=m) for s, m in enumerate(mended)]
    reasons = {entry.step: reason for entry, reason in choose(found)}
    assert reasons[2] == "revision mended the most solutions"
    assert reasons[3] == "revision spoiled the most solutions"
    assert 1 not in reasons
