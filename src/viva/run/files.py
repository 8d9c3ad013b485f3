"""Files of a run: written so that they survive a crash, by one process alone, and listed so that no other is deleted.

A file is the old one or the new one, never half of one. ``written.jsonl`` marks the folder of a run. What every run
writes is known by its place (`_PLACES`); all else that Viva leaves there is listed in it, a line each: the exported
weights, reports, evaluations, and the folders of trackers.
"""

import errno
import json
import os
import platform
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock, Timeout

from viva.conversation.records import encodable
from viva.model_files import replace_file, sealed, unsealed
from viva.run.secrets import map_texts, without_secrets

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
TRANSCRIPTS_FILE = "transcripts.jsonl"
SAMPLES_FILE = "samples.jsonl"
TOKENS_FILE = "tokens.jsonl"
LOG_FILES = (METRICS_FILE, TRANSCRIPTS_FILE, SAMPLES_FILE, TOKENS_FILE)
INDEX = "checkpoints.jsonl"
"""The index of a run's checkpoints."""

LOCK = ".viva.lock"
"""File by which a process holds a folder; while it does, the file names the process."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_LONGEST_COMMAND = 120
"""Characters."""


class FolderLock:
    """The kernel's lock of a folder, which one process holds, in several places at once, until it lets go or dies.

    Nothing is written before `acquire`. The file stays: another process may be about to lock it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: FileLock | None = None

    @property
    def is_held(self) -> bool:
        """Whether it was acquired here, and not released since."""
        return self._lock is not None

    def acquire(self) -> None:
        """Hold the folder, which exists.

        Raises:
            ValueError: If another process holds it, or the file system has no locks.
            OSError: If the file cannot be written; the error names it.
        """
        path = self.folder.resolve() / LOCK
        # an existing file instead of a lock would be a lock that a killed process leaves behind
        lock = FileLock(path, thread_local=False, is_singleton=True, fallback_to_soft=False)
        with naming(path):
            try:
                lock.acquire(blocking=False)
            except Timeout:
                raise ValueError(f"log_path={self.folder} is in use: {_holder(path)}") from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                raise ValueError(
                    f"log_path={self.folder} lies on a file system without locks ({error.strerror}), so that nothing "
                    "would keep two processes from writing one run. Give a log_path on a local disk, or have the file "
                    "system mounted with locks (flock)."
                ) from error
        try:
            if lock.lock_counter == 1:
                with naming(path):
                    path.write_text(json.dumps(_this_process()) + "\n", encoding="utf-8")
        except BaseException:
            lock.release()
            raise
        self._lock = lock

    def release(self) -> None:
        """Let go of it, if it is held."""
        lock, self._lock = self._lock, None
        if lock is not None:
            try:
                if lock.lock_counter == 1:
                    os.truncate(lock.lock_file, 0)
            except OSError:  # the folder was moved or removed meanwhile; the name that is left does no harm
                pass
            finally:
                lock.release()


def _this_process() -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "host": platform.node(),
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": without_secrets(" ".join(sys.argv))[:_LONGEST_COMMAND],
    }


def _holder(path: Path) -> str:
    """The message of who holds a lock, and what to do."""
    try:
        known = parse_line(path.read_bytes())
    except (OSError, ValueError):  # it is about to write its name
        known = {}
    who = "another process"
    if known:
        pid, host, began, command = (known.get(name) for name in ("pid", "host", "began", "command"))
        who = f"process {pid} on {host}, begun {began} ({command}),"
    plain = "".join(char if char.isprintable() else "?" for char in who)
    return f"{plain} writes to it. Wait until it has ended, or stop it; or give another log_path. Nothing was touched."


@contextmanager
def naming(path: Path) -> Generator[None]:
    """Let errors of the disk name the file; by themselves, those of writing and reading name none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def write_atomic(path: Path, text: str) -> None:
    """Replace a file's content in one step, flushed to the disk.

    Raises:
        OSError: If it cannot be written; the error names the file, which is as it was.
    """
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), 0o644)  # temporary files are private; what they become is not
                file.write(text)
            replace_file(Path(temporary), path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def append_lines(path: Path, text: str) -> int:
    """Append whole lines at once, behind a torn one on a line of their own, and return the file's new size.

    Raises:
        OSError: If it cannot be written; the error names the file.
    """
    with naming(path), path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                text = f"\n{text}"
        file.write(text.encode())
        file.flush()
        return file.tell()


def place_problem(folder: Path) -> str | None:
    """The obstacle to writing in a folder that is there or will be made; ``None`` if there is none."""
    for place in (folder, *folder.parents):
        if place.is_dir():
            is_free = os.access(place, os.W_OK | os.X_OK)
            return None if is_free else f"lies in {place}, which may not be written to"
        if place.exists():
            return "is a file" if place == folder else f"lies below {place}, which is a file"
    return None


def sweep(folder: Path) -> None:
    """Remove what `write_atomic` leaves of a run's files where the process was killed while it wrote."""
    for name in _REPLACED:
        for leftover in folder.glob(f".{name}.????????"):
            leftover.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON object with its seal (`viva.model_files`), whole or not at all."""
    write_atomic(path, json.dumps(sealed(content), indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that `write_json` wrote, without its seal.

    Raises:
        ValueError: If it is none, or is not as it was written; the message names the file.
        OSError: If it cannot be read; the error names the file.
    """
    with naming(path):
        content = path.read_bytes()
    try:
        value: object = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}. Put it back from a copy") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it must hold an object. Put it back from a copy")
    return unsealed(value, str(path))


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSONL file. A torn last line (a crash while writing) is left out; a missing file is empty.

    Raises:
        ValueError: If any other line is not an object; the message names file and line.
    """
    return (row for _, row in iter_rows(path, [])) if path.exists() else iter(())


def iter_rows(path: Path, torn: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of every line; `ValueError` if one cannot be read, but a torn last one is noted in `torn`."""
    with naming(path), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = parse_line(line)
            except ValueError as error:
                if line.endswith(b"\n"):
                    raise ValueError(f"{where}: {error}. The file is damaged; restore or cut it.") from error
                torn.append(path.name)
            else:
                yield where, row


def parse_line(line: bytes) -> dict[str, Any]:
    """One line of a JSONL file of a run, whatever bytes it holds; `ValueError` if it is no JSON object."""
    try:
        value = json.loads(line.decode("utf-8", errors="replace"))
        if not isinstance(value, dict):
            raise ValueError(f"expected a JSON object, got {str(value)[:60]!r}")
        # JSON can spell halves of surrogate pairs, UTF-8 cannot: U+FFFD stands there
        return map_texts(encodable, value)
    except RecursionError:
        raise ValueError(f"nested too deeply to be read: {line[:60]!r}") from None


MARK = "written.jsonl"
"""The file that marks the folder of a run, and lists."""

_FORMAT = "viva run 1"
_REPLACED = (CONFIG_FILE, INDEX, "trackers.json", "report.html", MARK)
"""Files that are written anew as a whole while a run goes."""
_LAST = (CONFIG_FILE, MARK)
"""Deleted after all else, so that what is left of a run is one, and marked, until then."""
_FOLDERS = ("state", "state/*", "state/*/*", "state/client-*/*/*", "journal")
# the tokenizer lies beside the weights of a whole model, in the form that its kind has
_SAVED = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt")
"""Names of files in the folder of a saved state."""
_PLACES = (
    *(LOCK, MARK, CONFIG_FILE, INDEX, "trackers.json", *LOG_FILES),
    "journal/*.jsonl",
    *(f"{place}/{name}" for place in ("state/*/*", "state/client-*/*/*") for name in _SAVED),
    # what a process that was killed while it wrote leaves
    *(f".{name}.????????" for name in _REPLACED),
    *("journal/.*.????????", "eval/.*.????????"),
)
"""Patterns of the paths in a folder, part by part."""
_OF_TRACKERS = {
    "tensorboard": ("events.out.tfevents.*",),
    "wandb": ("run-*", "offline-run-*", "latest-run", "debug*.log", "settings"),
}
"""Names that trackers use in their folders, where those are listed; of folders there, everything counts."""
_STAGED = ".*~????????"
"""Name of a folder in which an export is written; where it is listed, everything in it counts."""


def is_marked(folder: Path) -> bool:
    """Whether a run was begun there that lists what it writes."""
    return next(_lines(folder), {}).get("format") == _FORMAT


def mark(folder: Path) -> None:
    """Mark the folder of a run that has listed nothing yet."""
    write_atomic(folder / MARK, json.dumps({"format": _FORMAT}) + "\n")


def note_written(paths: Sequence[Path], *, as_folder: bool = False) -> None:
    """List files that were written, all below one folder, if they lie in the folder of a run that is marked.

    With `as_folder` they are folders of trackers or of an export under way, of which no file is known.
    """
    absolute = [Path(os.path.abspath(path)) for path in paths]
    folder = next((each for each in absolute[0].parents if is_marked(each)), None) if absolute else None
    if folder is None:
        return
    names = [path.relative_to(folder).as_posix() + "/" * as_folder for path in absolute]
    known = _listed(folder)
    new = "".join(json.dumps({"path": name}) + "\n" for name in names if name not in known)
    if new:
        append_lines(folder / MARK, new)


def strangers(folder: Path) -> list[str]:
    """Files and folders in the folder of a run that Viva did not write, as paths in it."""
    return _content(folder)[2]


def delete_written(folder: Path) -> None:
    """Delete everything that Viva wrote into the folder of a run but the lock, which stays with who holds it.

    Links are deleted themselves; what they lead to is not touched.
    """
    files, folders, _ = _content(folder)
    for name in files:
        if name not in (LOCK, *_LAST):
            (folder / name).unlink()
    for name in folders:
        (folder / name).rmdir()
    for name in _LAST:
        (folder / name).unlink(missing_ok=True)


def _content(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """The run's files (links among them), its folders (deepest first), and what is not the run's, as paths in it."""
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
    return files, folders[::-1], sorted(outermost)


def _is_own(name: str, listed: frozenset[str], *, is_link: bool) -> bool:
    is_listed = name in listed or _is_of_folder(name, listed)
    return is_listed or _matches(name, _PLACES) or (is_link and _is_own_folder(name, listed))


def _is_own_folder(name: str, listed: frozenset[str]) -> bool:
    is_listed = any(other.startswith(f"{name}/") for other in listed)
    return is_listed or _matches(name, _FOLDERS) or _is_of_folder(name, listed)


def _is_of_folder(name: str, listed: frozenset[str]) -> bool:
    """Whether it counts by a listed folder: of a tracker, or of an export that was killed."""
    places = (name, *(each.as_posix() for each in PurePosixPath(name).parents))
    if any(f"{each}/" in listed and fnmatchcase(each.rpartition("/")[2], _STAGED) for each in places):
        return True
    tracker, _, rest = name.partition("/")
    first = rest.partition("/")[0]
    return f"{tracker}/" in listed and any(fnmatchcase(first, each) for each in _OF_TRACKERS.get(tracker, ()))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    path = PurePosixPath("/", name)
    return any(path.match(f"/{pattern}") for pattern in patterns)


def _listed(folder: Path) -> frozenset[str]:
    return frozenset(str(line["path"]) for line in _lines(folder) if "path" in line)


def _lines(folder: Path) -> Iterator[dict[str, object]]:
    """Lines of the list. What cannot be read lists nothing, so that nothing is deleted for it."""
    path = folder / MARK
    if not path.is_file():
        return
    with naming(path):
        lines = path.read_bytes().splitlines()
    for line in lines:
        with suppress(ValueError):
            yield parse_line(line)
