"""Evaluations as JSON files, written in one step and read back whole."""

import json
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from viva.eval.records import Evaluation
from viva.rl.files import write_atomic

__all__ = ["FORMAT", "read_evaluation", "write_evaluation"]

FORMAT = "viva evaluation 1"
"""First key of the file, so that a reader knows what it has."""

_EVALUATION: TypeAdapter[Evaluation] = TypeAdapter(Evaluation)


def write_evaluation(path: Path, evaluation: Evaluation) -> Path:
    """Write an evaluation; equal evaluations are equal bytes."""
    content = {"format": FORMAT, **cast("dict[str, Any]", _EVALUATION.dump_python(evaluation, mode="json"))}
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1)
    # halves of surrogate pairs, which a model's reply may hold, cannot be written as UTF-8
    write_atomic(path, text.encode("utf-8", "backslashreplace").decode("utf-8") + "\n")
    return path


def read_evaluation(path: Path) -> Evaluation:
    """Read an evaluation.

    Raises:
        ValueError: If the file is none.
    """
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or cast("dict[str, Any]", content).pop("format", None) != FORMAT:
        raise ValueError(f"{path} is not an evaluation; give a file that `viva eval` wrote ({FORMAT!r})")
    try:
        return _EVALUATION.validate_python(content, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path} is damaged: {place}: {first['msg']}") from error
