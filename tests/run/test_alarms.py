"""Alarms are cumulative sums of the logged metrics: closed forms, false alarms at the stated rate, exact on resume."""

import json
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.run.alarms import ALARMS, MEASURED, START, Level, StopRule, Watch, check_names, fired, read_levels

MUTUAL = {"mutual_votes": Level(reference=0.0, unit=1.0, level=4.0)}


def rows(*values: float, metric: str = "sign/mutual_votes", groups: float = 1.0) -> list[dict[str, float]]:
    return [{metric: value, "rollout/groups": groups, "rollout/void": 0.0} for value in values]


def seen(levels: dict[str, Level], table: list[dict[str, float]]) -> list[dict[str, float]]:
    watch = Watch(levels)
    return [watch.see(row) for row in table]


def test_the_sum_is_pages() -> None:
    found = [row["alarm/mutual_votes"] for row in seen(MUTUAL, rows(1.0, 2.0, 0.0, -9.0, 3.0))]
    assert found == pytest.approx([0.5 / 4, 2.0 / 4, 1.5 / 4, 0.0, 2.5 / 4])


def test_more_conversations_make_the_same_figure_weigh_more() -> None:
    (one,), (nine,) = seen(MUTUAL, rows(1.0)), seen(MUTUAL, rows(1.0, groups=9.0))
    assert (one["alarm/mutual_votes"], nine["alarm/mutual_votes"]) == pytest.approx((0.5 / 4, 2.5 / 4))


def test_an_alarm_on_both_sides_sees_a_fall_and_one_on_a_side_does_not() -> None:
    level = Level(reference=0.5, unit=0.1, level=2.0)
    ties = seen({"ties": level}, rows(*[0.3] * 3, metric="sign/ties"))
    invalid = seen({"invalid": level}, rows(*[0.3] * 3, metric="sign/invalid"))
    entropy = seen({"answer_entropy": level}, rows(*[0.3] * 3, metric="sign/answer_entropy"))
    assert [fired(row) for row in (ties[-1], invalid[-1], entropy[-1])] == [["ties"], [], ["answer_entropy"]]


def test_without_a_reference_all_steps_before_are_one_and_nothing_fires_in_the_first() -> None:
    level = {"ties": Level(reference=None, unit=0.1, level=2.0)}
    table = rows(*[0.8, 1.0] * (START // 2), metric="sign/ties")
    table += rows(0.9, metric="sign/ties", groups=2.0) + rows(0.5, 0.5, metric="sign/ties")
    found = seen(level, table)
    assert found[:START] == [{}] * START
    assert found[START] == {"alarm/ties": 0.0}
    first = 4 * math.sqrt(6 / 7) - 0.5
    assert found[START + 1]["alarm/ties"] == pytest.approx(first / 2)
    # the changed step is part of the next one's reference, (6 * 0.9 + 0.5) / 7
    second = (5.9 / 7 - 0.5) / 0.1 * math.sqrt(7 / 8) - 0.5
    assert found[START + 2]["alarm/ties"] == pytest.approx((first + second) / 2)


@given(st.lists(st.floats(-1, 1), max_size=20), st.integers(0, 20), st.booleans())
def test_a_resumed_watch_goes_on_as_if_it_had_never_stopped(
    values: list[float], cut: int, has_reference: bool
) -> None:
    level = {"mutual_votes": Level(reference=0.1 if has_reference else None, unit=0.3, level=2.0)}
    table = rows(*values)
    whole = seen(level, table)
    written = [json.loads(json.dumps(row | sums)) for row, sums in zip(table, whole, strict=True)]
    resumed = Watch(level, written[:cut])
    assert [resumed.see(row) for row in table[cut:]] == whole[cut:]


def test_steps_without_the_metric_or_without_conversations_change_nothing() -> None:
    table = [
        {"test/direct_accuracy": 1.0},
        {"sign/mutual_votes": 9.0, "rollout/groups": 2.0, "rollout/void": 2.0},
    ]
    assert seen(MUTUAL, table) == [{}, {}]


def test_honest_noise_stays_below_a_level_as_often_as_theory_says_and_a_shift_of_one_does_not() -> None:
    """Siegmund's approximation: at allowance 1/2 and level h = 6, a mean of 2 * (exp(h + 1.166) - h - 2.166), or about
    2,570 steps between false alarms of one side; a shift of one standard deviation is seen within about 13."""
    level = Level(reference=0.0, unit=1.0, level=6.0)
    rng = random.Random(0)

    def first_alarm(shift: float, num_steps: int) -> int | None:
        return first_fired(level, [rng.gauss(shift, 1.0) for _ in range(num_steps)])

    honest = [first_alarm(0.0, 100) for _ in range(200)]
    shifted = [first_alarm(1.0, 60) for _ in range(200)]
    assert sum(step is not None for step in honest) / 200 < 0.1, "100 of 2,570 steps: 4 %"
    delays = [step for step in shifted if step is not None]
    assert len(delays) == 200
    assert sum(delays) / 200 < 15


def first_fired(level: Level, values: Sequence[float], name: str = "mutual_votes") -> int | None:
    found = seen({name: level}, rows(*values, metric=ALARMS[name].metric))
    return next((step for step, row in enumerate(found) if fired(row)), None)


def test_the_runs_own_steps_are_a_reference_whose_error_fires_no_false_alarms() -> None:
    """On both sides: 8 % of 100 steps by theory. A mean of the first four steps, kept, fires in 55 %."""
    level, rng = Level(reference=None, unit=1.0, level=6.0), random.Random(0)
    honest = [first_fired(level, [rng.gauss(3.0, 1.0) for _ in range(100)], "ties") for _ in range(300)]
    assert sum(step is not None for step in honest) / 300 < 0.15
    changed = [
        first_fired(level, [rng.gauss(3.0 + 3.0 * (step >= 10), 1.0) for step in range(20)], "ties")
        for _ in range(100)
    ]
    assert sum(step is not None and step >= 10 for step in changed) > 90


def test_every_alarm_has_a_level_and_a_text() -> None:
    assert MEASURED.keys() == ALARMS.keys()
    assert all(alarm.text for alarm in ALARMS.values())


@pytest.mark.parametrize("wrong", [{"unit": 0.0}, {"level": -1.0}, {"reference": float("nan")}])
def test_numbers_that_measure_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="finite reference, a unit and a level above 0"):
        Level(**{"reference": 0.0, "unit": 1.0, "level": 1.0, **wrong})


def test_unknown_alarms_are_refused_with_the_one_that_may_be_meant(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"got 'mutual_vote'. Did you mean 'mutual_votes'\?"):
        check_names(["mutual_vote"])
    with pytest.raises(ValueError, match="Did you mean 'ties'"):
        StopRule(alarms=["tie"])
    path = tmp_path / "levels.json"
    path.write_text(json.dumps({"tiess": {"reference": 0, "unit": 1, "level": 1}}))
    with pytest.raises(ValueError, match="Did you mean 'ties'"):
        read_levels(path)


@pytest.mark.parametrize("text", ["", "[1]", '{"ties": 3}', '{"ties": {"units": 1}}'])
def test_a_file_that_holds_no_levels_is_refused(tmp_path, text: str) -> None:
    path = tmp_path / "levels.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="must be a JSON object of reference, unit and level by alarm"):
        read_levels(path)


def test_levels_are_read_back(tmp_path) -> None:
    path = tmp_path / "levels.json"
    path.write_text(json.dumps({"ties": {"reference": 0.25, "unit": 0.5, "level": 4.0}}))
    assert read_levels(path) == {"ties": Level(reference=0.25, unit=0.5, level=4.0)}


def test_a_rule_stops_on_its_alarms_only_and_keeps_the_step_before_the_change() -> None:
    rule = StopRule(alarms=["ties"])
    table = [
        {"alarm/ties": share, "alarm/invalid": 3.0} for share in (0.1, 0.0, 0.2, 0.0, 0.4, 0.9, 1.1, 0.0)
    ]
    assert rule.crossed(table[:6]) is None
    assert "the alarm ties has fired" in (rule.crossed(table[:7]) or "")
    assert rule.crossed(table), "once fired, a run stays ended"
    best = [end for end in range(1, 8) if rule.is_best(table[:end])]
    assert best == [1, 2, 4], "the last step at which the sum was 0 is kept"


def test_a_step_that_does_not_count_for_an_alarm_is_not_best_for_that() -> None:
    """Regression: agents agreed wholly in a step of a collapse, and the other alarm's 0 made it the best one."""
    rule = StopRule(alarms=["mutual_votes", "answer_votes"])
    quiet = {"alarm/mutual_votes": 0.0}
    table = [quiet | {"alarm/answer_votes": share} for share in (0.0, 0.0, 0.6, 0.8)]
    table += [quiet, {}, quiet | {"alarm/answer_votes": 0.0}, {}]
    assert [end for end in range(1, 9) if rule.is_best(table[:end])] == [1, 2, 7]
