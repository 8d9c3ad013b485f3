"""Two real processes on one folder: the second is refused in words that name the first, and touches nothing."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial

import pytest
from forked_commands import start
from random_models import make_model

from viva import cli
from viva.recipes.export import ExportOptions, export_run
from viva.recipes.programs import train_recipe
from viva.run.files import LOCK, FolderLock
from viva.run.folder import prepare_run_folder
from viva.view.report import write_report

main = partial(train_recipe, "conversation_preference_rl")
PATIENCE_S = 120
HOLD = """
import sys
from pathlib import Path
from viva.run.folder import prepare_run_folder
folder = prepare_run_folder(Path(sys.argv[1]), behavior="resume", config={"seed": 1}).open()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("models") / "model", "llama")
    return {
        "model_name": str(model),
        "train_prompts": '["What is 2 + 2?","What is 3 + 4?"]',
        "num_agents": 2,
        "max_rounds": 1,
        "batch_size": 2,
        "max_tokens": 4,
        "lora_rank": 1,
        "learning_rate": 1e-3,
        "eval_every": 0,
        "save_every": 1,
        "trackers": "[]",
        "device": "cpu",
        "judge_max_off_set_mass": 1.0,
    }


def arguments(options, **more):
    return [f"{name}={value}" for name, value in (options | more).items()]


@contextmanager
def process(script, *argv, until):
    """A process that has come far enough; it is killed at the end, as by the kernel."""
    child = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, argv)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        waited = time.monotonic()
        while not until():
            assert child.poll() is None, "it ended by itself"
            assert time.monotonic() - waited < PATIENCE_S
            time.sleep(0.05)
        yield child
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()


@contextmanager
def training(folder, options):
    """A process whose run has saved a checkpoint; it is killed at the end."""
    command = ["train", "conversation_preference_rl", *options]
    child = start(command, folder.parent, folder.parent / "told.txt")
    try:
        waited = time.monotonic()
        while not has_saved(folder):
            assert child.is_alive(), (folder.parent / "told.txt").read_text()
            assert time.monotonic() - waited < PATIENCE_S
            time.sleep(0.05)
        yield child
    finally:
        child.kill()
        child.join()


def holding(folder):
    return process(HOLD, folder, until=lambda: (folder / "config.json").exists())


def steps(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def has_saved(folder):
    index = folder / "checkpoints.jsonl"
    return index.exists() and "state_path" in index.read_text()


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_second_process_is_refused_beside_a_live_run_and_a_killed_one_goes_on(tmp_path, options, capsys):
    folder = tmp_path / "run"
    long = arguments(options, log_path=folder, max_steps=5000, behavior_if_exists="resume")
    with training(folder, long) as first:
        os.kill(first.pid, signal.SIGSTOP)  # so that what is in the folder can be compared
        before = contents(folder)
        for behavior in ("resume", "delete", "raise", "ask"):
            assert main(arguments(options, log_path=folder, max_steps=5000, behavior_if_exists=behavior)) == 2
            told = capsys.readouterr().err
            assert f"log_path={folder} is in use: process {first.pid} on " in told.replace("\n", " ")
            assert "Nothing was touched" in told
        assert contents(folder) == before
        os.kill(first.pid, signal.SIGCONT)
    reached = len(steps(folder))
    assert (folder / LOCK).read_text() != ""  # the name of who was killed is left, the lock is not
    again = arguments(options, log_path=folder, max_steps=reached + 1, behavior_if_exists="resume")
    assert main(again) == 0
    assert steps(folder) == list(range(reached + 1))
    assert (folder / LOCK).read_text() == ""


def test_of_two_processes_that_begin_at_once_one_is_refused(tmp_path):
    prepared = prepare_run_folder(tmp_path / "run", behavior="raise", config={"seed": 2})
    with holding(tmp_path / "run") as first:
        os.kill(first.pid, signal.SIGSTOP)  # it may not have written all that a run begins with
        before = contents(tmp_path)
        with pytest.raises(ValueError, match=f"is in use: process {first.pid} on"):
            prepared.open()
        assert contents(tmp_path) == before
        os.kill(first.pid, signal.SIGCONT)
    with pytest.raises(ValueError, match=r"a run was begun in log_path=.* meanwhile"):
        prepared.open()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["seed"] == 1


def test_what_reads_a_live_run_and_writes_beside_it_leaves_its_logs_alone(tmp_path, options):
    folder = tmp_path / "run"
    assert main(arguments(options, log_path=folder, max_steps=2)) == 0
    logs = ("metrics.jsonl", "transcripts.jsonl", "checkpoints.jsonl", "config.json")
    with holding_lock(folder):
        before = contents(folder)
        assert write_report(folder).exists()
        assert [path.name for path in export_run(folder, ExportOptions(merge=False))] == ["adapter"]
        assert cli.main(["rescore", str(folder)]) == 2  # no ballots; it writes nothing in any case
        after = contents(folder)
    assert [after[folder / name] for name in logs] == [before[folder / name] for name in logs]
    assert after[folder / LOCK] == before[folder / LOCK]


def holding_lock(folder):
    script = (
        "import sys; from pathlib import Path; from viva.run.files import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1])); lock.acquire(); sys.stdin.read()"
    )
    return process(script, folder, until=lambda: (folder / LOCK).read_text() != "")


def test_one_process_may_open_a_folder_again_and_closing_lets_others_in(tmp_path):
    first = prepare_run_folder(tmp_path, behavior="resume", config={}).open()
    second = prepare_run_folder(tmp_path, behavior="resume", config={}).open()
    first.close()
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    with pytest.raises(AssertionError, match="it ended by itself"), holding_elsewhere(tmp_path):
        pass
    second.close()
    second.close()  # once more does no harm
    assert (tmp_path / LOCK).read_text() == ""
    with holding_lock(tmp_path):
        pass


def holding_elsewhere(folder):
    return process(HOLD, folder, until=lambda: False)


def test_a_file_system_without_locks_is_refused_in_words(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(
        ValueError, match=r"without locks \(No locks available\).* Give a log_path on a local"
    ):
        prepare_run_folder(tmp_path / "run", behavior="raise", config={}).open()
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_lock_that_names_nobody_is_refused_without_control_characters(tmp_path):
    (tmp_path / LOCK).touch()
    with holding_lock(tmp_path):
        for text, told in (
            ("", "another process writes"),
            ('{"pid": "\\u001b[2J"}', r"process \?\[2J on None"),
        ):
            (tmp_path / LOCK).write_text(text)
            with pytest.raises(ValueError, match=told):
                FolderLock(tmp_path).acquire()
