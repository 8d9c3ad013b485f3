import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from viva.engine import checkpoint
from viva.engine.checkpoint import MANIFEST, read_checkpoint, read_tensors, write_checkpoint, write_tensors
from viva.model_files import SEAL, check_name, sealed, unsealed
from viva.run.export import export_weights


def write_one(folder: Path) -> None:
    write_tensors(folder / "weights.safetensors", {"a": torch.arange(6.0).view(2, 3).T})
    (folder / "notes").mkdir()
    (folder / "notes" / "config.json").write_text("{}")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "weights" / "one"
    write_checkpoint(path, {"steps": 3}, write_one, overwrite=False)
    return path


def test_what_was_written_is_read(saved: Path) -> None:
    assert read_checkpoint(saved)["steps"] == 3
    assert torch.equal(read_tensors(saved / "weights.safetensors")["a"], torch.arange(6.0).view(2, 3).T)
    assert [path.name for path in saved.parent.iterdir()] == ["one"]


@pytest.mark.parametrize("name", ["weights.safetensors", "notes/config.json"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the test restores the file
@given(data=st.data())
def test_any_change_to_any_file_is_noticed_and_the_file_named(saved: Path, name: str, data: Any) -> None:
    file = saved / name
    original = file.read_bytes()
    position = data.draw(st.integers(0, len(original) - 1))
    damage = data.draw(st.sampled_from(["flip", "cut", "append"]))
    changed = {
        "flip": original[:position] + bytes([original[position] ^ 1]) + original[position + 1 :],
        "cut": original[:position],
        "append": original + b"\0",
    }[damage]
    try:
        file.write_bytes(changed)
        with pytest.raises(ValueError, match=f"{name}' is damaged"):
            read_checkpoint(saved)
    finally:
        file.write_bytes(original)
    read_checkpoint(saved)


def test_a_missing_file_is_named(saved: Path) -> None:
    (saved / "weights.safetensors").unlink()
    with pytest.raises(ValueError, match=r"weights\.safetensors' is missing"):
        read_checkpoint(saved)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}'])
def test_a_damaged_manifest_is_named(saved: Path, text: str) -> None:
    (saved / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=MANIFEST):
        read_checkpoint(saved)


def test_a_manifest_of_before_they_were_sealed_is_read_and_a_later_one_needs_its_seal(saved: Path) -> None:
    manifest = json.loads((saved / MANIFEST).read_text())
    del manifest[SEAL]
    (saved / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="has no sha256"):
        read_checkpoint(saved)
    (saved / MANIFEST).write_text(json.dumps(manifest | {"format": 1}))
    assert read_checkpoint(saved)["steps"] == 3


def test_a_manifest_that_was_changed_is_refused(saved: Path) -> None:
    (saved / MANIFEST).write_text((saved / MANIFEST).read_text().replace('"steps": 3', '"steps": 4'))
    with pytest.raises(ValueError, match=r"checkpoint\.json' is damaged .* remove the entry 'sha256'"):
        read_checkpoint(saved)


def test_a_manifest_cannot_name_files_elsewhere(saved: Path) -> None:
    (saved.parent / "secret").write_text("x")
    manifest = json.loads((saved / MANIFEST).read_text())
    for name in ("../secret", str(saved.parent / "secret"), "a\0b"):
        (saved / MANIFEST).write_text(json.dumps(sealed(manifest | {"files": {name: "0"}})))
        with pytest.raises(ValueError, match="which is not in that folder"):
            read_checkpoint(saved)


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)
        ),
        max_size=4,
    )
)
def test_what_was_sealed_is_unsealed(content: dict[str, Any]) -> None:
    content.pop(SEAL, None)
    assert unsealed(json.loads(json.dumps(sealed(content))), "x") == content
    changed = sealed(content) | {"more": 1, SEAL: sealed(content)[SEAL]}
    if "more" not in content:
        with pytest.raises(ValueError, match="x is damaged"):
            unsealed(changed, "x")


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a checkpoint"):
        read_checkpoint(tmp_path)


def test_a_checkpoint_is_replaced_only_when_asked(saved: Path) -> None:
    with pytest.raises(ValueError, match="overwrite=True"):
        write_checkpoint(saved, {"steps": 4}, write_one, overwrite=False)
    assert read_checkpoint(saved)["steps"] == 3
    write_checkpoint(saved, {"steps": 4}, write_one, overwrite=True)
    assert read_checkpoint(saved)["steps"] == 4
    assert [path.name for path in saved.parent.iterdir()] == ["one"]


@pytest.mark.parametrize("failing_call", ["write", "digest", "first rename", "second rename"])
def test_a_failure_while_writing_leaves_the_old_checkpoint_and_no_remains(
    saved: Path, failing_call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, renames = os.rename, list[Any]()

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    def fail_once(source: Any, target: Any) -> None:
        renames.append(target)
        if len(renames) == (1 if failing_call == "first rename" else 2):
            fail()
        rename(source, target)

    if failing_call == "digest":
        monkeypatch.setattr(checkpoint, "file_digest", fail)
    if "rename" in failing_call:
        monkeypatch.setattr(os, "rename", fail_once)
    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(saved, {}, fail if failing_call == "write" else write_one, overwrite=True)
    monkeypatch.undo()
    assert read_checkpoint(saved)["steps"] == 3
    assert [path.name for path in saved.parent.iterdir()] == ["one"]


class Killed(BaseException):
    """Stands for a process that ends here: nothing after it runs."""


@pytest.mark.parametrize("killing_rename", [1, 2])
def test_a_writer_killed_at_any_rename_loses_nothing(
    saved: Path, killing_rename: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, renames = os.rename, list[Any]()

    def kill(source: Any, target: Any) -> None:
        renames.append(target)
        if len(renames) >= killing_rename:
            raise Killed
        rename(source, target)

    monkeypatch.setattr(os, "rename", kill)
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
    with pytest.raises(Killed):
        write_checkpoint(saved, {"steps": 4}, write_one, overwrite=True)
    monkeypatch.undo()
    assert read_checkpoint(saved)["steps"] == 3
    write_checkpoint(saved, {"steps": 5}, write_one, overwrite=True)
    assert read_checkpoint(saved)["steps"] == 5
    assert [path.name for path in saved.parent.iterdir()] == ["one"]


@given(st.text(max_size=12))
def test_an_accepted_name_stays_in_its_folder(name: str) -> None:
    try:
        check_name(name)
    except ValueError:
        return
    folder = Path("/states/weights")
    assert (folder / name).resolve().parent == folder


def test_a_damaged_state_is_not_exported(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "adapter_config.json").write_text("{}")
        write_tensors(folder / "adapter_model.safetensors", {"a": torch.zeros(3)})

    state = tmp_path / "state"
    description = {
        "base_model": "unused",
        "adapter": {"rank": 1, "seed": 0},
        "num_steps": 0,
        "user_metadata": {},
    }
    write_checkpoint(state, description, write, overwrite=False)
    assert export_weights(str(state), model="unused", folder=tmp_path) == tmp_path / "adapter"
    (state / "adapter_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"adapter_config\.json' is damaged"):
        export_weights(str(state), model="unused", folder=tmp_path)
