"""What a page can be about: a run's folder, a result of ``viva eval``, or a folder of results."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from viva.view.evaluations import read_result, result_paths
from viva.view.markup import visible
from viva.view.run_files import (
    CONFIG_FILE,
    METRICS_FILE,
    Run,
    read_config,
    read_entries,
    read_run,
    transcripts_path,
)

__all__ = ["SourceKind", "kind_of", "names_of", "options_of", "read_source", "runs_text"]

_RUN_FILES = (METRICS_FILE, "checkpoints.jsonl")
"""Files that only a run has."""

_RUN_PLACES = tuple(f"{folder}{name}" for folder in ("", "*/", "runs/*/", "runs/*/*/") for name in _RUN_FILES)

SourceKind = Literal["run", "result", "results"]


def kind_of(source: Path) -> SourceKind:
    """What lies there.

    Raises:
        ValueError: If it is nothing that a page can be about.
    """
    if (source / METRICS_FILE).is_file() or (source / CONFIG_FILE).is_file():
        return "run"
    if any(read_result(path) is not None for path in result_paths(source)):
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
    told = [visible(str(config[key])) for key in ("recipe", "model_name") if config.get(key)]
    return f"  # {', '.join(told)}" if told else ""


def options_of(source: Path) -> dict[str, Any]:
    """How a run was started, or an evaluation made; empty for a folder of results.

    Raises:
        ValueError: If the file is damaged.
    """
    content = read_result(source) if source.is_file() else None
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


def read_source(source: Path) -> Run:
    """A run, or what there is of one around a result: its options, and the conversations that were held for it.

    Raises:
        ValueError: If there is nothing that a page can be about, or a file is damaged.
    """
    if kind_of(source) == "run":
        return read_run(source)
    torn: list[str] = []
    damage: list[str] = []
    return Run(
        folder=source,
        config=options_of(source),
        curves={},
        num_steps=0,
        transcripts=read_entries(transcripts_path(source), torn, damage),
        tokens={},
        torn=tuple(torn),
        damage=tuple(damage),
    )


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
    return [visible("/".join(own[-count:])) for own in parts]
