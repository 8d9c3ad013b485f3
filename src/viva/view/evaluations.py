"""Results of ``viva eval``: figures with their intervals, and comparisons, wherever they lie."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from viva.view.markup import visible
from viva.view.run_files import parse_line

__all__ = ["FIGURE_HEADS", "read_evaluations", "read_result", "result_paths"]

_FOLDER = "eval"
_FORMATS = {"viva evaluation 1": "evaluation", "viva comparison 1": "comparison"}

FIGURE_HEADS = {
    "value": "value",
    "against": "against",
    "difference": "difference",
    "low": "95 % from",
    "high": "to",
    "num_problems": "problems",
}
"""Numbers of a figure, in the order in which they are shown, and what stands above them."""


def result_paths(source: Path) -> list[Path]:
    """Files that may be results: those of a run's ``eval/``, of a folder itself, or one file."""
    if source.is_file():
        return [source]
    folder = source / _FOLDER if (source / _FOLDER).is_dir() else source
    return sorted(path for path in folder.glob("*.json") if path.is_file())


def read_evaluations(source: Path) -> list[dict[str, Any]]:
    """Every result and comparison in the order of their files' names; files of other formats are left out.

    Args:
        source: As `result_paths` takes it.

    Returns:
        Of each ``name``, ``kind`` (evaluation or comparison), ``about`` (what was measured) and ``figures`` (by name,
        the numbers of the file).
    """
    found = [(path, read_result(path)) for path in result_paths(source)]
    return [_shown(path, content) for path, content in found if content is not None]


def read_result(path: Path) -> dict[str, Any] | None:
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
        "name": visible(path.stem),
        "kind": _FORMATS[str(content["format"])],
        "about": " against ".join(_target(target) for target in targets if isinstance(target, dict)),
        "figures": {
            visible(str(name)): _numbers(figure)
            for name, figure in content["figures"].items()
            if isinstance(figure, dict)
        },
    }


def _target(target: Mapping[str, Any]) -> str:
    parts = [target.get("name"), target.get("checkpoint")]
    return visible(" ".join(str(part) for part in parts if part is not None))


def _numbers(figure: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: _number(figure.get(name)) for name in FIGURE_HEADS if name in figure}


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None
