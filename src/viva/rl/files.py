"""Writing that survives a crash: a file is either the old one or the new one, never half of one."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

__all__ = ["read_json_lines", "write_atomic"]


def write_atomic(path: Path, text: str) -> None:
    """Replace a file's content in one step, flushed to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        os.fchmod(descriptor, 0o644)  # temporary files are private; what they become is not
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSONL file. A torn last line (a crash while writing) is left out; a missing file is empty.

    Raises:
        ValueError: If any other line is not an object; the message names file and line.
    """
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value: object = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                return
            raise ValueError(
                f"{path}:{number}: not valid JSON ({error}); the file was changed by hand?"
            ) from error
        if not isinstance(value, dict):
            raise ValueError(f"{path}:{number}: expected an object; got {type(value).__name__}")
        yield cast(dict[str, Any], value)
