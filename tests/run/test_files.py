import os
import stat
from pathlib import Path

import pytest

from viva.run.files import read_json_lines, write_atomic


def test_a_written_file_is_whole_readable_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "config.json"
    write_atomic(path, "first")
    write_atomic(path, "second")
    assert path.read_text(encoding="utf-8") == "second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [entry.name for entry in path.parent.iterdir()] == ["config.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    write_atomic(path, "old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


def test_a_torn_last_line_is_left_out_and_any_other_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"st', encoding="utf-8")
    assert [row["step"] for row in read_json_lines(path)] == [0, 1]
    path.write_text('{"step": 0}\n{"st\n{"step": 2}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: .*The file is damaged"):
        list(read_json_lines(path))
    assert list(read_json_lines(tmp_path / "missing.jsonl")) == []
