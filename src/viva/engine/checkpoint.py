"""Folders of weights on disk: safetensors and JSON only, written whole or not at all, checked when read.

A checkpoint is written beside its place, forced to disk, then renamed. ``checkpoint.json`` describes it and holds the
SHA-256 of every other file, and of itself.
"""

import errno
import json
import logging
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from viva.engine.lora import AdapterSettings
from viva.model_files import (
    SEAL,
    check_base,
    file_digest,
    is_inside,
    model_digests,
    sealed,
    undo_replacing,
    unsealed,
    written_beside,
)

MANIFEST = "checkpoint.json"
Manifest = dict[str, Any]
"""Description of a checkpoint, as JSON."""
_FORMAT = 2
_UNSEALED = 1
"""The format of before manifests were sealed."""


def write_checkpoint(
    path: Path, description: Manifest, write_files: Callable[[Path], None], *, overwrite: bool
) -> None:
    """Write a checkpoint, with its description as JSON, so that it is there completely or not at all.

    `write_files` writes the files into the folder it is given.

    Raises:
        ValueError: There is one already and ``overwrite`` is false.
    """
    with _naming(path, "written"):
        undo_replacing(path)
        if path.exists() and not overwrite:
            raise ValueError(
                f"The checkpoint {str(path)!r} exists. Choose another name, or pass overwrite=True."
            )
        with written_beside(path) as staging:
            write_files(staging)
            files = sorted(file for file in staging.rglob("*") if file.is_file())
            manifest = {
                "format": _FORMAT,
                **description,
                "files": {file.relative_to(staging).as_posix(): file_digest(file) for file in files},
            }
            text = json.dumps(sealed(manifest), indent=2) + "\n"
            (staging / MANIFEST).write_text(text, encoding="utf-8")


@contextmanager
def _naming(path: Path, done: str) -> Generator[None, None, None]:
    """Let errors of the disk name the checkpoint; by themselves, those of writing and reading name no file."""
    try:
        yield
    except OSError as error:
        message = f"{error.strerror or error} (while the checkpoint was {done})"
        raise OSError(error.errno, message, str(error.filename or path)) from error


def read_checkpoint(path: Path) -> Manifest:
    """The description of a checkpoint, after checking every file's digest.

    Raises:
        ValueError: Not a checkpoint, of an unknown format, or with a damaged or missing file.
        OSError: A file cannot be read; the error names it.
    """
    with _naming(path, "read"):
        undo_replacing(path)
        file = path / MANIFEST
        if not file.is_file():
            raise ValueError(
                f"{str(path)!r} is not a checkpoint: it has no {MANIFEST}. Give the path that was returned by saving."
            )
        manifest, listed = _read_manifest(file)
        for name, digest in listed.items():
            _check_file(path, name, digest)
        return manifest


def _check_file(path: Path, name: str, digest: str) -> None:
    if not is_inside(path / name, path):
        raise ValueError(
            f"{str(path / MANIFEST)!r} lists {name!r}, which is not in that folder; use another checkpoint."
        )
    if not (path / name).is_file():
        raise ValueError(f"{str(path / name)!r} is missing; use another checkpoint.")
    if file_digest(path / name) != digest:
        raise ValueError(
            f"{str(path / name)!r} is damaged: its SHA-256 is not the one recorded. Use another checkpoint."
        )


def _read_manifest(file: Path) -> tuple[Manifest, dict[str, str]]:
    """The manifest, and the files it lists with their digests."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        manifest = unsealed(stored, MANIFEST)
        listed: dict[str, str] = dict(manifest["files"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{str(file)!r} is damaged ({error}); use another checkpoint.") from error
    if manifest.get("format") not in (_FORMAT, _UNSEALED):
        raise ValueError(
            f"{str(file)!r} has format {manifest.get('format')!r}; this version reads {_UNSEALED} and {_FORMAT}."
        )
    if manifest["format"] == _FORMAT and SEAL not in stored:
        raise ValueError(f"{str(file)!r} is damaged (it has no {SEAL}); use another checkpoint.")
    return manifest, listed


def write_tensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors as safetensors; `OSError` if the file cannot be written."""
    known = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(known, str(file), {"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error ([0-9]+)", str(error))
        raise OSError(errno.EIO if number is None else int(number[1]), str(error), str(file)) from error


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Read safetensors on the CPU; `ValueError` if the file is none, or its header does not fit it."""
    try:
        return load_file(str(file))
    except SafetensorError as error:
        raise ValueError(f"{str(file)!r} is not a safetensors file that can be read: {error}") from error


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A checkpoint whose files were found undamaged."""

    folder: Path
    base_model: str
    settings: AdapterSettings
    num_steps: int
    user_metadata: dict[str, str]
    base_digests: dict[str, str]
    """Digests of the base model, see `viva.model_files.model_digests`; empty where they were not recorded."""


def read_state(path: str) -> State:
    """Read and check a checkpoint; `ValueError` if it is not one, or is damaged."""
    folder = Path(path)
    manifest = read_checkpoint(folder)
    try:
        return State(
            folder=folder,
            base_model=manifest["base_model"],
            settings=AdapterSettings(**manifest["adapter"]),
            num_steps=manifest["num_steps"],
            user_metadata=manifest["user_metadata"],
            base_digests={
                str(part): str(digest) for part, digest in manifest.get("base_digests", {}).items()
            },
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path!r} does not describe a model ({error!r}); use another checkpoint."
        ) from error


def check_base_of(state: State, name: str, found: Mapping[str, str]) -> None:
    """Refuse a base model, by its name and digests, other than the one that a checkpoint was saved on."""
    # of before digests were recorded: what the name stands for today
    recorded = state.base_digests or model_digests(state.base_model)
    is_checked = check_base(
        f"the checkpoint {str(state.folder)!r}", recorded, name, found, was=state.base_model
    )
    if not (is_checked and state.base_digests):
        why = (
            "its files are not on this machine"
            if state.base_digests
            else "the checkpoint has no record of it"
        )
        _log.warning("Whether %r is the base model of %s cannot be checked: %s.", name, state.folder, why)
