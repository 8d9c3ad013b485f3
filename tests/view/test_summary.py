"""The headline of a run, in a line and on the page's summary."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from viva.view.run_index import read_run
from viva.view.summary import Gain, gain_of, headline_text, summary_answer

MakeRun = Callable[..., Path]
ACCURACY = "test/direct_accuracy"


def cards(folder: Path, kind: str) -> dict[str, tuple[str, str]]:
    return {card["title"]: (card["value"], card["below"]) for card in summary_answer(read_run(folder))[kind]}


def test_accuracy_stands_before_and_after_with_intervals(make_finished_run: MakeRun) -> None:
    rows = [
        {"step": 0, ACCURACY: 0.40, f"{ACCURACY}_stderr": 0.03},
        {"step": 9, "test/direct_questions": 268},
        {"step": 5, ACCURACY: 0.99, f"{ACCURACY}_stderr": 0.0},
        {"step": 9, ACCURACY: 0.52, f"{ACCURACY}_stderr": 0.04},
    ]
    folder = make_finished_run(metrics=rows)
    assert cards(folder, "accuracy") == {
        "before (step 0)": ("40.0 %", "95 % interval 34.1 to 45.9 %"),
        "after (step 9)": ("52.0 %", "95 % interval 44.2 to 59.8 %"),
        "gain": ("+12.0 points", "95 % interval +2.2 to +21.8"),
    }
    assert summary_answer(read_run(folder))["questions"] == 268
    gain = gain_of(read_run(folder), ACCURACY)
    assert gain is not None
    assert (gain.difference, gain.half_width) == pytest.approx((0.12, 1.959964 * 0.05))


def test_the_headline_in_one_line(make_finished_run: MakeRun) -> None:
    rows = [
        {"step": 0, ACCURACY: 0.45, f"{ACCURACY}_stderr": 0.02},
        {"step": 20, ACCURACY: 0.6, f"{ACCURACY}_stderr": 0.0},
    ]
    assert headline_text(make_finished_run(metrics=rows)) == (
        "held-out accuracy, asked directly: 45.0 % ± 3.9 before, 60.0 % after 20 steps "
        "(+15.0 points; intervals are 95 %)"
    )


def test_conversations_are_told_of_where_they_were_measured(make_finished_run: MakeRun) -> None:
    rows = [
        {"step": 0, ACCURACY: 0.45, "test/conversation/rank_correlation": 0.25},
        {"step": 0, "test/conversation/correct/final": 0.5, "rank_correlation": -0.75},
        {"step": 20, ACCURACY: 0.6, "test/conversation/rank_correlation": -0.125},
        {"step": 20, "test/conversation/correct/final": 0.75},
    ]
    folder = make_finished_run(metrics=rows)
    assert (headline_text(folder) or "").splitlines()[1:] == [
        "held-out conversations: right at the end 50.0 % before, 75.0 % after; rank correlation of scores with being "
        "right +0.25 before, -0.12 after"
    ]
    health = cards(folder, "health")
    assert health["held-out, right after a conversation (step 20)"] == ("75.0 %", "at first 50 %")
    assert health["rank correlation of scores with being right (step 20)"] == ("-0.12", "at first +0.25")


def test_a_warm_up_tells_the_form_of_replies_by_segment_and_the_judge_before_and_after(
    make_finished_run: MakeRun,
) -> None:
    form = {"ok": 0.5, "ranking/ok": 0.25, "critique/ok": 0.75}
    rows = [
        {"step": step, ACCURACY: 0.5, "test/judge/accuracy": 0.5 + share, "test/judge/position_bias": 0.875}
        | {f"test/conversation/parse/{name}": value + share for name, value in form.items()}
        for step, share in ((0, 0.0), (20, 0.25))
    ]
    assert (headline_text(make_finished_run(metrics=rows)) or "").splitlines()[1:] == [
        "held-out conversations: replies read as asked 50.0 % before, 75.0 % after; critique 75.0 % before, 100.0 % "
        "after; ranking 25.0 % before, 50.0 % after",
        "held-out judgements: right 50.0 % before, 75.0 % after; verdicts that flip with the order 87.5 % before, "
        "87.5 % after",
    ]


def test_temperature_0_and_the_majority_stand_beside_the_headline(make_finished_run: MakeRun) -> None:
    rows = [
        {"step": step, ACCURACY: 0.5 + share, f"{ACCURACY}_greedy": 0.875, f"{ACCURACY}_greedy_lenient": 0.9}
        | {"test/direct_maj@2": 0.5, "test/direct_maj@16": 0.75 + share / 2}
        for step, share in ((0, 0.0), (20, 0.25))
    ]
    folder = make_finished_run(metrics=rows)
    assert (headline_text(folder) or "").splitlines()[1:] == [
        "the same questions, at temperature 0 87.5 % before, 87.5 % after; majority of 16 75.0 % before, 87.5 % after"
    ]
    shown = cards(folder, "accuracy")
    assert shown["at temperature 0 (step 20)"] == ("87.5 %", "at first 87.5 %")
    assert shown["named at temperature 0 (step 20)"] == ("90.0 %", "at first 90.0 %")
    assert shown["majority of 16 (step 20)"] == ("87.5 %", "at first 75.0 %")


def test_a_single_measurement_is_no_headline(make_finished_run: MakeRun) -> None:
    assert headline_text(make_finished_run(metrics=[{"step": 0, ACCURACY: 0.45}])) is None


def test_an_interval_of_a_share_stays_a_share(make_finished_run: MakeRun) -> None:
    rows = [{"step": 0, ACCURACY: 0.99, f"{ACCURACY}_stderr": 0.05}]
    assert cards(make_finished_run(metrics=rows), "accuracy") == {
        "before (step 0)": ("99.0 %", "95 % interval 89.2 to 100.0 %")
    }


@pytest.mark.parametrize("error", [{}, {f"{ACCURACY}_stderr": 0.0}])
def test_accuracy_without_a_standard_error_has_no_interval(
    make_finished_run: MakeRun, error: dict[str, float]
) -> None:
    rows = [{"step": step, ACCURACY: 0.5, **error} for step in (0, 1)]
    folder = make_finished_run(metrics=rows)
    assert {below for _, below in cards(folder, "accuracy").values()} == {""}
    assert gain_of(read_run(folder), ACCURACY) == Gain(
        first_step=0, last_step=1, before=0.5, after=0.5, before_half_width=None, after_half_width=None
    )


def test_a_run_without_a_test_set_has_no_accuracy(make_finished_run: MakeRun) -> None:
    found = summary_answer(read_run(make_finished_run(metrics=[{"step": 0, "reward/mean": 0.0}])))
    assert (found["has_accuracy"], found["accuracy"]) == (False, [])


def test_void_conversations_are_counted_by_reason(make_finished_run: MakeRun) -> None:
    reasons = ["lost", "timeout", "timeout", None]
    lines: list[dict[str, Any]] = [
        {"step": 0, "group": group, "void": True, "void_reason": why} for group, why in enumerate(reasons)
    ]
    folder = make_finished_run(transcripts=lines)
    assert [(each["count"], each["reason"]) for each in summary_answer(read_run(folder))["void"]] == [
        (2, "timeout"), (1, "lost"), (1, "no reason recorded"),
    ]  # fmt: skip
    assert cards(folder, "health")["conversations"] == ("4", "4 void")


def test_what_keeps_a_run_from_learning_is_named_at_its_step(make_finished_run: MakeRun) -> None:
    rows = [{"step": step, "rollout/groups": 4, "rollout/void": 4} for step in range(4)]
    (cause,) = summary_answer(read_run(make_finished_run(metrics=rows)))["causes"]
    assert cause["step"] == 3
    assert "every conversation of 3 steps in a row is void" in cause["text"]


def test_a_run_without_known_answers_has_the_share_of_verdicts_that_it_wins(
    make_finished_run: MakeRun,
) -> None:
    rows = [
        {"step": 0, "test/judged/win_rate": 0.5, "test/judged/flip_rate": 0.1},
        {"step": 10, "test/judged/win_rate": 0.6, "test/judged/win_rate/length_controlled": 0.4},
        {
            "step": 20,
            "test/judged/win_rate": 0.75,
            "test/judged/win_rate_stderr": 0.05,
            "test/judged/flip_rate": 0.25,
        },
    ]
    folder = make_finished_run(metrics=rows)
    assert headline_text(folder) == (
        "answers to test prompts against those before training: 75.0 % ± 9.8 of verdicts won after 20 steps (50 % "
        "is no difference; the interval is 95 %)\nits judge, winners that change with the order 25.0 %"
    )
    assert cards(folder, "judged") == {
        "judged better than before training (step 20)": ("75.0 %", "95 % interval 65.2 to 84.8 %"),
        "winners that change with the order (step 20)": ("25.0 %", ""),
    }
    assert cards(folder, "accuracy") == {}
