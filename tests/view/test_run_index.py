"""The index of a run's files: it grows with them, starts anew when they are cut back, and names damage."""

import gc
import json
import os
import re
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from view_runs import transcript, write_lines

from viva.judging.records import Transcript
from viva.view.app import cookie_name, make_app
from viva.view.files import GrowingFile
from viva.view.run_index import IndexReader, RunIndex, read_run

MakeRun = Callable[..., Path]


def curves(run: RunIndex) -> dict[str, list[tuple[int, float]]]:
    return {key: run.points(key) for key in run.metrics}


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
    assert run.points("test/direct_accuracy")[3] == (3, pytest.approx(0.43))
    assert run.half_widths("test/direct_accuracy")
    assert run.points("no/such/metric") == []
    entry = run.entries[3, 1]
    assert (entry.num_right, entry.num_graded, entry.num_mended, entry.strategy) == (
        1,
        3,
        0,
        "critique_self_play",
    )
    assert (run.entries[0, 0].num_mended, run.entries[0, 2].strategy) == (1, "feedback")
    assert (entry.judged.pairs, entry.judged.flips, entry.judged.cycles) == (3, 1, 1)
    assert run.transcript(3, 1)["record"]["question"] == "How many pens are in box 3-1?"  # type: ignore[index]
    assert run.transcript(99, 0) is None
    assert (run.has_tokens(2, 0), run.has_tokens(2, 1), run.tokens(2, 1)) == (True, False, None)


def test_the_judges_agreement_with_known_answers_counts_comparisons_and_rankings(make_run: MakeRun) -> None:
    run = RunIndex(make_run())
    run.refresh(60)
    judged = run.entries[0, 1].judged
    # judge: of 1 and 2 (wrong, right) both orders name 1; of 0 and 2 both name 2; rankings: 1 > 2 is wrong, 2 > 0 right
    assert (judged.agreeing, judged.decidable) == (3, 6)


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
    assert [step for step, _ in run.points("test/direct_accuracy")] == [0, 1, 2]


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


def test_curves_are_the_numeric_keys_of_the_metrics(make_finished_run: MakeRun) -> None:
    rows = [
        {"step": 0, "b": 1, "a": 0.5, "name": "x", "flag": True, "none": None},
        {"step": 2, "a": float("nan"), "b": float("inf")},
        {"step": 1, "a": 0.25},
    ]
    run = read_run(make_finished_run(metrics=rows, transcripts=None, config=None))
    assert curves(run) == {"a": [(0, 0.5), (1, 0.25)], "b": [(0, 1.0)]}
    assert sorted(run.metrics) == ["a", "b"]
    assert (run.num_steps, run.config, run.entries, run.torn) == (2, {}, {}, [])


def test_lines_of_one_step_are_one_row_and_the_later_wins(make_finished_run: MakeRun) -> None:
    rows = [{"step": 0, "a": 1, "b": 2}, {"step": 0, "a": 3}]
    assert curves(read_run(make_finished_run(metrics=rows))) == {"a": [(0, 3.0)], "b": [(0, 2.0)]}


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
    assert run.torn == (["metrics.jsonl"] if is_torn else [])


def test_damage_in_the_middle_names_file_and_line(make_finished_run: MakeRun) -> None:
    folder = make_finished_run()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(lines[0] + lines[1][:20] + "\n" + "".join(lines[2:]))
    run = read_run(folder)
    assert [re.sub(r".*/", "", problem)[:16] for problem in run.problems] == ["metrics.jsonl:2:"]
    assert len(run.points("reward/mean")) == len(lines) - 1


def test_a_line_that_is_no_object_names_what_came(make_finished_run: MakeRun) -> None:
    (problem,) = read_run(make_finished_run(metrics=[[1], {"step": 0}])).problems
    assert "metrics.jsonl:1: expected a JSON object, got '[1]'" in problem


@pytest.mark.parametrize("step", [None, "3", 1.5, True, 10**30])
def test_a_line_without_a_step_is_left_out_and_told(make_finished_run: MakeRun, step: object) -> None:
    run = read_run(make_finished_run(metrics=[{"step": step}, {"step": 0, "a": 1}]))
    assert curves(run) == {"a": [(0, 1.0)]}
    assert "metrics.jsonl:1: every line needs a whole number under 'step'" in run.problems[0]


def test_a_transcript_with_a_wrong_field_names_the_field(make_finished_run: MakeRun) -> None:
    run = read_run(
        make_finished_run(transcripts=[{"step": 0, "group": 0, "record": {"question": "q", "turns": 3}}])
    )
    assert re.search(r"transcripts\.jsonl:1: not a transcript: record\.turns: .*tuple", run.problems[0])


def test_a_folder_that_is_no_run_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no metrics\.jsonl.* Give the folder of a run"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="is not there"):
        read_run(tmp_path / "nowhere")


def test_a_broken_configuration_is_named(make_finished_run: MakeRun) -> None:
    folder = make_finished_run()
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: "):
        read_run(folder)


def test_entries_lead_back_to_their_transcripts(make_finished_run: MakeRun) -> None:
    run = read_run(make_finished_run())
    assert len(run.entries) == 60
    for (step, group), entry in run.entries.items():
        found = Transcript.parse("", run.transcript(step, group) or {})
        assert (found.step, found.group, found.void) == (step, group, entry.is_void)
        assert found.record is not None
        correct = list((found.record.correct or {}).values())
        assert entry.share_correct == (sum(correct) / len(correct) if correct else None)
        assert len(found.record.failures) == entry.num_failures


def test_halves_of_surrogate_pairs_become_replacement_characters(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    line = '{"step": 0, "group": 0, "record": {"question": "\\ud83d \\ud83d\\ude00 \\ude00"}}\n'
    (tmp_path / "transcripts.jsonl").write_text(line)
    row = read_run(tmp_path).transcript(0, 0) or {}
    assert row["record"]["question"] == "\ufffd \U0001f600 \ufffd"


def test_a_metric_carries_the_95_percent_band_of_its_standard_error(make_finished_run: MakeRun) -> None:
    rows = [{"step": 0, "a": 0.5, "a_stderr": 0.1}, {"step": 1, "a": 0.6, "a_stderr": 0.2}]
    run = read_run(make_finished_run(metrics=rows))
    assert run.points("a") == [(0, 0.5), (1, 0.6)]
    assert run.half_widths("a") == pytest.approx({0: 0.196, 1: 0.392}, abs=1e-4)
    assert (run.half_widths("a_stderr"), run.points("b")) == ({}, [])


TOKEN, PORT = "secret-token", 4321
MEGABYTE = 1e6


class EndlessRun:
    """Has something new until it is told to stop."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.num_slices = 0

    def refresh(self, budget_s: float) -> bool:
        assert 0 < budget_s < 0.1
        self.num_slices += 1
        return self.is_over.is_set()


def test_a_request_is_answered_while_the_files_are_read() -> None:
    run: Any = EndlessRun()
    lock = threading.Lock()
    reading = IndexReader([run], lock)
    reading.go_on()
    for _ in range(20):
        assert lock.acquire(timeout=60)
        lock.release()
    assert not reading.is_complete(run)
    assert run.num_slices > 1
    run.is_over.set()
    while not reading.is_complete(run):
        reading.go_on()
    slices = run.num_slices
    reading.go_on()  # looks again
    assert (run.num_slices, reading.is_complete(run)) == (slices + 1, True)


async def test_reading_and_paging_through_a_large_run_holds_little_of_it_in_memory(make_run: MakeRun) -> None:
    folder = make_run(steps=1, transcripts=[], token_rows=[])
    for step in range(40):
        write_lines(
            folder / "transcripts.jsonl",
            [transcript(step, group, question="x" * 50_000) for group in range(10)],
        )
    size = (folder / "transcripts.jsonl").stat().st_size
    assert size > 20 * MEGABYTE
    transport = httpx.ASGITransport(app=make_app([folder], token=TOKEN))
    headers = {"Cookie": f"{cookie_name(TOKEN)}={TOKEN}"}
    async with httpx.AsyncClient(
        transport=transport, base_url=f"http://127.0.0.1:{PORT}", headers=headers
    ) as client:

        async def ask(path: str) -> dict[str, Any]:
            return json.loads((await client.get(path)).content)

        await ask("/api/runs")  # what is made once: threads, codecs
        gc.collect()
        tracemalloc.start()
        while not (await ask("/api/runs"))["runs"][0]["is_complete"]:
            pass
        seen: set[tuple[int, int]] = set()
        for page in range(8):
            rows = (await ask(f"/api/conversations?page={page}&order=-reward"))["rows"]
            seen |= {(row["step"], row["group"]) for row in rows}
            await ask(f"/api/conversation?step={rows[0]['step']}&group={rows[0]['group']}")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(seen) == 400
    assert peak < 0.15 * size


async def test_a_link_to_a_conversation_may_be_the_first_thing_that_is_asked_for(make_run: MakeRun) -> None:
    folder = make_run(steps=5)
    transport = httpx.ASGITransport(app=make_app([folder], token=TOKEN))
    headers = {"Cookie": f"{cookie_name(TOKEN)}={TOKEN}"}
    async with httpx.AsyncClient(
        transport=transport, base_url=f"http://127.0.0.1:{PORT}", headers=headers
    ) as client:
        found = await client.get("/api/conversation?step=4&group=0")
        assert found.json()["tokens"] is not None
        missing = await client.get("/api/conversation?step=9&group=0")
        assert (missing.status_code, missing.json()["error"]) == (
            404,
            "this run has no conversation 0 in step 9",
        )
