"""Reading what a run wrote: ``config.json``, ``metrics.jsonl``, ``transcripts.jsonl`` and ``tokens.jsonl``.

A run may have been killed while it wrote, so the last line of a JSONL file may be torn: it is left out and
said so. A line that cannot be read anywhere else means a damaged file, as does a log that is not as the run's
checkpoints remember it: what is shown to people is read without such lines and says so, what is computed raises.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from viva.integrity import unsealed
from viva.view.entries import Entry, entry_of
from viva.view.log_check import LogCheck, check_log
from viva.view.recorded import Transcript
from viva.view.series import Z95, Series

__all__ = [
    "CONFIG_FILE",
    "METRICS_FILE",
    "TOKENS_FILE",
    "TRANSCRIPTS_FILE",
    "Curves",
    "Run",
    "iter_rows",
    "iter_transcripts",
    "metric_series",
    "numbers",
    "parse_line",
    "read_config",
    "read_entries",
    "read_run",
    "read_series",
    "read_tokens",
    "read_transcript",
    "transcript_of",
    "transcripts_path",
]

METRICS_FILE = "metrics.jsonl"
TRANSCRIPTS_FILE = "transcripts.jsonl"
TOKENS_FILE = "tokens.jsonl"
CONFIG_FILE = "config.json"

_STEP_BITS = 63

Curves = dict[str, tuple[tuple[int, float], ...]]
"""(step, value) with rising steps, by metric, metrics in order of their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run's files. Transcripts may be large: only an entry each is kept."""

    folder: Path
    config: dict[str, Any]
    curves: Curves
    num_steps: int
    transcripts: tuple[Entry, ...]
    """In the order of (step, group)."""
    tokens: dict[tuple[int, int], int]
    """Where the kept tokens of a conversation, by (step, group), start in their file, in bytes; see `read_tokens`."""
    torn: tuple[str, ...]
    """Files whose last line was torn."""
    damage: tuple[str, ...] = ()
    """Problems of other lines and of whole files, each naming its file and line."""


def read_run(run_dir: str | Path) -> Run:
    """Read the files of a run; configuration and transcripts may be missing.

    Args:
        run_dir: The run's folder (its ``log_path``).

    Lines that cannot be read are left out and told in `Run.damage`.

    Raises:
        ValueError: If the folder is not that of a run, or its ``config.json`` is damaged.
    """
    folder = Path(run_dir)
    metrics = folder / METRICS_FILE
    if not metrics.is_file():
        what = "has no metrics.jsonl" if folder.is_dir() else "is not a folder"
        raise ValueError(f"{str(folder)!r} {what}. Give the folder of a run: what was its log_path.")
    check = LogCheck(folder)
    check.advance()
    torn: list[str] = []
    damage: list[str] = []
    values: dict[int, dict[str, float]] = {}
    for where, _, row in _lines(metrics, torn, damage):
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or step.bit_length() > _STEP_BITS:
            damage.append(f"{where}: every line needs a whole number under 'step'; got {str(step)[:60]!r}")
            continue
        values.setdefault(step, {}).update(numbers(row))
    keys = sorted({key for row in values.values() for key in row})
    curves = {
        key: tuple((step, row[key]) for step, row in sorted(values.items()) if key in row) for key in keys
    }
    return Run(
        folder=folder,
        config=read_config(folder),
        curves=curves,
        num_steps=len(values),
        transcripts=read_entries(transcripts_path(folder), torn, damage),
        tokens=_read_token_places(folder / TOKENS_FILE, torn, damage),
        torn=tuple(torn),
        damage=(*check.problems.values(), *damage),
    )


def read_series(run_dir: str | Path, key: str, *, name: str | None = None) -> Series:
    """One metric of a run as a curve, with a 95 % band where ``<key>_stderr`` was recorded too.

    Raises:
        ValueError: If the folder is not that of a run, or the metric was never recorded.
    """
    run = read_run(run_dir)
    if key not in run.curves:
        raise ValueError(f"{run.folder} has no metric {key!r}; it has: {', '.join(run.curves) or 'none'}")
    return metric_series(run.curves, key, name=key if name is None else name)


def metric_series(curves: Curves, key: str, *, name: str) -> Series:
    """`read_series` for curves that were read already."""
    points = curves[key]
    errors = dict(curves.get(f"{key}_stderr", ()))
    band = tuple(Z95 * errors.get(step, 0.0) for step, _ in points) if errors else None
    return Series(name=name, points=points, band=band)


def read_transcript(run: Run, offset: int) -> Transcript:
    """The transcript that starts at a byte of the transcripts' file."""
    path = transcripts_path(run.folder)
    with path.open("rb") as file:
        file.seek(offset)
        return transcript_of(str(path), parse_line(file.readline()))


def read_tokens(run: Run, step: int, group: int) -> dict[str, Any] | None:
    """The tokens of a conversation, a line that `viva.training.token_records` made; ``None`` if they were not kept."""
    offset = run.tokens.get((step, group))
    if offset is None:
        return None
    with (run.folder / TOKENS_FILE).open("rb") as file:
        file.seek(offset)
        return parse_line(file.readline())


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
    for where, _, row in iter_rows(path, torn):
        yield where, transcript_of(where, row)


def transcripts_path(source: Path) -> Path:
    """Where the conversations of a run, by its folder, or of an evaluation, by its result file, are kept."""
    return source.with_suffix(".transcripts.jsonl") if source.is_file() else source / TRANSCRIPTS_FILE


def read_entries(path: Path, torn: list[str], damage: list[str]) -> tuple[Entry, ...]:
    """An entry of every conversation of a file, in the order of (step, group).

    Args:
        path: The file; there may be none.
        torn: Gets its name if the last line is torn.
        damage: Gets the problems of other lines, which are left out.
    """
    entries: list[Entry] = []
    for where, offset, row in _lines(path, torn, damage) if path.is_file() else ():
        try:
            transcript_of(where, row)  # says what is wrong, and where
            entries.append(entry_of(offset, row))
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            damage.append(
                str(error) if str(error).startswith(where) else f"{where}: not a transcript: {error}"
            )
    return tuple(sorted(entries, key=lambda entry: (entry.step, entry.group)))


def _read_token_places(path: Path, torn: list[str], damage: list[str]) -> dict[tuple[int, int], int]:
    places: dict[tuple[int, int], int] = {}
    for where, offset, row in _lines(path, torn, damage) if path.is_file() else ():
        step, group = row.get("step"), row.get("group")
        if isinstance(step, int) and isinstance(group, int):
            places[step, group] = offset
        else:
            damage.append(
                f"{where}: not the tokens of a group: it needs whole numbers under 'step' and 'group'"
            )
    return places


def transcript_of(where: str, row: dict[str, Any]) -> Transcript:
    """A line of ``transcripts.jsonl`` that `parse_line` read.

    Args:
        where: The place, for the message.
        row: The line.

    Raises:
        ValueError: If it is no transcript.
    """
    try:
        return Transcript.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: not a transcript: {field}: {first['msg']}") from error


def iter_rows(path: Path, torn: list[str]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(place, byte offset, object) of every line of a file; a torn last line goes to ``torn`` by the file's name.

    Raises:
        ValueError: If any other line cannot be read.
    """
    damage: list[str] = []
    for found in _lines(path, torn, damage):
        if damage:
            break
        yield found
    if damage:
        raise ValueError(f"{damage[0]}. The file is damaged; restore or cut it.")


def _lines(path: Path, torn: list[str], damage: list[str]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(place, byte offset, object) of every line that can be read; what cannot goes to ``torn`` and ``damage``."""
    with path.open("rb") as file:
        number, offset = 0, 0
        line = file.readline()
        while line:
            number += 1
            following = file.readline()
            if line.strip():
                where = f"{path}:{number}"
                try:
                    row = parse_line(line)
                except ValueError as error:
                    if following or line.endswith(b"\n"):
                        damage.append(f"{where}: {error}")
                    else:
                        torn.append(path.name)
                else:
                    yield where, offset, row
            offset += len(line)
            line = following


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
