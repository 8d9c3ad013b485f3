"""Reading a run: torn ends are tolerated, damage is named by file and line."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from viva.view.run_files import read_run, read_series, read_transcript

MakeRun = Callable[..., Path]


def test_curves_are_the_numeric_keys_of_the_metrics(make_run: MakeRun) -> None:
    rows = [
        {"step": 0, "b": 1, "a": 0.5, "name": "x", "flag": True, "none": None},
        {"step": 2, "a": float("nan"), "b": float("inf")},
        {"step": 1, "a": 0.25},
    ]
    run = read_run(make_run(metrics=rows, transcripts=None, config=None))
    assert run.curves == {"a": ((0, 0.5), (1, 0.25)), "b": ((0, 1.0),)}
    assert list(run.curves) == ["a", "b"]
    assert (run.num_steps, run.config, run.transcripts, run.torn) == (3, {}, (), ())


def test_lines_of_one_step_are_one_row_and_the_later_wins(make_run: MakeRun) -> None:
    rows = [{"step": 0, "a": 1, "b": 2}, {"step": 0, "a": 3}]
    assert read_run(make_run(metrics=rows)).curves == {"a": ((0, 3.0),), "b": ((0, 2.0),)}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_cut_at_any_byte_gives_the_whole_lines_before_the_cut(
    tmp_path: Path, data: st.DataObject
) -> None:
    rows = [{"step": step, "a": step / 3, "text": "Gr\u00fc\u00dfe"} for step in range(4)]
    lines = [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows]
    whole = b"".join(lines)
    cut = data.draw(st.integers(0, len(whole)))
    (tmp_path / "metrics.jsonl").write_bytes(whole[:cut])
    run = read_run(tmp_path)
    # a line that only lacks its line break is whole
    num_whole = sum(len(b"".join(lines[: i + 1])) - 1 <= cut for i in range(len(lines)))
    assert run.num_steps == num_whole
    is_torn = cut not in (len(b"".join(lines[:num_whole])), len(b"".join(lines[:num_whole])) - 1)
    assert run.torn == (("metrics.jsonl",) if is_torn else ())


def test_damage_in_the_middle_names_file_and_line(make_run: MakeRun) -> None:
    folder = make_run()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(lines[0] + lines[1][:20] + "\n" + "".join(lines[2:]))
    run = read_run(folder)
    assert [re.sub(r".*/", "", problem)[:16] for problem in run.damage] == ["metrics.jsonl:2:"]
    assert run.num_steps == len(lines) - 1


def test_a_line_that_is_no_object_names_what_came(make_run: MakeRun) -> None:
    (problem,) = read_run(make_run(metrics=[[1], {"step": 0}])).damage
    assert "metrics.jsonl:1: expected a JSON object, got '[1]'" in problem


@pytest.mark.parametrize("step", [None, "3", 1.5, True, 10**30])
def test_a_line_without_a_step_is_left_out_and_told(make_run: MakeRun, step: object) -> None:
    run = read_run(make_run(metrics=[{"step": step}, {"step": 0, "a": 1}]))
    assert run.curves == {"a": ((0, 1.0),)}
    assert "metrics.jsonl:1: every line needs a whole number under 'step'" in run.damage[0]


def test_a_transcript_with_a_wrong_field_names_the_field(make_run: MakeRun) -> None:
    run = read_run(make_run(transcripts=[{"step": 0, "group": 0, "record": {"question": "q", "turns": 3}}]))
    assert re.search(r"transcripts\.jsonl:1: not a transcript: record\.turns: .*tuple", run.damage[0])


def test_a_folder_that_is_no_run_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no metrics\.jsonl\. Give the folder of a run"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        read_run(tmp_path / "nowhere")


def test_a_broken_configuration_is_named(make_run: MakeRun) -> None:
    folder = make_run()
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: "):
        read_run(folder)


def test_entries_lead_back_to_their_transcripts(make_run: MakeRun) -> None:
    run = read_run(make_run())
    assert len(run.transcripts) == 60
    for entry in run.transcripts:
        found = read_transcript(run, entry.offset)
        assert (found.step, found.group, found.void) == (entry.step, entry.group, entry.is_void)
        assert found.record is not None
        correct = list((found.record.correct or {}).values())
        assert entry.share_correct == (sum(correct) / len(correct) if correct else None)
        assert len(found.record.failures) == entry.num_failures


def test_halves_of_surrogate_pairs_become_replacement_characters(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    line = '{"step": 0, "group": 0, "record": {"question": "\\ud83d \\ud83d\\ude00 \\ude00"}}\n'
    (tmp_path / "transcripts.jsonl").write_text(line)
    record = read_transcript(read_run(tmp_path), 0).record
    assert record is not None
    assert record.question == "\ufffd \U0001f600 \ufffd"


def test_a_series_carries_the_95_percent_band_of_its_standard_error(make_run: MakeRun) -> None:
    rows = [{"step": 0, "a": 0.5, "a_stderr": 0.1}, {"step": 1, "a": 0.6, "a_stderr": 0.2}]
    folder = make_run(metrics=rows)
    series = read_series(folder, "a", name="curve")
    assert (series.name, series.points) == ("curve", ((0, 0.5), (1, 0.6)))
    assert series.band == pytest.approx((0.196, 0.392), abs=1e-4)
    assert read_series(folder, "a_stderr").band is None


def test_a_metric_that_was_never_recorded_names_those_that_were(make_run: MakeRun) -> None:
    with pytest.raises(ValueError, match="no metric 'b'; it has: a"):
        read_series(make_run(metrics=[{"step": 0, "a": 1}]), "b")
