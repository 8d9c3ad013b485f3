"""Evaluations and comparisons as JSON files, each written in one step; equal results are equal bytes."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from viva.eval.records import Difference, Evaluation
from viva.run.files import write_atomic
from viva.run.secrets import redacted
from viva.run.written import note_written

__all__ = [
    "COMPARISON_FORMAT",
    "FORMAT",
    "read_evaluation",
    "write_comparison",
    "write_evaluation",
    "write_transcripts",
]

FORMAT = "viva evaluation 1"
"""First key of the file, so that a reader knows what it has."""

COMPARISON_FORMAT = "viva comparison 1"
"""Of a comparison."""

_EVALUATION: TypeAdapter[Evaluation] = TypeAdapter(Evaluation)


def write_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Write an evaluation, to be read back by `read_evaluation`."""
    # halves of surrogate pairs, which a model's reply may hold, have no UTF-8
    text = (
        _json({"format": FORMAT, **asdict(evaluation)}, indent=1).encode("utf-8", "replace").decode("utf-8")
    )
    write_atomic(path, text + "\n")
    note_written([path])


def write_comparison(
    path: Path, evaluation: Evaluation, against: Evaluation, differences: Mapping[str, Difference]
) -> None:
    """Write what two evaluations differ in."""
    content = {
        "format": COMPARISON_FORMAT,
        "first": evaluation.target,
        "second": against.target,
        "options": evaluation.options,
        "prompts_digest": evaluation.prompts_digest,
        "figures": {name: asdict(each) for name, each in differences.items()},
    }
    write_atomic(path, _json(content, indent=1) + "\n")
    note_written([path])


def write_transcripts(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write conversations in the form of a run's ``transcripts.jsonl``."""
    text = "".join(_json(row) + "\n" for row in rows)
    write_atomic(path, text.encode("utf-8", "backslashreplace").decode("utf-8"))
    note_written([path])


def read_evaluation(path: Path) -> Evaluation:
    """Read an evaluation.

    Raises:
        ValueError: If the file is none.
    """
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}; evaluate anew") from error
    if not isinstance(content, dict) or cast("dict[str, Any]", content).pop("format", None) != FORMAT:
        raise ValueError(f"{path} is not an evaluation; give a file that `viva eval` wrote ({FORMAT!r})")
    try:
        return _EVALUATION.validate_python(content, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path} is damaged: {place}: {first['msg']}") from error


def _json(content: Mapping[str, Any], indent: int | None = None) -> str:
    return json.dumps(redacted(content), ensure_ascii=False, allow_nan=False, indent=indent)
