"""The index of a run's files: it grows with them, starts anew when they are cut back, and holds no texts."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from view_runs import write_lines

from viva.view.lines import GrowingFile
from viva.view.run_index import RunIndex

MakeRun = Callable[..., Path]


def read_all(file: GrowingFile) -> list[bytes]:
    return [line for _, line in file.new_lines()]


@given(st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")), max_size=8), st.data())
def test_every_whole_line_is_read_once_however_the_file_grows(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("growing") / "file"
    whole = b"".join(line + b"\n" for line in lines)
    file, found, start = GrowingFile(path), list[bytes](), 0
    while start < len(whole):
        stop = data.draw(st.integers(start + 1, len(whole)))
        with path.open("ab") as out:
            out.write(whole[start:stop])
        start = stop
        assert not file.was_cut_back()
        found += read_all(file)
    assert found == [line + b"\n" for line in lines]


def test_a_line_without_its_end_waits(tmp_path: Path) -> None:
    file = GrowingFile(tmp_path / "file")
    assert read_all(file) == []
    file.path.write_bytes(b"one\ntw")
    assert read_all(file) == [b"one\n"]
    file.path.write_bytes(b"one\ntwo\n")
    assert read_all(file) == [b"two\n"]


@pytest.mark.parametrize("content", [b"", b"one\n", b"one\nTWO\nthree\n"])
def test_a_file_that_was_cut_back_or_written_anew_is_noticed(tmp_path: Path, content: bytes) -> None:
    file = GrowingFile(tmp_path / "file")
    file.path.write_bytes(b"one\ntwo\n")
    read_all(file)
    assert not file.was_cut_back()
    file.path.write_bytes(content)
    assert file.was_cut_back()
    assert read_all(file) == content.splitlines(keepends=True)


def test_metrics_are_columns_with_bands_and_conversations_entries_with_places(make_run: MakeRun) -> None:
    run = RunIndex(make_run())
    assert run.refresh(60)
    assert (run.num_steps, len(run.entries), run.progress) == (6, 24, 1.0)
    series = run.series("test/direct_accuracy")
    assert series is not None
    assert series.points[3] == (3, pytest.approx(0.43))
    assert series.band is not None
    assert run.series("no/such/metric") is None
    entry = run.entries[3, 1]
    assert (entry.num_right, entry.num_graded, entry.num_mended, entry.strategy) == (
        1,
        3,
        0,
        "critique_self_play",
    )
    assert (run.entries[0, 0].num_mended, run.entries[0, 2].strategy) == (1, "feedback")
    assert (entry.num_pairs, entry.num_flips, entry.num_cycles) == (3, 1, 1)
    assert run.transcript(3, 1)["record"]["question"] == "How many pens are in box 3-1?"  # type: ignore[index]
    assert run.transcript(99, 0) is None
    assert (run.has_tokens(2, 0), run.has_tokens(2, 1), run.tokens(2, 1)) == (True, False, None)


def test_the_judges_agreement_with_known_answers_counts_comparisons_and_rankings(make_run: MakeRun) -> None:
    run = RunIndex(make_run())
    run.refresh(60)
    # judge: of 1 and 2 (wrong, right) both orders name 1; of 0 and 2 both name 2; rankings: 1 > 2 is wrong, 2 > 0 right
    assert (run.entries[0, 1].num_agreeing, run.entries[0, 1].num_decidable) == (3, 6)


def test_what_is_appended_while_it_runs_is_found_and_nothing_is_read_twice(make_run: MakeRun) -> None:
    folder = make_run(steps=2)
    run = RunIndex(folder)
    run.refresh(60)
    before = run.version
    line = (folder / "transcripts.jsonl").read_text().splitlines()[0].replace('"step": 0', '"step": 2')
    with (folder / "transcripts.jsonl").open("a") as file:
        file.write(line)
    run.refresh(60)
    assert run.version == before
    with (folder / "transcripts.jsonl").open("a") as file:
        file.write("\n")
    run.refresh(60)
    assert len(run.entries) == 9
    assert run.version != before


def test_options_are_read_again_when_the_run_is_resumed_with_others(make_run: MakeRun) -> None:
    folder = make_run(steps=1)
    run = RunIndex(folder)
    run.refresh(60)
    before = run.version
    for number, (text, seed, damaged) in enumerate([('{"seed": 7}', 7, {}), ("{", 7, {"config.json": 1})]):
        (folder / "config.json").write_text(text)
        os.utime(folder / "config.json", (number, number))
        run.refresh(60)
        assert (run.config["seed"], run.damaged) == (seed, damaged)
    assert run.version != before


def test_what_cannot_be_opened_or_is_nested_too_deeply_is_counted_and_ends_no_reading(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(steps=2)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")
        file.write(f'{{"step": {2**63}, "unheard": 1.0}}\n')
    new_lines = GrowingFile.new_lines

    def refuse(file: GrowingFile) -> Any:
        if file.path.name == "tokens.jsonl":
            raise PermissionError(13, "Permission denied")
        return new_lines(file)

    monkeypatch.setattr(GrowingFile, "new_lines", refuse)
    run = RunIndex(folder)
    assert run.refresh(60)
    assert run.damaged == {"metrics.jsonl": 2, "tokens.jsonl": 1}
    assert (run.num_steps, len(run.entries)) == (2, 8)


def test_an_evaluation_after_the_last_step_is_no_step(make_run: MakeRun) -> None:
    folder = make_run(steps=2)
    write_lines(folder / "metrics.jsonl", [{"step": 2, "test/direct_accuracy": 0.5, "time/evaluation": 1.0}])
    run = RunIndex(folder)
    run.refresh(60)
    assert run.num_steps == 2
    series = run.series("test/direct_accuracy")
    assert series is not None
    assert [step for step, _ in series.points] == [0, 1, 2]


def test_a_resumed_run_that_was_cut_back_is_read_anew(make_run: MakeRun) -> None:
    folder = make_run(steps=4)
    run = RunIndex(folder)
    run.refresh(60)
    lines = (folder / "transcripts.jsonl").read_text().splitlines(keepends=True)
    (folder / "transcripts.jsonl").write_text("".join(lines[:4]))
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(rows[:1]))
    run.refresh(60)
    assert (len(run.entries), run.num_steps, run.generation) == (4, 1, 2)


def test_no_time_still_makes_progress_until_all_is_read(make_run: MakeRun) -> None:
    run = RunIndex(make_run())
    rounds = 0
    while not run.refresh(0.0):
        rounds += 1
        assert rounds < 100
    assert len(run.entries) == 24
    assert rounds > 5


BAD_LINES: list[Any] = [
    "[]",
    "nonsense",
    "{}",
    '{"step": 1}',
    '{"step": 0, "group": 0, "record": {"rewards": [1]}}',
    '{"step": 0, "group": 9, "rewards": [NaN]}',
    '{"step": 0, "group": 9, "record": {"rewards": {"0": 1e999}}}',
    f'{{"step": 0, "group": 9, "rewards": [{"9" * 400}]}}',
    '{"step": 1e999, "group": 9}',
]


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_damaged_line_is_left_out_and_counted(make_run: MakeRun, line: str) -> None:
    folder = make_run(steps=1)
    with (folder / "transcripts.jsonl").open("a") as file:
        file.write(f"{line}\n")
    run = RunIndex(folder)
    assert run.refresh(60)
    assert (len(run.entries), run.damaged) == (4, {"transcripts.jsonl": 1})


def test_bytes_that_are_no_text_do_not_stop_the_index(make_run: MakeRun) -> None:
    folder = make_run(steps=1)
    row = json.loads((folder / "transcripts.jsonl").read_text().splitlines()[0])
    row["group"], row["record"]["question"] = 9, "BYTES"
    with (folder / "transcripts.jsonl").open("ab") as file:
        file.write(json.dumps(row).encode().replace(b"BYTES", b"\xff\xfe\xed\xa0\x80 \\ud800 end") + b"\n")
    run = RunIndex(folder)
    run.refresh(60)
    assert run.entries[0, 9].question.endswith("end")
    run.entries[0, 9].question.encode("utf-8")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Give the folder of a run"):
        RunIndex(tmp_path)
    with pytest.raises(ValueError, match="is not there"):
        RunIndex(tmp_path / "nothing")
