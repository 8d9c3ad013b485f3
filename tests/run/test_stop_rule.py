"""The stop rule is a function of the logged metrics: it waits, it tells what crossed, it knows the best step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.run.alarms import WINDOW, StopRule


def rows(*values: float) -> list[dict[str, float]]:
    return [{"reward_truth_gap": value} for value in values]


def test_it_says_nothing_before_its_window_is_full():
    rule = StopRule(levels={"reward_truth_gap": 0.4})
    assert rule.crossed(rows(*[1.0] * (WINDOW - 1))) is None
    assert "1.000" in (rule.crossed(rows(*[1.0] * WINDOW)) or "")


def test_one_bad_step_does_not_stop_and_steps_without_the_metric_do_not_count():
    rule = StopRule(levels={"reward_truth_gap": 0.4})
    assert rule.crossed(rows(0.1, 0.1, 0.9, 0.1, 0.1)) is None
    assert rule.crossed([{"loss": 1.0}] * 20) is None


def test_either_metric_stops():
    rule = StopRule(levels={"reward_truth_gap": 0.4, "flip/right_to_wrong": 0.2})
    flipped = [{"reward_truth_gap": 0.1, "flip/right_to_wrong": 0.5}] * WINDOW
    assert "flip/right_to_wrong" in (rule.crossed(flipped) or "")


@given(st.lists(st.floats(0, 1), min_size=WINDOW, max_size=30))
def test_the_best_row_is_the_first_with_the_lowest_window_mean(values: list[float]):
    rule = StopRule(levels={"reward_truth_gap": 0.5})
    table = rows(*values)
    means = [sum(values[end - WINDOW : end]) for end in range(WINDOW, len(values) + 1)]
    marked = [end for end in range(1, len(values) + 1) if rule.is_best(table[:end])]
    assert marked, "the first full window is best so far"
    assert means[marked[-1] - WINDOW] <= min(means) + 1e-9


@pytest.mark.parametrize(
    ("levels", "match"),
    [
        ({}, "at least one level"),
        ({"reward_truth_gab": 0.4}, "Did you mean 'reward_truth_gap'"),
        ({"reward_truth_gap": 0.0}, "above 0"),
        ({"reward_truth_gap": float("nan")}, "above 0"),
    ],
)
def test_a_rule_that_cannot_work_is_rejected(levels: dict[str, float], match: str):
    with pytest.raises(ValueError, match=match):
        StopRule(levels=levels)
