"""Results of ``viva eval`` that lie in a run's folder: figures with their intervals, and comparisons."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from viva.report.markup import visible
from viva.report.run_files import parse_line

__all__ = ["read_evaluations"]

_FOLDER = "eval"
_FORMATS = {"viva evaluation 1": "evaluation", "viva comparison 1": "comparison"}
_NUMBERS = ("value", "against", "difference", "low", "high", "num_problems")


def read_evaluations(run_folder: Path) -> list[dict[str, Any]]:
    """Every result and comparison in the order of their files' names; files of other formats are left out.

    Args:
        run_folder: Of the run.

    Returns:
        Of each ``name``, ``kind`` (evaluation or comparison), ``about`` (what was measured) and ``figures`` (by name,
        the numbers of the file).
    """
    folder = run_folder / _FOLDER
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    found = [_read(path) for path in paths]
    return [each for each in found if each is not None]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = parse_line(path.read_bytes())
    except ValueError:
        return None
    kind = _FORMATS.get(str(content.get("format")))
    figures = content.get("figures")
    if kind is None or not isinstance(figures, dict):
        return None
    targets = [content.get(key) for key in ("target", "first", "second")]
    return {
        "name": visible(path.stem),
        "kind": kind,
        "about": " against ".join(_target(target) for target in targets if isinstance(target, dict)),
        "figures": {
            visible(str(name)): _numbers(figure)
            for name, figure in figures.items()
            if isinstance(figure, dict)
        },
    }


def _target(target: Mapping[str, Any]) -> str:
    parts = [target.get("name"), target.get("checkpoint")]
    return visible(" ".join(str(part) for part in parts if part is not None))


def _numbers(figure: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: _number(figure.get(name)) for name in _NUMBERS if name in figure}


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None
