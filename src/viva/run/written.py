"""What Viva wrote into a run's folder, so that nothing else is ever deleted there.

``written.jsonl`` marks the folder of a run. What every run writes is known by its place (`_PLACES`); all else that Viva
leaves there is listed in it, a line each: the exported weights, reports, evaluations, and the folders of trackers.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from viva.run.files import LOCK, naming, write_atomic

__all__ = ["MARK", "delete_written", "is_marked", "mark", "note_written", "strangers"]

MARK = "written.jsonl"
"""The file that marks the folder of a run, and lists."""

_FORMAT = "viva run 1"
_REPLACED = ("config.json", "checkpoints.jsonl", "trackers.json", "report.html", MARK)
_LAST = ("config.json", MARK)
"""Deleted after all else, so that what is left of a run is one, and marked, until then."""
_FOLDERS = ("state", "state/*", "state/*/*", "state/client-*/*/*", "journal")
_PLACES = (
    *(LOCK, MARK, "config.json", "checkpoints.jsonl", "trackers.json"),
    *("metrics.jsonl", "transcripts.jsonl", "samples.jsonl", "tokens.jsonl"),
    *("journal/*.jsonl", "state/*/*/*.json", "state/*/*/*.safetensors"),
    *("state/client-*/*/*/*.json", "state/client-*/*/*/*.safetensors"),
    # what a process that was killed while it wrote leaves
    *(f".{name}.????????" for name in _REPLACED),
    *("journal/.*.????????", "eval/.*.????????"),
)
"""Patterns of the paths in a folder, part by part."""
_OF_TRACKERS = {
    "tensorboard": ("events.out.tfevents.*",),
    "wandb": ("run-*", "offline-run-*", "latest-run", "debug*.log", "settings"),
}
"""What trackers put into their folders, where those are listed; of folders there, all that is in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """Everything in a folder, as paths in it, told apart by who wrote it."""

    files: Sequence[str]
    """Of the run, links among them."""
    folders: Sequence[str]
    """Of the run, deepest first."""
    strangers: Sequence[str]


def is_marked(folder: Path) -> bool:
    """Whether a run was begun there that lists what it writes."""
    return next(_lines(folder), {}).get("format") == _FORMAT


def mark(folder: Path) -> None:
    """Mark the folder of a run that has listed nothing yet."""
    write_atomic(folder / MARK, json.dumps({"format": _FORMAT}) + "\n")


def note_written(paths: Sequence[Path], *, as_folder: bool = False) -> None:
    """List files that were written, if they lie in the folder of a run that is marked.

    Args:
        paths: The files, all in one folder or below it.
        as_folder: They are folders of trackers, of which no file is known.
    """
    absolute = [Path(os.path.abspath(path)) for path in paths]
    folder = next((each for each in absolute[0].parents if is_marked(each)), None) if absolute else None
    if folder is None:
        return
    names = [path.relative_to(folder).as_posix() + "/" * as_folder for path in absolute]
    known = _listed(folder)
    new = "".join(json.dumps({"path": name}) + "\n" for name in names if name not in known)
    with naming(folder / MARK), (folder / MARK).open("ab+") as file:
        file.seek(0)
        is_torn = not file.read().endswith(b"\n")
        if new:
            file.write(("\n" * is_torn + new).encode())


def strangers(folder: Path) -> list[str]:
    """What lies in the folder of a run and was not written by Viva, as paths in it."""
    return list(_content(folder).strangers)


def delete_written(folder: Path) -> None:
    """Delete everything that Viva wrote into the folder of a run but the lock, which stays with who holds it.

    Links are deleted themselves; what they lead to is not touched.
    """
    content = _content(folder)
    for name in content.files:
        if name not in (LOCK, *_LAST):
            (folder / name).unlink()
    for name in content.folders:
        (folder / name).rmdir()
    for name in _LAST:
        (folder / name).unlink(missing_ok=True)


def _content(folder: Path) -> _Content:
    listed = _listed(folder)
    files: list[str] = []
    folders: list[str] = []
    strange: list[str] = []
    for place, below, names in os.walk(folder):
        base = Path(place)
        links = [name for name in below if (base / name).is_symlink()]
        for path in (base / name for name in (*names, *links)):
            name = path.relative_to(folder).as_posix()
            is_link = path.is_symlink()
            (files if _is_own(name, listed, is_link=is_link) else strange).append(name)
        for name in ((base / each).relative_to(folder).as_posix() for each in below if each not in links):
            (folders if _is_own_folder(name, listed) else strange).append(name)
    # of a strange folder all below is strange, too: its name will do
    outermost = [name for name in strange if not any(name.startswith(f"{other}/") for other in strange)]
    return _Content(files=files, folders=folders[::-1], strangers=sorted(outermost))


def _is_own(name: str, listed: frozenset[str], *, is_link: bool) -> bool:
    is_listed = name in listed or _is_of_tracker(name, listed)
    return is_listed or _matches(name, _PLACES) or (is_link and _is_own_folder(name, listed))


def _is_own_folder(name: str, listed: frozenset[str]) -> bool:
    is_listed = any(other.startswith(f"{name}/") for other in listed)
    return is_listed or _matches(name, _FOLDERS) or _is_of_tracker(name, listed)


def _is_of_tracker(name: str, listed: frozenset[str]) -> bool:
    tracker, _, rest = name.partition("/")
    first = rest.partition("/")[0]
    return f"{tracker}/" in listed and any(fnmatchcase(first, each) for each in _OF_TRACKERS.get(tracker, ()))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    parts = name.split("/")
    return any(
        len(parts) == pattern.count("/") + 1 and all(map(fnmatchcase, parts, pattern.split("/")))
        for pattern in patterns
    )


def _listed(folder: Path) -> frozenset[str]:
    return frozenset(str(line["path"]) for line in _lines(folder) if "path" in line)


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Lines of the list. What cannot be read lists nothing, so that nothing is deleted for it."""
    path = folder / MARK
    if not path.is_file():
        return
    with naming(path):
        text = path.read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        try:
            value: object = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield cast("dict[str, Any]", value)
