"""The log files of a run.

``metrics.jsonl``, ``transcripts.jsonl`` and, if it keeps any, samples and tokens are append-only. A checkpoint records
how long they were, and a resumed run cuts them back to that, so that they never hold a step twice. Everything that
depends on the clock has a key under ``time/``; all other metrics are equal in two runs with the same seed. No line
holds a credential (`viva.run.secrets`): these files are for people, and nothing is trained from them.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from viva.run.files import naming, read_json_lines
from viva.run.secrets import redacted

_FILES = ("metrics.jsonl", "transcripts.jsonl", "samples.jsonl", "tokens.jsonl")


class RunLog:
    """The log files of a run folder."""

    def __init__(self, folder: Path) -> None:
        self._paths = {name: folder / name for name in _FILES}

    def sizes(self) -> dict[str, int]:
        """Bytes of each file, flushed to the disk."""
        return {name: _synced_size(path) for name, path in self._paths.items()}

    def cut_back(self, sizes: Mapping[str, int]) -> None:
        """Drop everything after a checkpoint.

        Raises:
            ValueError: If a file is shorter than it was at the checkpoint.
        """
        for name, path in self._paths.items():
            size, wanted = path.stat().st_size if path.exists() else 0, sizes.get(name, 0)
            if size < wanted:
                raise ValueError(
                    f"{path} has {size} bytes, fewer than the {wanted} it had at the checkpoint; "
                    "it was changed since. Start anew with behavior_if_exists=delete, or put the file back."
                )
            if size > wanted:
                os.truncate(path, wanted)

    def write_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        transcripts: Iterable[Mapping[str, Any]] = (),
        samples: Iterable[Mapping[str, Any]] = (),
        tokens: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        """Append one step. Keys are sorted, so equal metrics are equal bytes.

        Raises:
            FloatingPointError: If a metric is not a finite number; nothing is written.
        """
        wrong = {name: value for name, value in sorted(metrics.items()) if not math.isfinite(value)}
        if wrong:
            raise FloatingPointError(f"metrics of step {step} must be finite numbers; got {wrong}")
        self._append("transcripts.jsonl", transcripts)
        self._append("samples.jsonl", samples)
        self._append("tokens.jsonl", tokens)
        self._append("metrics.jsonl", [{"step": step, **dict(sorted(metrics.items()))}])

    def metrics(self) -> list[dict[str, float]]:
        """All logged steps, in order."""
        return list(read_json_lines(self._paths["metrics.jsonl"]))

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        lines = [json.dumps(redacted(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
        if lines:
            path = self._paths[name]
            with naming(path), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write("".join(lines))


def _synced_size(path: Path) -> int:
    if not path.exists():
        return 0
    with naming(path), path.open("ab") as file:
        os.fsync(file.fileno())
        return file.tell()
