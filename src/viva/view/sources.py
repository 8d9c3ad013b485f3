"""What a page can be about: a run's folder, a result of ``viva eval`` with its figures, or a folder of results."""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from viva.run.secrets import printable
from viva.view.files import CONFIG_FILE, METRICS_FILE, parse_line, read_config

__all__ = [
    "SourceKind",
    "kind_of",
    "names_of",
    "options_of",
    "read_evaluations",
    "runs_text",
]

_RUN_FILES = (METRICS_FILE, "checkpoints.jsonl")
"""Files that only a run has."""

_RUN_PLACES = tuple(f"{folder}{name}" for folder in ("", "*/", "runs/*/", "runs/*/*/") for name in _RUN_FILES)

_FOLDER = "eval"
_FORMATS = {"viva evaluation 1": "evaluation", "viva comparison 1": "comparison"}

_NUMBERS = ("value", "against", "difference", "low", "high", "num_problems")
"""Of a figure."""

SourceKind = Literal["run", "result", "results"]


def kind_of(source: Path) -> SourceKind:
    """What lies there.

    Raises:
        ValueError: If it is nothing that a page can be about.
    """
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
    """When the run last wrote a step."""
    return max((folder / name).stat().st_mtime for name in _RUN_FILES if (folder / name).is_file())


def _about(folder: Path) -> str:
    """Recipe and model of a run, as a remark."""
    try:
        config = read_config(folder)
    except (ValueError, OSError):
        return f"  # its {CONFIG_FILE} is damaged"
    told = [printable(str(config[key])) for key in ("recipe", "model_name") if config.get(key)]
    return f"  # {', '.join(told)}" if told else ""


def options_of(source: Path) -> dict[str, Any]:
    """How a run was started, or an evaluation made; empty for a folder of results.

    Raises:
        ValueError: If the file is damaged.
    """
    content = _read_result(source) if source.is_file() else None
    if content is None:
        return read_config(source)
    target: object = content.get("target")
    options: object = content.get("options")
    told: dict[str, Any] = {}
    if isinstance(target, Mapping):
        told = {
            "target": target.get("name"),
            "checkpoint": target.get("checkpoint"),
            "model_name": target.get("model"),
        }
    return {**told, **(options if isinstance(options, dict) else {})}


def names_of(sources: Sequence[Path]) -> list[str]:
    """Names of folders or files, with as many of the folders above them as it takes to tell them apart.

    Raises:
        ValueError: If two are the same.
    """
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


def read_evaluations(source: Path) -> list[dict[str, Any]]:
    """Every result and comparison in the order of their files' names; files of other formats are left out.

    Args:
        source: As `kind_of` takes it.

    Returns:
        Of each ``name``, ``kind`` (evaluation or comparison), ``about`` (what was measured) and ``figures`` (by name,
        the numbers of the file).
    """
    found = [(path, _read_result(path)) for path in _result_paths(source)]
    return [_shown(path, content) for path, content in found if content is not None]


def _read_result(path: Path) -> dict[str, Any] | None:
    """The content of a result file; ``None`` if it is none, or cannot be read."""
    try:
        content = parse_line(path.read_bytes())
    except (OSError, ValueError):
        return None
    is_result = str(content.get("format")) in _FORMATS and isinstance(content.get("figures"), dict)
    return content if is_result else None


def _shown(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    targets = [content.get(key) for key in ("target", "first", "second")]
    return {
        "name": printable(path.stem),
        "kind": _FORMATS[str(content["format"])],
        "about": " against ".join(_target(target) for target in targets if isinstance(target, dict)),
        "figures": {
            printable(str(name)): _numbers(figure)
            for name, figure in content["figures"].items()
            if isinstance(figure, dict)
        },
    }


def _target(target: Mapping[str, Any]) -> str:
    parts = [target.get("name"), target.get("checkpoint")]
    return printable(" ".join(str(part) for part in parts if part is not None))


def _numbers(figure: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: _number(figure.get(name)) for name in _NUMBERS if name in figure}


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None
