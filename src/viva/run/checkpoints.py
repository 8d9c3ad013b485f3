"""Checkpoints: where a run can go on, exactly.

A checkpoint is the engine's saved state (weights and optimiser) and one line in ``checkpoints.jsonl``: the next step,
how long the log files were, and what the run was computed with. Random streams and the order of the data are pure
functions of the seed and the step, so nothing else has to be kept. The index is written after the state is complete and
replaced in one step, so a crash at any moment leaves the last good checkpoint in place.

Every line has a seal (`viva.model_files`) and the digests of the log files: a damaged checkpoint is passed over for the
one before it, with a note. A line also has the digest of its state's manifest, and the index is there from the run's
beginning: a state that was exchanged, or an index that is gone, is refused, and no state is deleted for it.
"""

import hashlib
import json
import platform
import re
import shutil
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import tinker

from viva import __version__
from viva.conversation.messages import did_you_mean
from viva.model_files import MismatchError, is_inside, sealed
from viva.run.files import INDEX, METRICS_FILE, naming, read_json, write_atomic
from viva.run.log import BEGUN, Checkpoint, read_index
from viva.sdk import PreciseTrainingClient, TrainingClient

_BLOCK = 1 << 20
_OWN_BESIDE = re.compile(
    r"(judge|scorer|start|past-[A-Za-z0-9_-]+)-[0-9]{6,}(-again)?|\.(judge|scorer|start|past)-.+"
)
"""Names of weights beside states, and of what a killed writer leaves."""
_OWN_STATE = re.compile(r"[0-9]{6,}(-kept)?(\.[A-Za-z0-9_-]+)?(-again)?|\..+")
"""Names of states that runs save, and of what a killed writer leaves."""
_STATES, _BESIDE = "state/weights", "state/sampler_weights"
"""The folders in a run's where the local engine saves states, and weights beside them."""
_MEMBER = "member-"
"""Begins the names, beside a checkpoint's state, of the states of a run's other policies."""
_PACKAGES = ("tinker", "tinker-cookbook", "torch", "transformers", "tokenizers", "peft", "numpy")
_PROCESSORS = Path("/proc/cpuinfo")


def environment() -> dict[str, str]:
    """Machine, versions and settings that must be equal for a resumed run to be bit-identical."""
    import torch

    versions = {"viva": __version__} | {name: _version(name) for name in _PACKAGES}
    return versions | {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": f"{_processor()} ({torch.backends.cpu.get_cpu_capability()})",
        "threads": str(torch.get_num_threads()),
        "matmul": torch.get_float32_matmul_precision(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def _processor() -> str:
    """The processor's name, from the system."""
    lines = _PROCESSORS.read_text(encoding="utf-8").splitlines() if _PROCESSORS.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _environment_of(client: TrainingClient) -> dict[str, str]:
    return environment() | (
        {"precision": client.precision} if isinstance(client, PreciseTrainingClient) else {}
    )


@cache
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
        self.delete_on_server: Callable[[str], Awaitable[None]] | None = None
        """Deletes a state that lies with a remote engine, if that can."""
        self._logs = _Beginnings(folder)
        self._unlisted: dict[str, set[str]] = {}
        """Weights beside states that are needed and that no checkpoint names yet, by what they are saved for."""

    def all(self) -> list[Checkpoint]:
        """All usable checkpoints of the index, oldest first; `ValueError` if there are some and none can be used."""
        found, damage = self._read()
        if damage and not found:
            raise ValueError(
                f"{'; '.join(damage)}. No checkpoint of {self.folder} can be used: put back what is damaged from a "
                "copy, or start anew with behavior_if_exists=delete"
            )
        return found

    def damage(self) -> list[str]:
        """Messages about lines of the index that cannot be used."""
        return self._read()[1]

    def _read(self) -> tuple[list[Checkpoint], list[str]]:
        """The checkpoints that can be used, and what is wrong with the others."""
        if not (self.folder / INDEX).exists():
            return [], []
        index = read_index(self.folder)
        found: list[Checkpoint] = []
        damage = dict(index.damage)
        for number, checkpoint in index.checkpoints:
            if problem := self._state_problem(checkpoint):
                damage[number] = problem
            else:
                found.append(checkpoint)
        path = self.folder / INDEX
        texts = [f"{path}:{number}: {damage[number]}" for number in sorted(damage)]
        return found, [f"{path} is empty"] if index.is_empty else texts

    def begin(self) -> None:
        """Write the index of a run without checkpoints, where there is none."""
        if not (self.folder / INDEX).exists():
            self._write([])

    def check_index(self) -> None:
        """Refuse to go on without an index where steps were logged or states saved, by a `ValueError`."""
        path = self.folder / INDEX
        if path.exists():
            return
        log, weights = self.folder / METRICS_FILE, self.folder / _STATES
        states = sorted(state.name for state in weights.iterdir()) if weights.is_dir() else []
        if states or (log.exists() and log.stat().st_size):
            kept = f"states are saved ({', '.join(states)})" if states else "steps are logged"
            raise ValueError(
                f"{path} is missing, but {kept}: nothing says what they belong to, and the run would begin at step 0. "
                f"Nothing was touched. Put {INDEX} back from a copy, give another log_path, or give the run up with "
                "behavior_if_exists=delete."
            )

    def check_state(self, checkpoint: Checkpoint) -> bool:
        """Compare a state with the one that was saved for a checkpoint; whether there is a digest to compare with.

        Raises:
            MismatchError: If another one is in its place.
            ValueError: If weights beside it are damaged.
        """
        from viva.engine.checkpoint import read_checkpoint

        for name, digest in checkpoint.beside_digests.items():
            place = self.folder / checkpoint.beside[name]
            read_checkpoint(place)
            if _manifest_digest(place) != digest:
                raise MismatchError(
                    f"the weights in {place} are not those that were saved there for the checkpoint {checkpoint.name}. "
                    "Nothing was touched: put the right ones back, or give another log_path."
                )
        if _is_uri(checkpoint.state_path):
            return True
        path = self.folder / checkpoint.state_path
        found = _manifest_digest(path)
        if checkpoint.state_digest is None:
            return found is None
        if found == checkpoint.state_digest or not _is_sound(path):  # the engine says what is damaged
            return True
        others = [other.name for other in self.all() if other.state_digest == found]
        whose = f"that of the checkpoint {others[0]}" if others else "none that this run saved there"
        raise MismatchError(
            f"the state in {path} is not the one that was saved after {checkpoint.next_step} steps: it is undamaged, "
            f"but {whose}. Nothing was touched: put the right state back, or give another log_path."
        )

    def _state_problem(self, checkpoint: Checkpoint) -> str | None:
        """The reason why the state of a checkpoint cannot be used."""
        for state_path in (checkpoint.state_path, *checkpoint.beside.values()):
            path = self.folder / state_path
            if _is_uri(state_path):
                continue
            if not is_inside(path, self.folder):
                return f"its state {state_path!r} is outside of the run's folder"
            if not path.exists():
                return f"its state {path} is gone"
        return None

    def check_logs(self, checkpoint: Checkpoint) -> None:
        """Compare the log files with what they were at a checkpoint; `ValueError` if one was changed since."""
        for name, digest in checkpoint.log_digests.items():
            if self._logs.digest(name, checkpoint.log_sizes.get(name, 0)) != digest:
                raise ValueError(
                    f"{self.folder / name} is damaged or was changed: it no longer begins with what it held after "
                    f"{checkpoint.next_step} steps. Put it back from a copy, or start anew with "
                    "behavior_if_exists=delete"
                )

    def latest(self) -> Checkpoint | None:
        """The checkpoint to resume from."""
        checkpoints = self.all()
        return checkpoints[-1] if checkpoints else None

    def best(self) -> Checkpoint | None:
        """The checkpoint that was marked as the best."""
        return next((checkpoint for checkpoint in self.all() if checkpoint.best), None)

    def resolve(self, checkpoint: Checkpoint, beside: str | None = None) -> str:
        """The path of the state, or of the weights of a name beside it, as the engine takes it."""
        path = checkpoint.state_path if beside is None else checkpoint.beside[beside]
        return path if _is_uri(path) else str(self.folder / path)

    async def save(
        self,
        client: TrainingClient,
        *,
        next_step: int,
        log_sizes: Mapping[str, int],
        final: bool = False,
        best: bool = False,
        beside: Mapping[str, str] | None = None,
        members: Mapping[str, TrainingClient] | None = None,
    ) -> Checkpoint:
        """Save the state and those of `members` (a run's further policies), list them, and delete what is not kept.

        If the state after these steps is saved already, only the index is brought up to date. The last state and the
        best one are saved for good; with ``ttl_seconds`` a former best state is deleted on the server.

        Raises:
            ValueError: If the engine saved outside of the run's folder.
        """
        known = self.all()
        others = [replace(other, final=False) for other in known if other.next_step != next_step]
        checkpoint = next((other for other in known if other.next_step == next_step), None)
        ttl_seconds = None if final or best else self.ttl_seconds
        if checkpoint is None or (ttl_seconds is None and checkpoint.ttl_seconds is not None):
            name = f"{next_step:06d}" + ("" if checkpoint is None else "-kept")
            now = _environment_of(client)
            state_path = self._relative(await _save(client.save_state, name, ttl_seconds))
            near = {name: self._relative(path) for name, path in (beside or {}).items()}
            for member, its in (members or {}).items():
                path = await _save(its.save_state, f"{name}.{member}", ttl_seconds)
                near[member_state(member)] = self._relative(path)
            checkpoint = Checkpoint(
                name=name,
                next_step=next_step,
                state_path=state_path,
                state_digest=self._digest(state_path),
                beside=near,
                beside_digests={
                    name: digest for name, path in near.items() if (digest := self._digest(path)) is not None
                },
                log_sizes=dict(log_sizes),
                log_digests={name: self._logs.digest(name, size) for name, size in log_sizes.items()},
                environment=now,
                earlier_environments=_earlier(others, now),
                ttl_seconds=ttl_seconds,
            )
        checkpoint = replace(checkpoint, final=final, best=best or checkpoint.best)
        if checkpoint.best:
            others = [replace(other, best=False) for other in others]
        old = others[: max(len(others) - (self.keep if final else self.keep - 1), 0)]
        dropped = [other for other in old if not other.best]
        self._write([*(other for other in others if other not in dropped), checkpoint])
        for other in dropped:
            for state_path in _states(other):
                if not _is_uri(state_path):
                    shutil.rmtree(self.folder / state_path, ignore_errors=True)
                elif self.ttl_seconds and other.ttl_seconds is None and self.delete_on_server:
                    await self.delete_on_server(state_path)
        self._unlisted.clear()
        self._discard_beside()
        return checkpoint

    async def save_beside(self, client: TrainingClient, name: str, *, kept: Collection[str] = ()) -> str:
        """Save the weights for sampling beside the states, and delete earlier local ones that no checkpoint needs.

        Args:
            client: Has the weights.
            name: What they are saved for, and a number: ``judge-000010``.
            kept: Paths of weights that were saved for the same and are still needed.

        Raises:
            ValueError: If the engine saved outside of the run's folder.
        """
        path = self._relative(await _save(client.save_weights_for_sampler, name, self.ttl_seconds))
        self._unlisted[name.rpartition("-")[0]] = {path, *map(self._relative, kept)}
        self._discard_beside()
        return path if _is_uri(path) else str(self.folder / path)

    def _discard_beside(self) -> None:
        """Delete weights that were saved beside states and that are not needed."""
        if is_inside(self.folder / _BESIDE, self.folder):
            listed = {path for checkpoint in self.all() for path in checkpoint.beside.values()}
            self._discard(_BESIDE, _OWN_BESIDE, listed.union(*self._unlisted.values()))

    def _discard(self, place: str, own: re.Pattern[str], kept: Collection[str]) -> None:
        """Delete the folders at a place whose names are a run's own, but for those at the paths that are kept."""
        folder, needed = self.folder / place, {(self.folder / path).resolve() for path in kept}
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            is_own = path.is_dir() and not path.is_symlink() and own.fullmatch(path.name)
            if is_own and path.resolve() not in needed:
                shutil.rmtree(path)

    def discard_after(self, checkpoint: Checkpoint | None) -> None:
        """Take everything after a checkpoint (``None``: everything) out of the index, and lines that are damaged."""
        self._logs = _Beginnings(self.folder)
        found, damage = self._read()
        kept = [other for other in found if checkpoint and other.next_step <= checkpoint.next_step]
        if damage or kept != found:
            self._write(kept)

    def discard_unlisted(self) -> None:
        """Delete the states that a crash left without a line in the index, and nothing else.

        Raises:
            ValueError: If their folder is a link out of the run's folder.
        """
        folder = self.folder / _STATES
        if not is_inside(folder, self.folder):
            raise ValueError(
                f"{folder} leads out of the run's folder {self.folder}; nothing is deleted there"
            )
        self._discard(_STATES, _OWN_STATE, [path for each in self.all() for path in _states(each)])

    def _write(self, checkpoints: Sequence[Checkpoint]) -> None:
        counted = [
            replace(one, following=len(checkpoints) - number) for number, one in enumerate(checkpoints, 1)
        ]
        lines = [json.dumps(sealed(asdict(one))) for one in counted]
        write_atomic(self.folder / INDEX, "".join(f"{line}\n" for line in lines or [BEGUN]))

    def _digest(self, path: str) -> str | None:
        return None if _is_uri(path) else _manifest_digest(self.folder / path)

    def _relative(self, path: str) -> str:
        if _is_uri(path):
            return path
        absolute, folder = Path(path).resolve(), self.folder.resolve()
        if not absolute.is_relative_to(folder):  # it could not be resumed from
            raise ValueError(
                f"the engine saved its state at {path}, outside of the run's folder {self.folder}; give it "
                "the state_dir of that folder (RunFolder.state_dir)"
            )
        return str(absolute.relative_to(folder))

    def changed_environment(
        self, checkpoint: Checkpoint, client: TrainingClient
    ) -> dict[str, tuple[str, str]]:
        """Differences of the checkpoint's environment to this one: name to (then, now)."""
        now, then = _environment_of(client), checkpoint.environment
        return {key: (then.get(key, "not recorded"), now[key]) for key in now if then.get(key) != now[key]}


def member_state(name: str) -> str:
    """The name of a member's state beside a checkpoint's, see `Checkpoints.save`."""
    return f"{_MEMBER}{name}"


def members_beside(checkpoint: Checkpoint) -> list[str]:
    """Names of the policies whose states lie beside a checkpoint's."""
    return [name.removeprefix(_MEMBER) for name in checkpoint.beside if name.startswith(_MEMBER)]


def state_name(checkpoint: Checkpoint, member: str | None) -> str | None:
    """The name, beside a checkpoint, of a member's state; ``None`` for that of the main policy.

    Raises:
        ValueError: If there is no such member.
    """
    known = members_beside(checkpoint)
    if member is not None and member not in known:
        told = f"members beside the main policy are {', '.join(known)}" if known else "its run has one policy"
        raise ValueError(
            f"the checkpoint {checkpoint.name} has no member {member!r}: {told}. Leave member out for the main policy."
            f"{did_you_mean(member, known)}"
        )
    return None if member is None else member_state(member)


def _states(checkpoint: Checkpoint) -> list[str]:
    """Paths of the states of all policies."""
    members = [path for name, path in checkpoint.beside.items() if name.startswith(_MEMBER)]
    return [checkpoint.state_path, *members]


def _earlier(others: Sequence[Checkpoint], now: Mapping[str, str]) -> list[Mapping[str, str]]:
    """Environments of the steps before that differ from this one."""
    if not others:
        return []
    last = others[-1]
    changed = [last.environment] if last.environment != now else []
    return [*last.earlier_environments, *changed]


async def _save(save: Callable[..., Any], name: str, ttl_seconds: int | None) -> str:
    """Save under a name, or another one if an answer was lost: the engine has the state then, and refuses the name."""
    options = {} if ttl_seconds is None else {"ttl_seconds": ttl_seconds}
    try:
        response = await save(name, **options)
    except tinker.ConflictError:
        response = await save(f"{name}-again", **options)
    return str(response.path)


def _manifest_digest(state: Path) -> str | None:
    """SHA-256 of a state's manifest, where it has one."""
    from viva.engine.checkpoint import MANIFEST

    path = state / MANIFEST
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _is_sound(state: Path) -> bool:
    """Whether a state's manifest can be read."""
    from viva.engine.checkpoint import MANIFEST

    try:
        read_json(state / MANIFEST)
    except (OSError, ValueError):
        return False
    return True


def _is_uri(path: str) -> bool:
    return path.startswith("tinker://")


class _Beginnings:
    """Digests of the beginnings of files that grow; every byte is read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, tuple[int, Any]] = {}

    def digest(self, name: str, size: int) -> str:
        """SHA-256 of the first so many bytes of a file, or of all it has."""
        start, known = self._read.get(name, (0, None))
        if known is None or start > size:
            start, known = 0, hashlib.sha256()
        path = self._folder / name
        if path.exists():
            with naming(path), path.open("rb") as file:
                file.seek(start)
                while block := file.read(min(_BLOCK, size - start)):
                    known.update(block)
                    start += len(block)
        self._read[name] = start, known
        return str(known.hexdigest())
