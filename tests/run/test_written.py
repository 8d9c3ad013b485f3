"""Only what Viva wrote into a run's folder is deleted there, and nothing is written over what it did not write."""

import contextlib
import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from random_models import make_model

from viva import cli
from viva.recipes.programs import train_recipe
from viva.run.files import LOCK, MARK, note_written, strangers, write_json
from viva.run.folder import prepare_run_folder

main = partial(train_recipe, "conversation_preference_rl")

CONFIG = {"seed": 1}
BEHAVIORS = ("ask", "delete", "resume", "raise")


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if path.name != LOCK
    }


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def start(folder, behavior="raise", **options):
    return prepare_run_folder(folder, behavior=behavior, config=CONFIG, **options).open()


@pytest.fixture
def run(tmp_path):
    """A folder with all that Viva leaves in one."""
    folder = tmp_path / "run"
    start(folder).close()
    write(folder, "metrics.jsonl", "transcripts.jsonl", "samples.jsonl", "tokens.jsonl", "checkpoints.jsonl")
    write(folder, "trackers.json", "journal/000001-train.jsonl", ".config.json.abcd1234")
    write(folder, *(f"state/weights/000002/{name}" for name in ("checkpoint.json", "model.safetensors")))
    write(folder, "state/weights/.000003~abcd/model.safetensors", "state/client-0/weights/a/checkpoint.json")
    listed = ("report.html", "adapter/adapter_config.json", "export/model/README.md", "eval/000002-ab.json")
    write(folder, *listed)
    note_written([folder / name for name in listed])
    note_written([folder / "wandb"], as_folder=True)
    write(folder, "wandb/run-1/files/config.yaml")
    return folder


def test_all_that_viva_wrote_is_deleted(run):
    assert strangers(run) == []
    start(run, "delete")
    assert sorted(path.name for path in run.iterdir()) == [LOCK, "checkpoints.jsonl", "config.json", MARK]
    assert strangers(run) == []
    assert (run / MARK).read_text().count("\n") == 1


def test_a_whole_model_with_its_tokenizer_and_a_killed_export_are_deleted(run):
    tokenizer = ("tokenizer.json", "chat_template.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
    for place in ("state/weights/000002", "state/client-0/weights/a"):
        write(run, *(f"{place}/{name}" for name in tokenizer))
    write(run, "export/.export~ab_d1234/model/original/params.json", "out/.m.gguf~ab_d1234/m.gguf")
    note_written([run / "export/.export~ab_d1234", run / "out/.m.gguf~ab_d1234"], as_folder=True)
    assert strangers(run) == []
    start(run, "delete")
    assert sorted(path.name for path in run.iterdir()) == [LOCK, "checkpoints.jsonl", "config.json", MARK]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("notes.txt", "notes.txt"),
        ("export/.export~ab_d1234/x", "export/.export~ab_d1234"),
        ("model/config.json", "model"),
        ("tensorboard/events.out.tfevents.1", "tensorboard"),
        ("adapter/notes.txt", "adapter/notes.txt"),
        ("eval/mine.json", "eval/mine.json"),
        ("export/model/mine/x", "export/model/mine"),
        ("state/weights/000002/notes.txt", "state/weights/000002/notes.txt"),
        ("wandb/notes.txt", "wandb/notes.txt"),
        ("wandb/mine/run-2/x", "wandb/mine"),
        ("journal/notes.txt", "journal/notes.txt"),
        ("model.safetensors", "model.safetensors"),
    ],
)
def test_what_viva_did_not_write_refuses_the_deletion(run, name, told):
    write(run, name)
    before = contents(run)
    with pytest.raises(
        ValueError, match=rf"nothing else, but log_path=\S+ holds {told} beside it.*Nothing was"
    ):
        start(run, "delete")
    assert contents(run) == before
    start(run, "resume")  # that needs no room


def test_an_empty_folder_of_the_user_refuses_the_deletion_and_many_names_are_counted(run):
    (run / "mine").mkdir()
    with pytest.raises(ValueError, match="holds mine beside it"):
        start(run, "delete")
    write(run, *(f"notes{number}" for number in range(8)))
    with pytest.raises(ValueError, match="holds mine, notes0, notes1, notes2, notes3 and 4 more beside it"):
        start(run, "delete")


def test_links_are_deleted_themselves_or_refuse_the_deletion(run, tmp_path):
    outside = tmp_path / "outside"
    write(outside, "weights/000001/checkpoint.json", "notes")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(outside / "notes")
    (run / "journal" / "000001-train.jsonl").unlink()
    (run / "journal").rmdir()
    (run / "journal").symlink_to(outside)
    before = contents(outside)
    (run / "mine").symlink_to(outside)
    with pytest.raises(ValueError, match="holds mine beside it"):
        start(run, "delete")
    (run / "mine").unlink()
    start(run, "delete")
    assert contents(outside) == before
    assert not (run / "journal").is_symlink()


@pytest.mark.parametrize("behavior", BEHAVIORS)
def test_a_models_folder_is_no_runs_folder(tmp_path, behavior):
    for number, names in enumerate(
        [
            ("config.json", "model.safetensors", "tokenizer.json"),
            ("model-00001-of-00002.safetensors",),
            ("adapter_config.json",),
            ("model/config.json",),
            ("eval/mine.json", "notes.txt"),
            ("wandb/x",),
            ("metrics.jsonl",),
            (MARK,),
        ]
    ):
        folder = tmp_path / str(number)
        write(folder, *names)
        before = contents(folder)
        with pytest.raises(
            ValueError, match=r"is not the folder of a run of Viva, but holds .* Nothing was touched"
        ):
            start(folder, behavior)
        assert contents(folder) == before
        assert not (folder / LOCK).exists()


def test_a_folder_with_the_users_own_files_takes_a_new_run(tmp_path):
    write(tmp_path, "notes.txt", "prompts/train.jsonl")
    start(tmp_path)
    assert strangers(tmp_path) == ["notes.txt", "prompts"]


@pytest.mark.parametrize("content", [{"recipe": "r", "log_path": "x", "seed": 1}, CONFIG])
def test_a_run_without_a_mark_goes_on_and_is_marked_but_not_deleted(tmp_path, content):
    write_json(tmp_path / "config.json", content)
    write(tmp_path, "metrics.jsonl", "adapter/adapter_config.json")
    with pytest.raises(ValueError, match="already holds a run"):
        start(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(
        ValueError, match=r"without a list .* as version 0.1.0 left it.* delete the folder yourself"
    ):
        start(tmp_path, "delete")
    assert contents(tmp_path) == before
    prepare_run_folder(tmp_path, behavior="resume", config=content).open()
    assert strangers(tmp_path) == ["adapter"]


def test_a_deletion_that_is_cut_short_anywhere_can_be_repeated(run, tmp_path, monkeypatch):
    class KilledError(BaseException):
        pass

    calls = 0

    def dying_at(number, function):
        def call(*args, **options):
            nonlocal calls
            calls += 1
            if calls == number:
                raise KilledError
            return function(*args, **options)

        return call

    for number in range(1, 200):
        calls, folder = 0, tmp_path / f"{number}"
        shutil.copytree(run, folder)
        with monkeypatch.context() as patch:
            for name in ("unlink", "rmdir", "replace"):
                patch.setattr(Path, name, dying_at(number, getattr(Path, name)))
            with contextlib.suppress(KilledError):
                start(folder, "delete")
        was_cut = calls == number
        start(folder, "delete")
        assert sorted(path.name for path in folder.iterdir()) == [
            LOCK,
            "checkpoints.jsonl",
            "config.json",
            MARK,
        ]
        if not was_cut:
            break
    assert 20 < number < 199


def test_a_torn_line_of_the_list_lists_nothing_and_spoils_no_other(run):
    write(run, "eval/a.json", "eval/b.json")
    note_written([run / "eval" / "a.json"])
    text = (run / MARK).read_bytes()
    (run / MARK).write_bytes(text[:-8] + b"\xff")
    note_written([run / "eval" / "b.json"])
    assert strangers(run) == ["eval/a.json"]
    note_written([run / "eval" / "a.json", run / "eval" / "b.json"])
    assert strangers(run) == []


def test_nothing_is_listed_outside_of_a_marked_folder(tmp_path):
    write(tmp_path, "report.html", "other/written.jsonl")
    note_written([tmp_path / "report.html"])
    note_written([tmp_path / "other" / "x"])
    note_written([])
    assert contents(tmp_path / "other") == {"written.jsonl": b"other/written.jsonl"}
    assert not (tmp_path / MARK).exists()


# with a recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "model", "llama")


def options(model, folder, **more):
    given = {
        "model_name": model,
        "train_prompts": '["What is 2 + 2?"]',
        "num_agents": 2,
        "max_rounds": 1,
        "batch_size": 2,
        "max_tokens": 4,
        "max_steps": 1,
        "lora_rank": 1,
        "learning_rate": 1e-3,
        "trackers": "[]",
        "device": "cpu",
        "judge_max_off_set_mass": 1.0,
        "log_path": folder,
    }
    return [f"{name}={value}" for name, value in (given | more).items()]


def test_what_a_recipe_and_the_commands_write_is_listed(tmp_path, model, capsys):
    folder = tmp_path / "run"
    assert main(options(model, folder, trackers="tensorboard")) == 0
    (tmp_path / "test.jsonl").write_text('{"query": "2 + 2", "answer": "4"}\n')
    questions = f"test_prompts_path={tmp_path / 'test.jsonl'}"
    assert cli.main(["eval", str(folder), questions]) == 0
    assert cli.main(["export", str(folder)]) == 0
    assert cli.main(["report", str(folder)]) == 0
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "adapter",
        "export",
        "eval",
        "report.html",
        "tensorboard",
        "trackers.json",
        "state",
        MARK,
    }
    assert strangers(folder) == []
    assert main(options(model, folder, behavior_if_exists="delete")) == 0
    assert strangers(folder) == []
    assert {"export", "eval", "tensorboard"}.isdisjoint(path.name for path in folder.iterdir())
    assert main(options(model, model, behavior_if_exists="delete")) == 2
    assert (
        "is not the folder of a run of Viva, but holds config.json, model.safetensors"
        in capsys.readouterr().err
    )
    assert json.loads((Path(model) / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize("was_there", [False, True])
def test_a_tracker_that_does_not_start_leaves_no_run(tmp_path, model, monkeypatch, capsys, was_there):
    wandb = ModuleType("wandb")

    def refuse(**settings):
        write(Path(settings["dir"]), "wandb/debug.log")
        raise OSError("no network")

    wandb.init, wandb.Error, wandb.Settings = refuse, RuntimeError, dict
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr("viva.run.trackers.find_spec", lambda name: SimpleNamespace(origin="a file"))
    folder = tmp_path / "runs" / "run"
    if was_there:
        write(folder, "notes.txt")
    for _ in range(2):
        assert main(options(model, folder, trackers="tensorboard,wandb", behavior_if_exists="raise")) == 2
        assert "trackers=wandb cannot start: OSError: no network" in capsys.readouterr().err
        assert os.path.exists(folder) == was_there
        assert not was_there or contents(folder) == {"notes.txt": b"notes.txt"}
    assert main(options(model, folder, behavior_if_exists="raise")) == 0
