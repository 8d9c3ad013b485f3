"""Lines of a run's files: parsed whatever they hold, read as the file grows or all at once.

What is computed from a file (`iter_rows`, `iter_transcripts`) raises where a line is damaged; what is shown to people
is read by `viva.view.run_index`, without such lines. A torn last line is left out by both.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from viva.integrity import unsealed
from viva.judging.records import Transcript
from viva.view.log_check import check_log

__all__ = [
    "CONFIG_FILE",
    "METRICS_FILE",
    "TOKENS_FILE",
    "TRANSCRIPTS_FILE",
    "GrowingFile",
    "iter_rows",
    "iter_transcripts",
    "numbers",
    "parse_line",
    "read_config",
    "transcripts_path",
]

METRICS_FILE = "metrics.jsonl"
TRANSCRIPTS_FILE = "transcripts.jsonl"
TOKENS_FILE = "tokens.jsonl"
CONFIG_FILE = "config.json"

_TAIL_BYTES = 256


class GrowingFile:
    """A file that another process appends to, and may cut back (a run that is resumed does).

    Each line is read once, as soon as it is whole. A missing file is an empty one.
    """

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
        """What stands behind the last whole line."""
        return self.line_at(self.offset) if self.size > self.offset else b""

    def line_at(self, offset: int) -> bytes:
        """The line that starts at a byte."""
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.readline()


def iter_transcripts(run_dir: str | Path, torn: list[str]) -> Iterator[tuple[str, Transcript]]:
    """Every transcript of a run and its place, one at a time; a torn last line is left out.

    Args:
        run_dir: The run's folder.
        torn: Gets the file's name if its last line is torn.

    Raises:
        ValueError: If the folder has no transcripts, or the file is damaged.
    """
    path = Path(run_dir) / TRANSCRIPTS_FILE
    if not path.is_file():
        raise ValueError(
            f"{str(run_dir)!r} has no {TRANSCRIPTS_FILE}. Give the folder of a run: what was its log_path."
        )
    check_log(Path(run_dir), TRANSCRIPTS_FILE)
    for where, row in iter_rows(path, torn):
        yield where, Transcript.parse(where, row)


def iter_rows(path: Path, torn: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of every line of a file; a torn last line goes to ``torn`` by the file's name.

    Raises:
        ValueError: If any other line cannot be read.
    """
    with path.open("rb") as file:
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


def transcripts_path(source: Path) -> Path:
    """Where the conversations of a run, by its folder, or of an evaluation, by its result file, are kept."""
    return source.with_suffix(".transcripts.jsonl") if source.is_file() else source / TRANSCRIPTS_FILE


def parse_line(line: bytes) -> dict[str, Any]:
    """One line of a JSONL file of a run, whatever bytes it holds; what is no UTF-8 becomes U+FFFD.

    Raises:
        ValueError: If it is no JSON object, or one that is nested too deeply.
    """
    try:
        value = json.loads(line.decode("utf-8", errors="replace"))
        if not isinstance(value, dict):
            raise ValueError(f"expected a JSON object, got {str(value)[:60]!r}")
        return cast("dict[str, Any]", _mended(value))
    except RecursionError:
        raise ValueError(f"nested too deeply to be read: {line[:60]!r}") from None


def _mended(value: Any) -> Any:
    """Strings with halves of surrogate pairs (JSON can spell them, UTF-8 cannot) get U+FFFD there."""
    if isinstance(value, str):
        return (
            value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        )
    if isinstance(value, list):
        return [_mended(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {_mended(key): _mended(item) for key, item in cast("dict[str, Any]", value).items()}
    return value


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Finite numbers of a line, but for the step; truth values are no numbers."""
    return {
        key: float(value)
        for key, value in row.items()
        if key != "step"
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and _is_finite(value)
    }


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number with more digits than any figure has
        return False


def read_config(folder: Path) -> dict[str, Any]:
    """A run's options as they were recorded; empty where they were not.

    Raises:
        ValueError: If the file is damaged.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        return unsealed(parse_line(path.read_bytes()), "the file")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
