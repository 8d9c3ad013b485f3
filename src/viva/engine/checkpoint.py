"""Folders of weights on disk: safetensors and JSON only, written whole or not at all, checked when read.

A checkpoint is written beside its place, forced to disk, then renamed. ``checkpoint.json`` describes it and holds the
SHA-256 of every other file.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "MANIFEST",
    "check_name",
    "read_checkpoint",
    "read_tensors",
    "write_checkpoint",
    "write_tensors",
]

MANIFEST = "checkpoint.json"
_FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def check_name(name: str) -> str:
    """Return a checkpoint's name if it is one.

    Raises:
        ValueError: It could leave its folder or is not portable.
    """
    if not _NAME.fullmatch(name) or ".." in name or name.startswith("."):
        raise ValueError(
            f"{name!r} is not a checkpoint name. Use letters, digits, '_', '-' and '.', without '..' and not starting "
            "with '.'."
        )
    return name


def write_checkpoint(
    path: Path, description: dict[str, Any], write_files: Callable[[Path], None], *, overwrite: bool
) -> None:
    """Write a checkpoint so that it is there completely or not at all.

    Args:
        path: The folder to create.
        description: What the reader needs to know, as JSON.
        write_files: Writes the files into the folder it is given.
        overwrite: Replace a checkpoint of this name.

    Raises:
        ValueError: There is one already and ``overwrite`` is false.
    """
    _recover(path)
    if path.exists() and not overwrite:
        raise ValueError(f"The checkpoint {str(path)!r} exists. Choose another name, or pass overwrite=True.")
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}~*"):  # of a writer that was killed
        shutil.rmtree(leftover)
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}~", dir=path.parent))
    try:
        write_files(staging)
        files = sorted(file for file in staging.rglob("*") if file.is_file())
        manifest = {
            "format": _FORMAT,
            **description,
            "files": {file.relative_to(staging).as_posix(): _digest(file) for file in files},
        }
        (staging / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        folders = [folder for folder in staging.rglob("*") if folder.is_dir()]
        for file in [*files, staging / MANIFEST, *folders, staging]:
            _force_to_disk(file)
        if path.exists():
            os.rename(path, _replaced(path))
        os.rename(staging, path)
        _force_to_disk(path.parent)
    finally:
        _recover(path)
        shutil.rmtree(staging, ignore_errors=True)
    shutil.rmtree(_replaced(path), ignore_errors=True)


def _replaced(path: Path) -> Path:
    """Where a checkpoint waits until the one that replaces it is in place."""
    return path.parent / f".{path.name}~replaced"


def _recover(path: Path) -> None:
    """Put back a checkpoint whose replacement was cut short."""
    if not path.exists() and _replaced(path).exists():
        os.rename(_replaced(path), path)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The description of a checkpoint, after checking every file's digest.

    Raises:
        ValueError: Not a checkpoint, of an unknown format, or with a damaged or missing file.
    """
    _recover(path)
    file = path / MANIFEST
    if not file.is_file():
        raise ValueError(
            f"{str(path)!r} is not a checkpoint: it has no {MANIFEST}. Give the path that was returned by saving."
        )
    try:
        manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        listed: dict[str, str] = manifest["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(file)!r} is damaged ({error}); use another checkpoint.") from error
    if manifest.get("format") != _FORMAT:
        raise ValueError(
            f"{str(file)!r} has format {manifest.get('format')!r}; this version reads {_FORMAT}."
        )
    for name, digest in listed.items():
        if not (path / name).is_file():
            raise ValueError(f"{str(path / name)!r} is missing; use another checkpoint.")
        if _digest(path / name) != digest:
            raise ValueError(
                f"{str(path / name)!r} is damaged: its SHA-256 is not the one recorded. Use another checkpoint."
            )
    return manifest


def write_tensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors as safetensors."""
    from safetensors.torch import save_file

    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        str(file),
        {"format": "pt"},
    )


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Read safetensors on the CPU."""
    from safetensors.torch import load_file

    return load_file(str(file))


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
