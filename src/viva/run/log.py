"""The log files of a run, and the index of its checkpoints.

``metrics.jsonl``, ``transcripts.jsonl`` and, if it keeps any, samples and tokens are append-only. A checkpoint records
how long they were, and a resumed run cuts them back to that, so that they never hold a step twice. Everything that
depends on the clock has a key under ``time/``; all other metrics are equal in two runs with the same seed. No line
holds a credential (`viva.run.secrets`): these files are for people, and nothing is trained from them.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from viva.model_files import check_name, is_inside, sealed, unsealed
from viva.run.files import (
    INDEX,
    LOG_FILES,
    METRICS_FILE,
    SAMPLES_FILE,
    TOKENS_FILE,
    TRANSCRIPTS_FILE,
    naming,
    read_json_lines,
)
from viva.run.secrets import redacted

BEGUN = json.dumps(sealed({"begun": True, "next_step": 0, "log_sizes": {}}))
"""The only line of an index before the first checkpoint."""


class RunLog:
    """The log files of a run folder."""

    def __init__(self, folder: Path) -> None:
        self._paths = {name: folder / name for name in LOG_FILES}

    def sizes(self) -> dict[str, int]:
        """Bytes of each file, flushed to the disk."""
        return {name: _synced_size(path) for name, path in self._paths.items()}

    def cut_back(self, sizes: Mapping[str, int]) -> None:
        """Drop everything after a checkpoint; `ValueError` if a file is shorter than it was there."""
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
        transcripts: Iterable[Mapping[str, object]] = (),
        samples: Iterable[Mapping[str, object]] = (),
        tokens: Iterable[Mapping[str, object]] = (),
    ) -> None:
        """Append one step. Keys are sorted, so equal metrics are equal bytes; none of them takes the place of ``step``.

        Raises:
            FloatingPointError: If a metric is not a finite number; nothing is written.
        """
        wrong = {name: value for name, value in sorted(metrics.items()) if not math.isfinite(value)}
        if wrong:
            raise FloatingPointError(f"metrics of step {step} must be finite numbers; got {wrong}")
        self._append(TRANSCRIPTS_FILE, transcripts)
        self._append(SAMPLES_FILE, samples)
        self._append(TOKENS_FILE, tokens)
        named = {name: value for name, value in sorted(metrics.items()) if name != "step"}
        self._append(METRICS_FILE, [{"step": step, **named}])

    def write_failed(self, transcripts: Iterable[Mapping[str, object]]) -> None:
        """Append what was said in a step that could not be finished; a run that is resumed cuts it off again."""
        self._append(TRANSCRIPTS_FILE, transcripts)

    def metrics(self) -> list[dict[str, float]]:
        """All logged steps, in order."""
        return list(read_json_lines(self._paths[METRICS_FILE]))

    def _append(self, name: str, rows: Iterable[Mapping[str, object]]) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One line of the index."""

    name: str
    next_step: int
    """The first step that is not in the saved weights."""
    state_path: str
    """Place of the state: an address, or a path relative to the run folder."""
    state_digest: str | None = None
    """SHA-256 of the state's manifest, which lists its other files; ``None`` where the engine writes none here."""
    beside: Mapping[str, str] = field(default_factory=dict[str, str])
    """By name, where weights lie that the run needs beside the state to go on, like ``state_path``: those of a judge
    that is not the policy as it is."""
    beside_digests: Mapping[str, str] = field(default_factory=dict[str, str])
    """SHA-256 of their manifests, where the engine writes some here."""
    log_sizes: Mapping[str, int]
    log_digests: Mapping[str, str] = field(default_factory=dict[str, str])
    """SHA-256 of the log files up to these sizes."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """See `viva.run.checkpoints.environment`; with the engine's precision, where it is known."""
    earlier_environments: Sequence[Mapping[str, str]] = field(default_factory=list[Mapping[str, str]])
    """Other environments that steps before were computed in, oldest first; empty where the run is of one piece."""
    final: bool = False
    """Whether the run was complete."""
    best: bool = False
    """Whether the stop rule's metrics stood lowest here; kept however old it is."""
    ttl_seconds: int | None = None
    """Time from saving on after which the engine may delete the state; ``None``: never."""
    following: int | None = field(default=None, compare=False)
    """Lines behind it in the index, by which one that was cut between two lines shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    """The content of ``checkpoints.jsonl``, by number of line, which counts from 1."""

    checkpoints: list[tuple[int, Checkpoint]]
    """Oldest first; whether their states are there was not looked at."""
    damage: dict[int, str]
    """The reason why a line cannot be used, or what is missing behind it."""
    is_empty: bool
    """Whether there is no line at all, not even that of a run's beginning."""


def read_index(folder: Path) -> CheckpointIndex:
    """The index of a run's checkpoints; `OSError`, which names it, if it cannot be read."""
    path = folder / INDEX
    with naming(path):
        lines = path.read_bytes().decode("utf-8", "replace").split("\n")
    lines = [line for line in lines if line.strip()]
    found: list[tuple[int, Checkpoint]] = []
    damage: dict[int, str] = {}
    for number, line in enumerate(lines if lines != [BEGUN] else (), 1):
        try:
            checkpoint = Checkpoint(**unsealed(json.loads(line), "the line"))
            _check(checkpoint, folder)
        except (TypeError, AttributeError, RecursionError, json.JSONDecodeError) as error:
            damage[number] = f"the line is no checkpoint ({error})"
        except ValueError as error:
            damage[number] = str(error)
        else:
            found.append((number, checkpoint))
            if checkpoint.following not in (None, len(lines) - number):
                damage[number] = f"{checkpoint.following} lines stood behind it"
    return CheckpointIndex(checkpoints=found, damage=damage, is_empty=not lines)


def _check(checkpoint: Checkpoint, folder: Path) -> None:
    """Refuse values that no checkpoint has; a name or a place in them may be somebody else's choice."""
    check_name(checkpoint.name)
    sizes, digests = dict(checkpoint.log_sizes), dict(checkpoint.log_digests)
    for name in (*sizes, *digests, *checkpoint.beside, *checkpoint.beside_digests):
        check_name(name)
    numbers = (checkpoint.next_step, *sizes.values())
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"its steps and sizes must be whole numbers; got {numbers!r}")
    if set(digests) - set(sizes):
        raise ValueError(f"it has digests of {sorted(digests)} and sizes of {sorted(sizes)}")
    if set(checkpoint.beside_digests) - set(checkpoint.beside):
        raise ValueError(f"it has digests of {sorted(checkpoint.beside_digests)}, which are not beside it")
    texts: list[object] = [checkpoint.state_path, checkpoint.state_digest or "", *digests.values()]
    texts += [*checkpoint.beside.values(), *checkpoint.beside_digests.values()]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"its paths and digests must be texts; got {texts!r}")
    for name in sizes:
        if not is_inside(folder / name, folder):
            raise ValueError(f"its log {name!r} is outside of the run's folder")
