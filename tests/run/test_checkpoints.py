"""Lines of the index: what a checkpoint records, how long it lives, and what its digests are of."""

import hashlib
import json
import os
import platform
from importlib import metadata
from types import SimpleNamespace

import pytest
import tinker
import torch
from bandit_engine import BanditTrainer

import viva
from viva.run.checkpoints import Checkpoints, environment


class Engine:
    """Saves states at a remote place, and remembers how it was asked to."""

    def __init__(self, *, precision=None, taken=()):
        self.asked = []
        self.taken = set(taken)
        if precision is not None:
            self.precision = precision

    async def save_state(self, name, **options):
        self.asked.append((name, options))
        if name in self.taken:
            raise tinker.ConflictError(
                "taken", response=SimpleNamespace(request=None, status_code=409, headers={}), body=None
            )
        return SimpleNamespace(path=f"tinker://run/weights/{name}")


async def save(checkpoints, engine, *steps, **options):
    for step in steps:
        last = await checkpoints.save(engine, next_step=step, log_sizes={}, **options)
    return last


def steps_of(checkpoints):
    return [one.next_step for one in checkpoints.all()]


async def test_a_checkpoint_records_its_step_its_state_and_what_it_was_computed_with(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("abcdef")
    checkpoints = Checkpoints(tmp_path)
    saved = await checkpoints.save(
        BanditTrainer(tmp_path / "state"), next_step=12, log_sizes={"metrics.jsonl": 4}
    )
    assert (saved.name, saved.next_step) == ("000012", 12)
    assert saved.state_path == os.path.join("state", "weights", "000012")
    assert (saved.final, saved.best, saved.ttl_seconds) == (False, False, None)
    assert saved.log_sizes == {"metrics.jsonl": 4}
    assert saved.log_digests == {"metrics.jsonl": hashlib.sha256(b"abcd").hexdigest()}
    assert saved.environment == environment()
    assert saved.earlier_environments == []
    assert checkpoints.latest() == saved
    (line,) = (tmp_path / "checkpoints.jsonl").read_text().splitlines()
    assert json.loads(line)["next_step"] == 12


def test_the_environment_is_what_results_depend_on():
    now = environment()
    assert now["viva"] == viva.__version__
    for package in ("tinker", "torch", "transformers", "numpy"):
        assert now[package] == metadata.version(package)
    assert now["python"] == platform.python_version()
    assert now["machine"] == platform.machine()
    assert now["threads"] == str(torch.get_num_threads())
    assert now["matmul"] == torch.get_float32_matmul_precision()
    assert torch.backends.cpu.get_cpu_capability() in now["processor"]
    assert now["gpu"] == (torch.cuda.get_device_name() if torch.cuda.is_available() else "none")


def test_a_setting_that_changes_is_seen_at_once():
    before = environment()
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        torch.set_num_threads(threads + 1)
        torch.set_float32_matmul_precision("high" if precision == "highest" else "highest")
        now = environment()
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
    assert {name: now[name] for name in now if now[name] != before[name]} == {
        "threads": str(threads + 1),
        "matmul": "high" if precision == "highest" else "highest",
    }


def test_the_processor_is_the_one_the_system_names_first(tmp_path, monkeypatch):
    told = tmp_path / "cpuinfo"
    told.write_text("vendor: x\nmodel name\t: Fast: One\nmodel name\t: Slow\n")
    monkeypatch.setattr("viva.run.checkpoints._PROCESSORS", told)
    assert environment()["processor"].startswith("Fast: One (")
    monkeypatch.setattr("viva.run.checkpoints._PROCESSORS", tmp_path / "missing")
    assert environment()["processor"].startswith(f"{platform.processor() or 'unknown'} (")


def test_a_package_that_is_not_installed_has_an_unknown_version(monkeypatch):
    monkeypatch.setattr("viva.run.checkpoints._PACKAGES", ("torch", "viva-is-never-called-so"))
    assert environment()["torch"] == metadata.version("torch")
    assert environment()["viva-is-never-called-so"] == "unknown"


async def test_the_engines_precision_is_part_of_it_and_each_change_is_told_by_name(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    saved = await save(checkpoints, Engine(precision="exact"), 1)
    assert saved.environment["precision"] == "exact"
    assert checkpoints.changed_environment(saved, Engine(precision="exact")) == {}
    changed = checkpoints.changed_environment(saved, Engine(precision="fast"))
    assert changed == {"precision": ("exact", "fast")}
    plain = await save(checkpoints, Engine(), 2)
    assert checkpoints.changed_environment(plain, Engine(precision="fast")) == {
        "precision": ("not recorded", "fast")
    }
    assert checkpoints.changed_environment(saved, Engine()) == {}


async def test_environments_of_earlier_steps_stay_known(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=9)
    one, two = Engine(precision="exact"), Engine(precision="fast")
    first = await save(checkpoints, one, 1)
    same = await save(checkpoints, one, 2)
    assert same.earlier_environments == []
    other = await save(checkpoints, two, 3)
    assert other.earlier_environments == [first.environment]
    last = await save(checkpoints, two, 4)
    assert last.earlier_environments == [first.environment]
    back = await save(checkpoints, one, 5)
    assert back.earlier_environments == [first.environment, other.environment]


async def test_the_last_steps_stay_and_the_end_of_a_run_pushes_nothing_out_beyond_them(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    await save(checkpoints, Engine(), 1, 2, 3)
    assert steps_of(checkpoints) == [2, 3]
    await save(checkpoints, Engine(), 4, final=True)
    assert steps_of(checkpoints) == [2, 3, 4]
    assert [one.final for one in checkpoints.all()] == [False, False, True]
    await save(checkpoints, Engine(), 5)  # the run was made longer
    assert [(one.next_step, one.final) for one in checkpoints.all()] == [(4, False), (5, False)]


async def test_three_checkpoints_are_kept_unless_told_otherwise(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    await save(checkpoints, Engine(), 1, 2, 3, 4)
    assert steps_of(checkpoints) == [2, 3, 4]


async def test_only_what_is_passed_over_expires(tmp_path):
    checkpoints, engine = Checkpoints(tmp_path, ttl_seconds=60), Engine()
    assert (await save(checkpoints, engine, 1)).ttl_seconds == 60
    assert (await save(checkpoints, engine, 2, best=True)).ttl_seconds is None
    assert (await save(checkpoints, engine, 3)).ttl_seconds == 60
    kept = await save(checkpoints, engine, 3, final=True)
    assert (kept.name, kept.ttl_seconds, kept.final) == ("000003-kept", None, True)
    again = await save(checkpoints, engine, 3, final=True)
    assert again == kept
    assert engine.asked == [
        ("000001", {"ttl_seconds": 60}),
        ("000002", {}),
        ("000003", {"ttl_seconds": 60}),
        ("000003-kept", {}),
    ]
    assert checkpoints.best().next_step == 2


async def test_a_name_whose_answer_was_lost_is_saved_under_another(tmp_path):
    checkpoints, engine = Checkpoints(tmp_path, ttl_seconds=60), Engine(taken={"000001"})
    saved = await save(checkpoints, engine, 1)
    assert engine.asked == [("000001", {"ttl_seconds": 60}), ("000001-again", {"ttl_seconds": 60})]
    assert checkpoints.resolve(saved) == "tinker://run/weights/000001-again"


async def test_there_is_no_best_before_one_was_marked_and_the_mark_survives_an_update(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert (checkpoints.latest(), checkpoints.best(), checkpoints.all()) == (None, None, [])
    await save(checkpoints, Engine(), 1)
    assert checkpoints.best() is None
    await save(checkpoints, Engine(), 1, best=True)
    updated = await save(checkpoints, Engine(), 1)
    assert updated.best
    assert checkpoints.best() == updated


async def test_digests_are_of_the_beginning_of_a_log_whatever_came_between(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=9)
    log = tmp_path / "metrics.jsonl"
    content = bytes(number % 251 for number in range(3 * 2**20))
    log.write_bytes(content)
    sizes = [0, 5, 2**20, 2**20 + 1, len(content) - 1, 7, len(content)]
    for step, size in enumerate(sizes):
        saved = await checkpoints.save(Engine(), next_step=step, log_sizes={log.name: size, "none.jsonl": 0})
        assert saved.log_digests[log.name] == hashlib.sha256(content[:size]).hexdigest()
        assert saved.log_digests["none.jsonl"] == hashlib.sha256(b"").hexdigest()
        checkpoints.check_logs(saved)
    log.write_bytes(content[: 2**20] + b"x" + content[2**20 + 1 :])
    fresh = Checkpoints(tmp_path, keep=9)
    for checkpoint, size in zip(fresh.all(), sizes, strict=True):
        if size <= 2**20:
            fresh.check_logs(checkpoint)
        else:
            with pytest.raises(ValueError, match=rf"no longer begins .* after {checkpoint.next_step} steps"):
                fresh.check_logs(checkpoint)


async def test_going_back_forgets_what_was_read_of_the_logs(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    log = tmp_path / "metrics.jsonl"
    log.write_text("abcdef")
    first = await checkpoints.save(Engine(), next_step=1, log_sizes={log.name: 2})
    await checkpoints.save(Engine(), next_step=2, log_sizes={log.name: 6})
    checkpoints.discard_after(first)
    log.write_text("abXY")
    again = await checkpoints.save(Engine(), next_step=2, log_sizes={log.name: 4})
    assert again.log_digests[log.name] == hashlib.sha256(b"abXY").hexdigest()
    assert steps_of(checkpoints) == [1, 2]


async def test_going_back_to_the_checkpoint_itself_keeps_it_and_before_all_of_them_leaves_none_in_the_index(
    tmp_path,
):
    checkpoints = Checkpoints(tmp_path)
    await save(checkpoints, Engine(), 1, 2, 3)
    before = (tmp_path / "checkpoints.jsonl").stat().st_ino
    checkpoints.discard_after(checkpoints.latest())
    assert (tmp_path / "checkpoints.jsonl").stat().st_ino == before  # nothing to write
    checkpoints.discard_after(checkpoints.all()[1])
    assert steps_of(checkpoints) == [1, 2]
    checkpoints.discard_after(None)
    assert (checkpoints.all(), checkpoints.damage()) == ([], [])
    checkpoints.check_index()
    (tmp_path / "checkpoints.jsonl").unlink()
    checkpoints.check_index()  # as in a run of an older version that did nothing yet
    (tmp_path / "metrics.jsonl").write_text("{}")
    with pytest.raises(ValueError, match="is missing, but steps are logged"):
        checkpoints.check_index()
    checkpoints.discard_after(None)
    assert checkpoints.all() == []


async def test_of_a_folder_of_states_only_those_without_a_line_are_deleted(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    await checkpoints.save(BanditTrainer(tmp_path / "state"), next_step=1, log_sizes={})
    weights = tmp_path / "state" / "weights"
    (weights / "note.txt").write_text("mine")
    (weights / "000002").mkdir()
    (weights / "mine").mkdir()
    (weights / "link").symlink_to(tmp_path / "state", target_is_directory=True)
    (weights / ".000003~a").mkdir()
    checkpoints.discard_unlisted()
    assert sorted(path.name for path in weights.iterdir()) == ["000001", "link", "mine", "note.txt"]
    Checkpoints(tmp_path / "not there").discard_unlisted()


async def test_the_folder_of_a_dropped_state_is_deleted(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    engine = BanditTrainer(tmp_path / "state")
    await checkpoints.save(engine, next_step=1, log_sizes={})
    await checkpoints.save(engine, next_step=2, log_sizes={})
    assert [path.name for path in (tmp_path / "state" / "weights").iterdir()] == ["000002"]


async def test_a_former_best_state_that_would_stay_for_ever_is_deleted_on_the_server(tmp_path):
    deleted = []

    async def delete(path):
        deleted.append(path)

    async def run(folder, **options):
        folder.mkdir()
        checkpoints = Checkpoints(folder, keep=1, **options)
        checkpoints.delete_on_server = delete
        await save(checkpoints, Engine(), 1, best=True)
        await save(checkpoints, Engine(), 2)
        assert deleted == []
        await save(checkpoints, Engine(), 3, best=True)  # drops the second, which expires, and the first
        return steps_of(checkpoints)

    assert await run(tmp_path / "kept") == [3]
    assert deleted == []
    assert await run(tmp_path / "expiring", ttl_seconds=60) == [3]
    assert deleted == ["tinker://run/weights/000001"]


async def test_empty_lines_of_the_index_say_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    await save(checkpoints, Engine(), 1, 2)
    path = tmp_path / "checkpoints.jsonl"
    path.write_text(path.read_text().replace("\n", "\n\n  \n"))
    assert steps_of(checkpoints) == [1, 2]
    assert checkpoints.damage() == []


async def test_a_state_outside_of_the_run_is_refused_when_it_is_first_saved(tmp_path):
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    run.mkdir()
    with pytest.raises(
        ValueError, match=r"elsewhere/weights/000001, outside of the run's folder .*state_dir"
    ):
        await Checkpoints(run).save(BanditTrainer(elsewhere), next_step=1, log_sizes={})
    assert Checkpoints(run).all() == []


async def test_an_index_that_was_cut_between_two_lines_is_told(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    await save(checkpoints, Engine(), 1, 2)
    path = tmp_path / "checkpoints.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    assert steps_of(checkpoints) == [1]
    assert checkpoints.damage() == [f"{path}:1: 1 lines stood behind it"]
