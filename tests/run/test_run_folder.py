"""What is on disk: behaviors, torn files, checkpoints that survive."""

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from bandit_engine import BanditTrainer, Done

from viva.run.checkpoints import Checkpoint, Checkpoints, environment
from viva.run.files import read_json, read_json_lines, write_atomic
from viva.run.folder import prepare_run_folder
from viva.run.log import RunLog

CONFIG = {"seed": 1, "log_path": "x"}


def open_folder(path, behavior="raise", config=CONFIG, **options):
    return prepare_run_folder(
        path, behavior=behavior, config=config, free_options={"log_path"}, **options
    ).open()


def test_a_new_folder_is_made_with_its_options(tmp_path):
    open_folder(tmp_path / "a" / "b")
    assert read_json(tmp_path / "a" / "b" / "config.json") == CONFIG


def test_credentials_in_addresses_are_not_written(tmp_path):
    open_folder(tmp_path / "r", config={"base_url": "https://me:secret@host/x", "other": "a@b"})
    assert read_json(tmp_path / "r" / "config.json") == {
        "base_url": "https://***@host/x",
        "other": "a@b",
    }


def test_what_is_hidden_in_an_option_leaves_the_options_readable(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "20261122")
    text = 'see "http://h/?token=abcdefgh" and "authorization: bearer abcdefgh"'
    open_folder(tmp_path / "run", config={"personas": {"0": text}, "seed": 20261122, "prompts": ["20261122"]})
    assert read_json(tmp_path / "run" / "config.json") == {
        "personas": {"0": 'see "http://h/?token=***" and "authorization: bearer ***"'},
        "seed": 20261122,
        "prompts": ["***"],
    }


def test_raise_refuses_a_folder_that_holds_a_run(tmp_path):
    open_folder(tmp_path)
    with pytest.raises(ValueError, match=r"already holds a run.*behavior_if_exists=resume .* or =delete"):
        open_folder(tmp_path)


def test_resume_keeps_the_run_and_refuses_other_options(tmp_path):
    open_folder(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    open_folder(tmp_path, "resume", config=CONFIG | {"log_path": "moved"})
    assert (tmp_path / "metrics.jsonl").exists()
    with pytest.raises(ValueError, match="with other options: seed was 1 and is now 2"):
        open_folder(tmp_path, "resume", config=CONFIG | {"seed": 2})


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_ask_asks_until_it_gets_an_answer(tmp_path, monkeypatch):
    open_folder(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    monkeypatch.setattr(sys, "stdin", Terminal("what?\n Resume \ndelete\nexit\n"))
    open_folder(tmp_path, "ask")
    assert (tmp_path / "metrics.jsonl").exists()
    open_folder(tmp_path, "ask")
    assert not (tmp_path / "metrics.jsonl").exists()
    with pytest.raises(ValueError, match="you chose not to touch it"):
        open_folder(tmp_path, "ask")


def test_ask_without_a_terminal_says_what_to_pass(tmp_path):
    open_folder(tmp_path / "new", "ask")
    with pytest.raises(
        ValueError, match=r"no terminal to ask. Pass behavior_if_exists=resume, delete or raise"
    ):
        open_folder(tmp_path / "new", "ask")


def test_an_unknown_behavior_and_a_file_are_refused(tmp_path):
    with pytest.raises(ValueError, match="one of ask, delete, resume, raise; got 'keep'"):
        open_folder(tmp_path, "keep")
    (tmp_path / "f").write_text("")
    with pytest.raises(ValueError, match="is a file; give a folder"):
        open_folder(tmp_path / "f")


def test_a_torn_last_line_is_left_out_and_any_other_damage_is_told(tmp_path):
    path = tmp_path / "x.jsonl"
    assert list(read_json_lines(path)) == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a": ')
    assert list(read_json_lines(path)) == [{"a": 1}, {"a": 2}]
    path.write_bytes(b'{"a": 1}\n{"a": "\xc3')
    assert list(read_json_lines(path)) == [{"a": 1}]
    path.write_text('{"a": 1}\n{"a"\n{"a": 2}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl:2: .*The file is damaged"):
        list(read_json_lines(path))
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match=r"x\.jsonl:1: expected a JSON object, got"):
        list(read_json_lines(path))


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "x"
    write_atomic(path, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_logs_are_cut_back_to_a_checkpoint(tmp_path):
    log = RunLog(tmp_path)
    log.write_step(0, {"b": 1.0, "step": 7, "a": 2}, [{"text": "\ud800 \u00e4"}])
    sizes = log.sizes()
    log.write_step(1, {"a": 1.0}, [{"text": "x"}], [{"reward": 1.0}])
    assert (tmp_path / "samples.jsonl").read_text() == '{"reward": 1.0}\n'
    log.cut_back(sizes)
    assert (tmp_path / "samples.jsonl").read_text() == ""
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "a": 2, "b": 1.0}\n'
    assert json.loads((tmp_path / "transcripts.jsonl").read_text())["text"] == "\ud800 \u00e4"
    log.cut_back({})
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    with pytest.raises(ValueError, match=r"fewer than the .* it had at the checkpoint"):
        log.cut_back(sizes)


def test_a_metric_that_is_no_number_is_refused(tmp_path):
    with pytest.raises(
        FloatingPointError, match=r"metrics of step 0 must be finite numbers; got \{'a': nan\}"
    ):
        RunLog(tmp_path).write_step(0, {"a": float("nan")})


async def save(checkpoints, folder, steps, **options):
    client = BanditTrainer(folder / "state")
    for step in steps:
        await checkpoints.save(client, next_step=step, log_sizes={"metrics.jsonl": step}, **options)


async def test_the_newest_checkpoints_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    await save(checkpoints, tmp_path, [1, 2, 3])
    assert [checkpoint.next_step for checkpoint in checkpoints.all()] == [2, 3]
    assert sorted(path.name for path in (tmp_path / "state" / "weights").iterdir()) == ["000002", "000003"]


async def test_a_state_that_is_saved_already_is_marked_final_without_saving_it_again(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    await save(checkpoints, tmp_path, [4])
    await save(checkpoints, tmp_path, [4], final=True)
    assert [(checkpoint.next_step, checkpoint.final) for checkpoint in checkpoints.all()] == [(4, True)]


async def test_a_moved_run_folder_still_finds_its_states(tmp_path):
    await save(Checkpoints(tmp_path / "a"), tmp_path / "a", [1])
    (tmp_path / "a").rename(tmp_path / "b")
    moved = Checkpoints(tmp_path / "b")
    assert moved.resolve(moved.latest()) == str(tmp_path / "b" / "state" / "weights" / "000001")


async def test_the_newest_checkpoint_of_which_nothing_is_damaged_is_opened_and_the_others_are_told_of(
    tmp_path,
):
    folder = prepare_run_folder(tmp_path, behavior="resume", config={}).open()
    told = []

    async def opens(path):
        if path.endswith("000003"):
            raise ValueError("the third is bent")
        return path

    assert await folder.open_newest(opens, told.append) is None
    (tmp_path / "metrics.jsonl").write_text("abcd")
    await save(folder.checkpoints, tmp_path, [1, 2, 3])
    path, checkpoint = await folder.open_newest(opens, told.append)
    assert (Path(path).name, checkpoint.next_step) == ("000002", 2)
    assert told == ["note: a checkpoint cannot be read and is passed over: the third is bent"]
    (tmp_path / "metrics.jsonl").write_text("aXcd")
    again = prepare_run_folder(tmp_path, behavior="resume", config={}).open()
    assert (await again.open_newest(opens, told.append))[1].next_step == 1
    assert "metrics.jsonl is damaged or was changed" in told[-1]
    (tmp_path / "metrics.jsonl").write_text("Xbcd")
    again = prepare_run_folder(tmp_path, behavior="resume", config={}).open()
    with pytest.raises(ValueError, match=r"start anew with behavior_if_exists=delete"):
        await again.open_newest(opens, told.append)


async def test_a_line_of_the_index_that_was_changed_is_passed_over_and_dropped(tmp_path):
    folder = prepare_run_folder(tmp_path, behavior="resume", config={}).open()
    (tmp_path / "metrics.jsonl").write_text("ab")
    await save(folder.checkpoints, tmp_path, [1, 2])
    path = tmp_path / "checkpoints.jsonl"
    path.write_text(path.read_text().replace('"next_step": 2', '"next_step": 3'))
    assert [one.next_step for one in folder.checkpoints.all()] == [1]
    (problem,) = folder.checkpoints.damage()
    assert problem.startswith(f"{path}:2: the line is damaged or was changed")
    folder.go_back_to(folder.checkpoints.latest(), num_steps=9)
    assert folder.checkpoints.damage() == []
    path.write_text("")
    with pytest.raises(ValueError, match=r"checkpoints\.jsonl is empty\. No checkpoint of"):
        folder.checkpoints.all()


def test_a_line_of_the_index_of_before_they_were_sealed_is_read(tmp_path):
    (tmp_path / "state").mkdir()
    row = {"name": "000001", "next_step": 1, "state_path": "state", "log_sizes": {}}
    (tmp_path / "checkpoints.jsonl").write_text(json.dumps(row) + "\n")
    assert Checkpoints(tmp_path).latest() == Checkpoint(**row)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../x"},
        {"state_path": "../../x"},
        {"state_path": "/etc"},
        {"state_path": "state\0"},
        {"log_sizes": {"../x": 1}},
        {"next_step": -1},
        {"next_step": True},
        {"state_path": 3},
        {"state_path": "http://127.0.0.1:9/x"},
        {"log_digests": {"metrics.jsonl": "0"}},
        {"more": 1},
    ],
)
def test_a_line_of_the_index_cannot_lead_out_of_the_folder(tmp_path, change):
    (tmp_path / "state").mkdir()
    row = {"name": "000001", "next_step": 1, "state_path": "state", "log_sizes": {}} | change
    (tmp_path / "checkpoints.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"checkpoints\.jsonl:1: .* No checkpoint of"):
        Checkpoints(tmp_path).all()


def test_links_that_lead_out_of_the_folder_are_refused(tmp_path):
    outside = tmp_path / "outside"
    (outside / "theirs").mkdir(parents=True)
    (outside / "notes").write_text("theirs")
    run = tmp_path / "run"
    for name, target in (
        ("metrics.jsonl", outside / "notes"),
        ("state", outside),
        ("state/weights", outside),
    ):
        folder = open_folder(run, "delete")
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).symlink_to(target)
        with pytest.raises(ValueError, match="is a link that leads out of the run's folder"):
            open_folder(run, "resume")
        if name != "metrics.jsonl":
            with pytest.raises(ValueError, match="leads out of the run's folder"):
                folder.checkpoints.discard_unlisted()
        open_folder(run, "delete")
        assert ((outside / "notes").read_text(), (outside / "theirs").is_dir()) == ("theirs", True)


def test_what_a_killed_writer_left_is_removed(tmp_path):
    folder = open_folder(tmp_path, "resume")
    for name in (".config.json.abcd1234", ".checkpoints.jsonl.abcd1234"):
        (tmp_path / name).write_text("{")
    folder.go_back_to(None, num_steps=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(".viva.lock", "checkpoints.jsonl", "config.json", "written.jsonl")
    ]


def test_a_changed_configuration_is_told_by_name(tmp_path):
    open_folder(tmp_path)
    path = tmp_path / "config.json"
    for text in (path.read_text().replace('"seed": 1', '"seed": 2'), "{", "[]", "\xff"):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=r"config\.json is damaged"):
            open_folder(tmp_path, "resume")


async def test_a_checkpoint_without_its_state_is_passed_over(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    await save(checkpoints, tmp_path, [1, 2])
    (tmp_path / "state" / "weights" / "000002").rename(tmp_path / "gone")
    assert checkpoints.latest().next_step == 1


async def test_states_that_a_crash_left_behind_are_removed(tmp_path):
    folder = prepare_run_folder(tmp_path, behavior="resume", config={}).open()
    await save(folder.checkpoints, tmp_path, [1])
    for name in ("000002", ".000003.tmp"):
        (tmp_path / "state" / "weights" / name).mkdir()
    (tmp_path / "metrics.jsonl").write_text("x" * 5)
    folder.go_back_to(folder.checkpoints.latest(), num_steps=9)
    assert [path.name for path in (tmp_path / "state" / "weights").iterdir()] == ["000001"]
    assert (tmp_path / "metrics.jsonl").read_text() == "x"


async def test_of_a_complete_run_with_a_damaged_index_no_state_is_deleted(tmp_path):
    folder = open_folder(tmp_path)
    await save(folder.checkpoints, tmp_path, [1])
    await save(folder.checkpoints, tmp_path, [2], final=True)
    (tmp_path / "metrics.jsonl").write_text("xx")
    index = tmp_path / "checkpoints.jsonl"
    states = [checkpoint.state_path for checkpoint in folder.checkpoints.all()]
    index.write_text("{" + index.read_text()[1:].replace('"next_step": 1', '"next_step": 7'))
    assert len(folder.checkpoints.damage()) == 1
    folder.go_back_to(folder.checkpoints.latest(), num_steps=2)
    assert [(tmp_path / state).exists() for state in states] == [True, True]
    folder.go_back_to(
        folder.checkpoints.latest(), num_steps=3
    )  # it is made longer: what is damaged is given up
    assert folder.checkpoints.damage() == []


async def test_a_complete_run_is_not_cut_back_unless_it_is_made_longer(tmp_path):
    folder = prepare_run_folder(tmp_path, behavior="resume", config={}).open()
    await save(folder.checkpoints, tmp_path, [2], final=True)
    (tmp_path / "metrics.jsonl").write_text("x" * 5)
    folder.go_back_to(folder.checkpoints.latest(), num_steps=2)
    assert (tmp_path / "metrics.jsonl").stat().st_size == 5
    folder.go_back_to(folder.checkpoints.latest(), num_steps=3)
    assert (tmp_path / "metrics.jsonl").stat().st_size == 2


async def test_states_of_a_remote_engine_are_kept_as_addresses(tmp_path):
    class Remote:
        def save_state(self, name):
            return Done(SimpleNamespace(path=f"tinker://run/weights/{name}"))

    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (1, 2):
        await checkpoints.save(Remote(), next_step=step, log_sizes={})
    assert checkpoints.resolve(checkpoints.latest()) == "tinker://run/weights/000002"


async def test_a_changed_environment_is_noticed(tmp_path, monkeypatch):
    checkpoints, client = Checkpoints(tmp_path), SimpleNamespace(precision="float32")
    await save(checkpoints, tmp_path, [1])
    before = checkpoints.latest()
    assert checkpoints.changed_environment(before, SimpleNamespace()) == {}
    assert checkpoints.changed_environment(before, client) == {"precision": ("not recorded", "float32")}
    now = environment() | {"threads": "99"}
    monkeypatch.setattr("viva.run.checkpoints.environment", lambda: now)
    assert list(checkpoints.changed_environment(before, SimpleNamespace())) == ["threads"]
    await save(checkpoints, tmp_path, [2, 3])
    assert [one.earlier_environments for one in checkpoints.all()] == [
        [],
        [before.environment],
        [before.environment],
    ]


async def test_going_back_to_an_older_checkpoint_forgets_the_newer_ones(tmp_path):
    folder = prepare_run_folder(tmp_path, behavior="resume", config={}).open()
    await save(folder.checkpoints, tmp_path, [1, 2])
    (tmp_path / "metrics.jsonl").write_text("x" * 5)
    folder.go_back_to(folder.checkpoints.all()[0], num_steps=9)
    assert [checkpoint.next_step for checkpoint in folder.checkpoints.all()] == [1]
    assert [path.name for path in (tmp_path / "state" / "weights").iterdir()] == ["000001"]
    folder.go_back_to(None, num_steps=9)
    assert (folder.checkpoints.all(), (tmp_path / "metrics.jsonl").read_text()) == ([], "")


async def test_the_best_checkpoint_outlives_newer_ones_until_another_is_better(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    await save(checkpoints, tmp_path, [1], best=True)
    await save(checkpoints, tmp_path, [2, 3, 4])
    assert [(one.next_step, one.best) for one in checkpoints.all()] == [(1, True), (3, False), (4, False)]
    assert Path(checkpoints.resolve(checkpoints.all()[0])).exists()
    await save(checkpoints, tmp_path, [5], best=True)
    best = checkpoints.best()
    assert best is not None
    assert best.next_step == 5
    assert sum(one.best for one in checkpoints.all()) == 1
    await save(checkpoints, tmp_path, [5], final=True)
    assert [(one.next_step, one.best, one.final) for one in checkpoints.all()][-1] == (5, True, True)
