"""The files that pages are about: a run's folder, a result of ``viva eval``, or a folder of results.

What is computed from a file (`iter_transcripts`) raises where a line is damaged; what is shown to people is read by
`viva.view.run_index`, without such lines. A torn last line is left out by both.
"""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from viva.judging.records import Transcript
from viva.model_files import unsealed
from viva.run.files import CONFIG_FILE, INDEX, METRICS_FILE, TRANSCRIPTS_FILE, iter_rows, parse_line
from viva.run.secrets import printable
from viva.view.log_check import check_log

Row: TypeAlias = dict[str, Any]
"""An object of a file, as it stands there."""

_TAIL_BYTES = 256


class GrowingFile:
    """A file that another process appends to and may cut back, as a resumed run does; a missing one is empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        """Bytes read so far: where the next line starts."""
        self.num_lines = 0
        """Lines read so far."""
        self._tail = b""

    @property
    def size(self) -> int:
        """Bytes the file has now."""
        try:
            return self.path.stat().st_size
        except OSError:  # there is none, or none any more
            return 0

    def was_cut_back(self) -> bool:
        """Whether what was read before is no longer what the file holds; then everything starts anew."""
        if not self.offset:
            return False
        if self.size >= self.offset:
            with self.path.open("rb") as file:
                file.seek(self.offset - len(self._tail))
                if file.read(len(self._tail)) == self._tail:
                    return False
        self.offset, self.num_lines, self._tail = 0, 0, b""
        return True

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """(offset, line) of every whole line not read yet; stop at any time and go on later."""
        if self.size <= self.offset:
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while (line := file.readline()).endswith(b"\n"):
                start = self.offset
                self.offset += len(line)
                self.num_lines += 1
                self._tail = (self._tail + line)[-_TAIL_BYTES:]
                yield start, line

    def rest(self) -> bytes:
        """The text behind the last whole line."""
        return self.line_at(self.offset) if self.size > self.offset else b""

    def line_at(self, offset: int) -> bytes:
        """The line that starts at a byte."""
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.readline()


def iter_transcripts(run_dir: str | Path, torn: list[str]) -> Iterator[tuple[str, Transcript]]:
    """Every transcript of a run and its place, one at a time; of a torn last line the file's name goes to `torn`.

    Raises:
        ValueError: If the folder has no transcripts, or the file is damaged.
    """
    path = check_transcripts(run_dir)
    check_log(Path(run_dir), TRANSCRIPTS_FILE)
    for where, row in iter_rows(path, torn):
        yield where, Transcript.parse(where, row)


def check_transcripts(run_dir: str | Path) -> Path:
    """The file of a run's transcripts; a `ValueError` if there is none."""
    path = Path(run_dir) / TRANSCRIPTS_FILE
    if not path.is_file():
        raise ValueError(
            f"{str(run_dir)!r} has no {TRANSCRIPTS_FILE}. Give the folder of a run: what was its log_path."
        )
    return path


def transcripts_path(source: Path) -> Path:
    """The transcripts' file of a run, by its folder, or of an evaluation, by its result file."""
    return source.with_suffix(".transcripts.jsonl") if source.is_file() else source / TRANSCRIPTS_FILE


def numbers(row: Row) -> dict[str, float]:
    """Finite numbers of a line, but for the step; truth values are no numbers."""
    known = {key: _number(value) for key, value in row.items() if key != "step"}
    return {key: float(value) for key, value in known.items() if value is not None}


def _number(value: object) -> float | None:
    """A finite number; ``None`` for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # a whole number with more digits than any figure has
        return None


def read_config(folder: Path) -> Row:
    """A run's options as they were recorded; empty where they were not; `ValueError` if the file is damaged."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        return unsealed(parse_line(path.read_bytes()), "the file")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


_RUN_FILES = (METRICS_FILE, INDEX)
"""Files that only a run has."""

_RUN_PLACES = tuple(f"{folder}{name}" for folder in ("", "*/", "runs/*/", "runs/*/*/") for name in _RUN_FILES)

_FOLDER = "eval"
_FORMATS = {"viva evaluation 1": "evaluation", "viva comparison 1": "comparison"}

_NUMBERS = ("value", "against", "difference", "low", "high", "num_problems")
"""Fields of a figure."""


def kind_of(source: Path) -> Literal["run", "result", "results"]:
    """Kind of the folder or file at a path; `ValueError` if it is nothing that a page can be about."""
    if (source / METRICS_FILE).is_file() or (source / CONFIG_FILE).is_file():
        return "run"
    if any(_read_result(path) is not None for path in _result_paths(source)):
        return "result" if source.is_file() else "results"
    what = "is not there"
    if source.is_dir():
        what = "has no metrics.jsonl and no config.json, and no results of viva eval"
    elif source.exists():
        what = "is no result of viva eval, and is not a folder"
    raise ValueError(
        f"{str(source)!r} {what}. Give the folder of a run: what was its log_path; or a result of viva eval, or a "
        "folder of them."
    )


def runs_text(here: Path) -> str:
    """The runs in a folder and in its ``runs``, newest first, each with the command that shows it."""
    found = {path.parent for pattern in _RUN_PLACES for path in here.glob(pattern)}
    if not found:
        return (
            f"There are no runs in {here.resolve()} or its folder runs. Give the folder of a run: what was its "
            "log_path, like viva view runs/first."
        )
    newest = sorted(found, key=lambda folder: (-_time_of(folder), str(folder)))
    return "\n".join(f"viva view {shlex.quote(str(folder))}{_about(folder)}" for folder in newest)


def _time_of(folder: Path) -> float:
    """Time of the run's last step."""
    return max((folder / name).stat().st_mtime for name in _RUN_FILES if (folder / name).is_file())


def _about(folder: Path) -> str:
    """Recipe and model of a run, as a remark."""
    try:
        config = read_config(folder)
    except (ValueError, OSError):
        return f"  # its {CONFIG_FILE} is damaged"
    told = [printable(str(config[key])) for key in ("recipe", "model_name") if config.get(key)]
    return f"  # {', '.join(told)}" if told else ""


def options_of(source: Path) -> Row:
    """Options of a run or an evaluation, or nothing; `ValueError` if the file is damaged."""
    content = _read_result(source) if source.is_file() else None
    if content is None:
        return read_config(source)
    target: object = content.get("target")
    options: object = content.get("options")
    told: Row = {}
    if isinstance(target, Mapping):
        told = {
            "target": target.get("name"),
            "checkpoint": target.get("checkpoint"),
            "model_name": target.get("model"),
        }
    return {**told, **(options if isinstance(options, dict) else {})}


def names_of(sources: Sequence[Path]) -> list[str]:
    """Names of folders or files, with as much of their paths as tells them apart; `ValueError` if two are the same."""
    parts = [source.resolve().parts for source in sources]
    twice = [source for number, source in enumerate(sources) if parts[number] in parts[:number]]
    if twice:
        raise ValueError(f"{twice[0]} is given twice; give another one beside it, or it alone")
    longest = max(map(len, parts))
    count = 1
    while count < longest and len({own[-count:] for own in parts}) < len(parts):
        count += 1
    return [printable("/".join(own[-count:])) for own in parts]


def _result_paths(source: Path) -> list[Path]:
    """Files that may be results: those of a run's ``eval/``, of a folder itself, or one file."""
    if source.is_file():
        return [source]
    folder = source / _FOLDER if (source / _FOLDER).is_dir() else source
    return sorted(path for path in folder.glob("*.json") if path.is_file())


def read_evaluations(source: Path) -> list[dict[str, object]]:
    """Every result and comparison in the order of their files' names; files of other formats are left out.

    Returns:
        Of each ``name``, ``kind`` (evaluation or comparison), ``about`` (what was measured) and ``figures`` (by name,
        the numbers of the file).
    """
    found = [(path, _read_result(path)) for path in _result_paths(source)]
    return [_shown(path, content) for path, content in found if content is not None]


def _read_result(path: Path) -> Row | None:
    """The content of a result file; ``None`` if it is none, or cannot be read."""
    try:
        content = parse_line(path.read_bytes())
    except (OSError, ValueError):
        return None
    is_result = str(content.get("format")) in _FORMATS and isinstance(content.get("figures"), dict)
    return content if is_result else None


def _shown(path: Path, content: Row) -> dict[str, object]:
    targets = [content.get(key) for key in ("target", "first", "second")]
    return {
        "name": printable(path.stem),
        "kind": _FORMATS[str(content["format"])],
        "about": " against ".join(_target(target) for target in targets if isinstance(target, dict)),
        "figures": {
            printable(str(name)): {each: _number(figure.get(each)) for each in _NUMBERS if each in figure}
            for name, figure in content["figures"].items()
            if isinstance(figure, dict)
        },
    }


def _target(target: Mapping[str, object]) -> str:
    parts = [target.get("name"), target.get("checkpoint")]
    return printable(" ".join(str(part) for part in parts if part is not None))
