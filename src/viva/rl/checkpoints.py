"""Checkpoints: where a run can go on, exactly.

A checkpoint is the engine's saved state (weights and optimiser) and one line in ``checkpoints.jsonl``: the next step,
how long the log files were, and what the run was computed with. Random streams and the order of the data are pure
functions of the seed and the step, so nothing else has to be kept. The index is written after the state is complete and
replaced in one step, so a crash at any moment leaves the last good checkpoint in place.
"""

import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import tinker

from viva.rl.clients import TrainingClient
from viva.rl.files import read_json_lines, write_atomic

__all__ = ["Checkpoint", "Checkpoints", "environment"]

_INDEX = "checkpoints.jsonl"
_PACKAGES = ("viva", "tinker", "tinker-cookbook", "torch", "transformers", "peft", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One line of the index."""

    name: str
    next_step: int
    """The first step that is not in the saved weights."""
    state_path: str
    """Where the engine saved the state; relative to the run folder if it is inside."""
    log_sizes: Mapping[str, int]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """See `environment`."""
    final: bool = False
    """Whether the run was complete."""
    best: bool = False
    """Whether the stop rule's metrics stood lowest here; kept however old it is."""
    ttl_seconds: int | None = None
    """When the engine may delete the state, counted from saving; ``None``: never."""


def environment() -> dict[str, str]:
    """Versions and settings that must be equal for a resumed run to be bit-identical."""
    import torch

    versions = {name: _version(name) for name in _PACKAGES}
    return versions | {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


class Checkpoints:
    """The checkpoints of a run folder."""

    def __init__(self, folder: Path, *, keep: int = 3, ttl_seconds: int | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.ttl_seconds = ttl_seconds

    def all(self) -> list[Checkpoint]:
        """All checkpoints of the index whose state is still there, oldest first."""
        checkpoints = [Checkpoint(**row) for row in read_json_lines(self.folder / _INDEX)]
        return [checkpoint for checkpoint in checkpoints if self._is_there(checkpoint)]

    def latest(self) -> Checkpoint | None:
        """The checkpoint to resume from."""
        checkpoints = self.all()
        return checkpoints[-1] if checkpoints else None

    def best(self) -> Checkpoint | None:
        """The checkpoint that was marked as the best."""
        return next((checkpoint for checkpoint in self.all() if checkpoint.best), None)

    def resolve(self, checkpoint: Checkpoint) -> str:
        """The state's path as the engine takes it."""
        return (
            checkpoint.state_path
            if _is_uri(checkpoint.state_path)
            else str(self.folder / checkpoint.state_path)
        )

    async def save(
        self,
        client: TrainingClient,
        *,
        next_step: int,
        log_sizes: Mapping[str, int],
        final: bool = False,
        best: bool = False,
    ) -> Checkpoint:
        """Save the state, then add it to the index, then delete what is no longer kept.

        If the state after these steps is saved already, only the index is brought up to date. A best checkpoint takes
        the mark from the one before. What the run leaves is saved for good: the last state and the best one.
        """
        others = [replace(other, final=False) for other in self.all() if other.next_step != next_step]
        checkpoint = next((other for other in self.all() if other.next_step == next_step), None)
        ttl_seconds = None if final or best else self.ttl_seconds
        if checkpoint is None or (ttl_seconds is None and checkpoint.ttl_seconds is not None):
            name = f"{next_step:06d}" + ("" if checkpoint is None else "-kept")
            checkpoint = Checkpoint(
                name=name,
                next_step=next_step,
                state_path=self._relative(await _save_state(client, name, ttl_seconds)),
                log_sizes=dict(log_sizes),
                environment=environment(),
                ttl_seconds=ttl_seconds,
            )
        checkpoint = replace(checkpoint, final=final, best=best or checkpoint.best)
        if checkpoint.best:
            others = [replace(other, best=False) for other in others]
        old = others[: max(len(others) - (self.keep if final else self.keep - 1), 0)]
        dropped = [other for other in old if not other.best]
        self._write([*(other for other in others if other not in dropped), checkpoint])
        for other in dropped:
            if not _is_uri(other.state_path):
                shutil.rmtree(self.resolve(other), ignore_errors=True)
        return checkpoint

    def discard_after(self, checkpoint: Checkpoint | None) -> None:
        """Take everything after a checkpoint (``None``: everything) out of the index."""
        kept = [other for other in self.all() if checkpoint and other.next_step <= checkpoint.next_step]
        if kept != self.all():
            self._write(kept)

    def discard_unlisted(self, folder: Path) -> None:
        """Delete the states in a folder that a crash left without a line in the index."""
        listed = {Path(self.resolve(checkpoint)).resolve() for checkpoint in self.all()}
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            if path.is_dir() and path.resolve() not in listed:
                shutil.rmtree(path)

    def _write(self, checkpoints: Sequence[Checkpoint]) -> None:
        lines = [json.dumps(asdict(checkpoint)) + "\n" for checkpoint in checkpoints]
        write_atomic(self.folder / _INDEX, "".join(lines))

    def _is_there(self, checkpoint: Checkpoint) -> bool:
        return _is_uri(checkpoint.state_path) or Path(self.resolve(checkpoint)).exists()

    def _relative(self, path: str) -> str:
        if _is_uri(path):
            return path
        absolute, folder = Path(path).resolve(), self.folder.resolve()
        return str(absolute.relative_to(folder)) if absolute.is_relative_to(folder) else str(absolute)

    def changed_environment(self, checkpoint: Checkpoint) -> dict[str, tuple[Any, Any]]:
        """What differs between the checkpoint's environment and this one: name to (then, now)."""
        now = environment()
        then = checkpoint.environment
        return {key: (then.get(key), now[key]) for key in now if then.get(key) != now[key]}


async def _save_state(client: TrainingClient, name: str, ttl_seconds: int | None) -> str:
    """Save under a name, or another one if an answer was lost: the engine has the state then, and refuses the name."""
    options = {} if ttl_seconds is None else {"ttl_seconds": ttl_seconds}
    try:
        response = await client.save_state(name, **options)
    except tinker.ConflictError:
        response = await client.save_state(f"{name}-again", **options)
    return str(response.path)


def _is_uri(path: str) -> bool:
    return "://" in path
