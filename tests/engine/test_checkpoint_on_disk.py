"""What is on the disk, when, and how its errors are told."""

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from viva.engine import checkpoint
from viva.engine.checkpoint import MANIFEST, read_checkpoint, read_tensors, write_checkpoint, write_tensors
from viva.model_files import SEAL, check_name, is_inside, sealed, unsealed


def write_two(folder: Path) -> None:
    (folder / "notes").mkdir()
    (folder / "notes" / "config.json").write_text("{}")
    (folder / "weights").write_bytes(b"abc")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "weights" / "one"
    write_checkpoint(path, {"steps": 3}, write_two, overwrite=False)
    return path


def test_a_manifest_describes_the_checkpoint_and_holds_the_digest_of_every_file(saved: Path) -> None:
    text = (saved / MANIFEST).read_text(encoding="utf-8")
    manifest = json.loads(text)
    assert text.endswith("}\n")
    assert manifest == sealed({key: value for key, value in manifest.items() if key != SEAL})
    assert manifest["files"] == {
        "notes/config.json": hashlib.sha256(b"{}").hexdigest(),
        "weights": hashlib.sha256(b"abc").hexdigest(),
    }
    assert read_checkpoint(saved) == {key: value for key, value in manifest.items() if key != SEAL}
    assert set(read_checkpoint(saved)) == {"format", "steps", "files"}


def test_everything_is_on_the_disk_before_it_takes_its_place(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    force, rename = os.fsync, os.rename

    def forced(descriptor: int) -> None:
        done.append(os.fstat(descriptor).st_ino)
        force(descriptor)

    def renamed(source: Path, target: Path) -> None:
        done.append((Path(source).name, Path(target).name))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", forced)
    monkeypatch.setattr(os, "rename", renamed)
    write_checkpoint(saved, {}, write_two, overwrite=True)
    moves = [place for place, event in enumerate(done) if isinstance(event, tuple)]
    assert [done[place][1] for place in moves] == [".one~replaced", "one"]
    there = {path.stat().st_ino for path in [saved, *saved.rglob("*")]}
    assert len(there) == 5
    assert there == set(done[: moves[0]])
    assert saved.parent.stat().st_ino in done[moves[1] :]  # the rename itself
    assert [path.name for path in saved.parent.iterdir()] == ["one"]


def test_files_are_written_beside_their_place_where_a_rename_cannot_tear_them(saved: Path) -> None:
    seen: list[Path] = []

    def write(folder: Path) -> None:
        seen.append(folder)
        write_two(folder)

    write_checkpoint(saved, {}, write, overwrite=True)
    assert [folder.parent for folder in seen] == [saved.parent]
    assert seen[0].name.startswith(".one~")


def test_remains_of_a_killed_writer_go_with_the_next_one_and_those_of_others_stay(saved: Path) -> None:
    for name in (".one~abc", ".two~abc"):
        (saved.parent / name).mkdir()
    write_checkpoint(saved, {}, write_two, overwrite=True)
    assert sorted(path.name for path in saved.parent.iterdir()) == [".two~abc", "one"]


def test_a_replacement_that_was_cut_short_is_undone_before_anything_else(saved: Path) -> None:
    saved.rename(saved.parent / ".one~replaced")
    with pytest.raises(ValueError, match="exists"):
        write_checkpoint(saved, {}, write_two, overwrite=False)
    assert read_checkpoint(saved)["steps"] == 3
    saved.rename(saved.parent / ".one~replaced")
    assert read_checkpoint(saved)["steps"] == 3


@pytest.mark.parametrize(
    ("call", "doing"),
    [
        (lambda path, fail: write_checkpoint(path, {}, fail, overwrite=True), "written"),
        (lambda path, fail: read_checkpoint(path), "read"),
    ],
    ids=["write", "read"],
)
def test_an_error_of_the_disk_names_the_checkpoint_and_keeps_its_number(
    saved: Path, call: Callable[..., Any], doing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "file_digest", fail)
    with pytest.raises(
        OSError, match=rf"No space left on device \(while the checkpoint was {doing}\)"
    ) as told:
        call(saved, fail)
    assert told.value.errno == errno.ENOSPC
    assert str(told.value.filename) == str(saved)


def test_an_error_that_names_its_file_goes_on_naming_it(saved: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "not there" / "x").write_text("")

    with pytest.raises(OSError, match="while the checkpoint was written") as told:
        write_checkpoint(saved, {}, fail, overwrite=True)
    assert told.value.errno == errno.ENOENT
    assert str(told.value.filename).endswith("x")


def test_tensors_are_told_of_by_file(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    write_tensors(file, {"a": torch.ones(2, requires_grad=True), "b": torch.arange(4).view(2, 2).T})
    assert {name: tensor.tolist() for name, tensor in read_tensors(file).items()} == {
        "a": [1.0, 1.0],
        "b": [[0, 2], [1, 3]],
    }
    with pytest.raises(OSError, match="No such file") as told:
        write_tensors(tmp_path / "not there" / "a", {"a": torch.ones(1)})
    assert (told.value.errno, told.value.filename) == (errno.ENOENT, str(tmp_path / "not there" / "a"))
    file.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"a\.safetensors' is not a safetensors file"):
        read_tensors(file)


def test_tensors_say_that_they_are_torchs_as_other_programs_ask(tmp_path: Path) -> None:
    from safetensors import safe_open

    write_tensors(tmp_path / "a", {"a": torch.ones(1)})
    with safe_open(tmp_path / "a", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("format_", [0, 3, 99, None, "2"])
def test_only_known_formats_are_read(saved: Path, format_: Any) -> None:
    manifest = json.loads((saved / MANIFEST).read_text()) | {"format": format_}
    (saved / MANIFEST).write_text(json.dumps(sealed(manifest)))
    with pytest.raises(ValueError, match=rf"has format {format_!r}; this version reads 1 and 2"):
        read_checkpoint(saved)


def test_a_seal_is_of_the_content_and_not_of_its_order() -> None:
    content = {"b": [1, 2], "a": {"x": None}}
    again = {"a": {"x": None}, "b": (1, 2)}
    assert list(sealed(content)) == ["b", "a", SEAL]
    assert sealed(content)[SEAL] == sealed(again)[SEAL]
    assert sealed(sealed(content)) == sealed(content)
    known = '{"a":{"x":null},"b":[1,2]}'
    assert sealed(content)[SEAL] == hashlib.sha256(known.encode()).hexdigest()
    assert unsealed(content, "x") == content  # never sealed
    with pytest.raises(ValueError, match=r"the line is damaged .* remove the entry 'sha256'"):
        unsealed(content | {SEAL: "0"}, "the line")


NAMES = [
    *("step_000012", "a", "A-b.c", "000010"),
    *("a" * 128, "console", "com", "xcon", "con-x", "a.con", "_", "0"),
]
NO_NAMES = [
    *("", "..", "a/b", "a..b", ".hidden", "a b", "a\n", "ü", "tinker://x", "a\x00", "a\\b", "a."),
    *("a" * 129, "CON", "Com1", "LPT9.x", "aux", "nul.x", "prn.a.b", ".", "-/"),
]


@pytest.mark.parametrize("name", NAMES)
def test_names_up_to_the_edge_of_what_is_allowed_are_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", NO_NAMES)
def test_names_that_could_leave_their_folder_or_are_not_portable_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="is not a checkpoint name"):
        check_name(name)


def test_of_a_long_name_the_message_holds_no_more_than_it_takes_to_see_it() -> None:
    with pytest.raises(ValueError, match="is not a checkpoint name") as told:
        check_name("a" * 10_000)
    assert "a" * 129 in str(told.value)
    assert "a" * 130 not in str(told.value)


def test_inside_is_what_is_meant_when_all_links_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "out").symlink_to(tmp_path)
    (folder / "in").symlink_to(folder / "x")
    (folder / "round").symlink_to(folder / "round")
    assert is_inside(folder / "a" / "b", folder)
    assert is_inside(folder, folder)
    assert is_inside(folder / "in", folder)
    for path in (tmp_path, folder / "..", folder / "out" / "x", tmp_path / "runner", folder / "a\0"):
        assert not is_inside(path, folder)
