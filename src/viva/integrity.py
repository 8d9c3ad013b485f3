"""Validation of names and paths, and JSON objects with a checksum.

A sealed object holds the SHA-256 of all its other keys, so that no change to it goes unnoticed. It protects against
failing disks and slips of the hand, not against somebody who computes the digest anew.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SEAL = "sha256"
"""The key of the digest."""

_DIGEST_LENGTH = 64

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_LONGEST_NAME = 128
"""Characters; writing needs some more beside it, and file systems take 255 bytes."""
_DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.I)
"""Names that mean a device on some systems, whatever their ending."""


class MismatchError(ValueError):
    """Something undamaged that belongs to another model or run."""


def check_name(name: str) -> str:
    """Return a checkpoint's name if it is one.

    Raises:
        ValueError: It could leave its folder or is not portable.
    """
    if (
        not _NAME.fullmatch(name)
        or len(name) > _LONGEST_NAME
        or ".." in name
        or name.startswith(".")
        or name.endswith(".")
        or _DEVICES.fullmatch(name)
    ):
        raise ValueError(
            f"{name[: _LONGEST_NAME + 1]!r} is not a checkpoint name. Use letters, digits, '_', '-' and '.', at most "
            f"{_LONGEST_NAME}, without '..', not starting or ending with '.', and no device name such as 'con'."
        )
    return name


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path, all links followed, lies in a folder; neither has to exist."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (ValueError, OSError, RuntimeError):  # a NUL, or links that lead in a circle
        return False


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object with its digest as the last key."""
    plain = {key: value for key, value in content.items() if key != SEAL}
    return plain | {SEAL: _digest(plain)}


def unsealed(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The object without its digest, after comparing; one that was never sealed is taken as it is.

    Args:
        content: As it was read.
        where: The file, for the message.

    Raises:
        ValueError: If the digest is not that of the content.
    """
    plain = {key: value for key, value in content.items() if key != SEAL}
    if content[SEAL] != _digest(plain) if SEAL in content else _has_seal(plain):
        raise ValueError(
            f"{where} is damaged or was changed: its content is not what its {SEAL} was taken of. Put it back from a "
            f"copy; if you changed it on purpose, remove the entry {SEAL!r}"
        )
    return plain


def _has_seal(content: Mapping[str, Any]) -> bool:
    """Whether the seal stands there under another name: its own was damaged."""
    return any(
        isinstance(value, str)
        and len(value) == _DIGEST_LENGTH
        and value == _digest({name: other for name, other in content.items() if name != key})
        for key, value in content.items()
    )


def _digest(plain: Mapping[str, Any]) -> str:
    # what JSON gives back is what will be compared: tuples are lists there, and keys are texts
    known: object = json.loads(json.dumps(plain))
    return hashlib.sha256(json.dumps(known, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
