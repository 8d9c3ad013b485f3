"""The folder of one run: what is in it, and what to do if it is there already.

``config.json`` (the options, from an allow-list: no environment, no secrets), ``metrics.jsonl``, ``transcripts.jsonl``,
``samples.jsonl`` (if the recipe keeps samples), ``tokens.jsonl``, ``checkpoints.jsonl``,
``state/`` (saved by the local engine), ``journal/`` (`viva.run.journal`), at the end ``adapter/``, ``members/`` (where
there are several policies) and ``report.html``, and what trackers, ``viva export`` and ``viva eval`` leave.
``.viva.lock`` is held by the process whose run it is, and ``written.jsonl`` lists what may be deleted
(`viva.run.files`).
"""

import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from viva.model_files import SEAL, MismatchError, check_base, is_inside
from viva.run.checkpoints import Checkpoint, Checkpoints, environment
from viva.run.files import (
    CONFIG_FILE,
    INDEX,
    LOCK,
    LOG_FILES,
    MARK,
    METRICS_FILE,
    FolderLock,
    delete_written,
    is_marked,
    mark,
    parse_line,
    place_problem,
    read_json,
    strangers,
    sweep,
    write_json,
)
from viva.run.journal import Journal
from viva.run.log import RunLog
from viva.run.secrets import redacted

BehaviorIfExists: TypeAlias = Literal["ask", "delete", "resume", "raise"]

OpenedT = TypeVar("OpenedT")

_log = logging.getLogger(__name__)

_BASE = "base_digests"
"""A key of ``config.json`` that is no option: `PreparedFolder.with_base` compares it."""
_CODE = "user_code"
"""Digests of the user's own code by the name under which the options have it, see `viva.selfplay.user_code`."""
_MARKS = (CONFIG_FILE, METRICS_FILE, INDEX)
_ENTRIES = (
    *dict.fromkeys((*_MARKS, *LOG_FILES)),
    "state",
    "journal",
    "adapter",
    "model",
    "members",
    "report.html",
    "tensorboard",
    "trackers.json",
    "wandb",
    "export",
    "eval",
)
"""Files and folders that runs and the commands about them write."""
_WEIGHTS = ("*.safetensors", "adapter_config.json")
"""Files in the folder of a model, an adapter or a state."""
_MOST_NAMES = 5
"""Names listed in a message."""


class RunFolder:
    """A run folder. Opened for a run, it is closed to other processes until `close`, or until nothing refers to it."""

    def __init__(self, path: Path, *, ttl_seconds: int | None = None) -> None:
        self.path = path
        self.lock = FolderLock(path)
        self.is_new = False
        """Whether a run was begun in it by this object."""
        self.was_made = False
        """Whether the folder was made for that."""
        self.log = RunLog(path)
        self.journal = Journal(path / "journal", environment=environment)
        self.checkpoints = Checkpoints(path, ttl_seconds=ttl_seconds)

    @property
    def state_dir(self) -> Path:
        """Folder of the local engine's state."""
        return self.path / "state"

    def close(self, *, refused: bool = False) -> None:
        """Let other processes open the folder.

        If the run was `refused`, a new one leaves nothing, so that its command can be repeated.
        """
        try:
            if refused and self.is_new:
                delete_written(self.path)
            if refused and self.was_made and [path.name for path in self.path.iterdir()] == [LOCK]:
                (self.path / LOCK).unlink()
                self.path.rmdir()
        finally:
            self.is_new = self.was_made = False
            self.lock.release()

    async def open_newest(
        self, open_state: Callable[[str], Awaitable[OpenedT]], report: Callable[[str], None]
    ) -> tuple[OpenedT, Checkpoint] | None:
        """Open the newest checkpoint of which nothing is damaged; ``None`` where none was saved.

        `open_state` loads what lies at a path, and refuses damage with a `ValueError`; `report` gets a note on every
        checkpoint that is passed over.

        Raises:
            ValueError: If there are checkpoints and all of them are damaged, one belongs to another run or base model,
                or the index is gone.
        """
        problems: list[str] = []
        newest: ValueError | None = None
        self.checkpoints.check_index()
        for checkpoint in reversed(self.checkpoints.all()):
            try:
                self.checkpoints.check_logs(checkpoint)
                is_checked = self.checkpoints.check_state(checkpoint)
                opened = await open_state(self.checkpoints.resolve(checkpoint))
            except MismatchError:  # not damage, for which another checkpoint could stand in
                raise
            except ValueError as error:
                newest = newest or error
                problems.append(str(error))
                continue
            for problem in (*self.checkpoints.damage(), *problems):
                report(f"note: a checkpoint cannot be read and is passed over: {problem}")
            if not is_checked:
                report(
                    f"note: the checkpoint {checkpoint.name} has no digest of its state, as those of older versions: "
                    "nothing tells it from another run's"
                )
            return opened, checkpoint
        if newest is not None:
            raise newest
        return None

    def go_back_to(self, checkpoint: Checkpoint | None, *, num_steps: int) -> None:
        """Remove whatever was logged or saved after a checkpoint (``None``: after the run's beginning).

        A run of `num_steps` that is complete is left as it is, but for what a crash left behind.
        """
        self.checkpoints.begin()
        is_complete = checkpoint is not None and checkpoint.final and checkpoint.next_step >= num_steps
        if not is_complete:
            self.checkpoints.discard_after(checkpoint)
            self.log.cut_back(checkpoint.log_sizes if checkpoint else {})
        if not self.checkpoints.damage():  # else a state without a line may be that of a damaged one
            self.checkpoints.discard_unlisted()
        sweep(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedFolder:
    """A folder in which a run may begin or go on; nothing in it was touched so far but the lock."""

    folder: RunFolder
    config: Mapping[str, object]
    """The run's options, as they will be written."""
    resumes: bool
    """Whether a run goes on in it."""
    deletes: bool
    """Whether a run in it gives way to the new one."""

    def with_base(self, digests: Mapping[str, str], *, name: str) -> "PreparedFolder":
        """The same folder, whose configuration also holds the base model's digests (`viva.model_files.model_digests`).

        Raises:
            ValueError: If a run that goes on was begun on another base model.
        """
        if self.resumes:
            config = read_json(self.folder.path / CONFIG_FILE)
            was = str(config.get("model_name"))
            check_base(f"the run in {self.folder.path}", config.get(_BASE, {}), name, digests, was=was)
        return replace(self, config={**self.config, _BASE: dict(digests)})

    def open(self) -> RunFolder:
        """Make the folder, or delete the run in it if that was asked for, and write ``config.json``."""
        folder, path = self.folder, self.folder.path
        try:
            if not folder.lock.is_held:
                was_made = not path.exists()
                path.mkdir(parents=True, exist_ok=True)
                folder.lock.acquire()
                folder.was_made = was_made
            if self.deletes:
                _check_deletable(path)
                delete_written(path)
            elif not self.resumes and _holds_run(path):
                raise ValueError(
                    f"a run was begun in log_path={path} meanwhile. Give another log_path, or "
                    "behavior_if_exists=resume."
                )
            folder.is_new = not self.resumes
            if folder.is_new or not is_marked(path):
                mark(path)
            write_json(path / CONFIG_FILE, self.config)
            if folder.is_new:
                folder.checkpoints.begin()
        except BaseException:
            folder.close()
            raise
        return folder


def prepare_run_folder(
    path: Path,
    *,
    behavior: BehaviorIfExists,
    config: Mapping[str, object],
    free_options: Collection[str] = (),
    ttl_seconds: int | None = None,
) -> PreparedFolder:
    """Find out whether a run may use a folder, before anything in it is touched.

    Args:
        path: The folder.
        behavior: What to do if it holds a run: ``resume`` continues it, ``delete`` starts anew, ``raise`` refuses,
            ``ask`` asks on the terminal.
        config: The run's options as JSON values. Credentials in URLs are removed.
        free_options: Options that a resumed run may change; all others must be as they were.
        ttl_seconds: When a remote engine may delete the checkpoints before the last and the best.

    Raises:
        ValueError: If the folder may not be used, another process uses it, or its run had other options.
    """
    if behavior not in get_args(BehaviorIfExists):
        raise ValueError(
            f"behavior_if_exists must be one of {', '.join(get_args(BehaviorIfExists))}; got {behavior!r}"
        )
    config = redacted(json.loads(json.dumps(dict(config), allow_nan=False)))
    if problem := place_problem(path):
        raise ValueError(f"log_path={path} {problem}; give a folder that can be written to")
    folder = RunFolder(path, ttl_seconds=ttl_seconds)
    if (path / LOCK).exists() or _holds_run(path):
        # else there is nothing yet that another process could write
        folder.lock.acquire()
    try:
        decided = _decided(path, behavior) if _holds_run(path) else None
        if decided == "delete":
            _check_deletable(path)
        if decided == "resume":
            _check_links(path)
            _check_same_options(path, config, free_options)
    except BaseException:
        folder.close()
        raise
    return PreparedFolder(
        folder=folder, config=config, resumes=decided == "resume", deletes=decided == "delete"
    )


def _holds_run(path: Path) -> bool:
    """Whether a folder holds a run of Viva.

    Raises:
        ValueError: If it holds none, but something where a run would write, or a model.
    """
    marked = is_marked(path)
    taken = [name for name in _ENTRIES if os.path.lexists(path / name)]
    if any(name in _MARKS for name in taken) and (marked or _is_unmarked_run(path)):
        return True
    if not marked and os.path.lexists(path / MARK):
        taken.append(MARK)
    taken += sorted(found.name for pattern in _WEIGHTS for found in path.glob(pattern))
    if taken:
        raise ValueError(
            f"log_path={path} is not the folder of a run of Viva, but holds {_listed(taken)}, which a run might "
            "write over. Nothing was touched: give another log_path."
        )
    return False


def _is_unmarked_run(path: Path) -> bool:
    """Whether ``config.json`` is that of a run of version 0.1.0, which marked no folder."""
    try:
        content = parse_line((path / CONFIG_FILE).read_bytes())
    except (OSError, ValueError):
        return False
    return SEAL in content or {"recipe", "log_path"} <= content.keys()


def _check_deletable(path: Path) -> None:
    """Refuse to delete a run where its files cannot be distinguished from somebody else's."""
    if not is_marked(path):
        raise ValueError(
            f"log_path={path} holds a run without a list of what it wrote ({MARK}), as version 0.1.0 left it: it "
            "cannot be told from your own files. Nothing was deleted: delete the folder yourself, or give another "
            "log_path or behavior_if_exists=resume."
        )
    if strange := strangers(path):
        raise ValueError(
            f"behavior_if_exists=delete deletes what Viva wrote and nothing else, but log_path={path} holds "
            f"{_listed(strange)} beside it. Nothing was deleted: move that elsewhere, or give another log_path."
        )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _check_links(path: Path) -> None:
    """Refuse to go on in a folder whose entries lie elsewhere: what is cut back or deleted there is not the run's."""
    for name in (*_ENTRIES, "state/weights", "state/sampler_weights"):
        if not is_inside(path / name, path):
            raise ValueError(
                f"{path / name} is a link that leads out of the run's folder. Put the file or folder itself there, or "
                "start anew with behavior_if_exists=delete, which removes the link alone."
            )


def _decided(path: Path, behavior: BehaviorIfExists) -> Literal["resume", "delete"]:
    """The decision about the run in a folder."""
    if behavior == "resume" or behavior == "delete":
        return behavior
    if behavior == "raise":
        raise ValueError(
            f"log_path={path} already holds a run. Give another log_path, "
            "or behavior_if_exists=resume to continue it or =delete to start anew."
        )
    if not sys.stdin.isatty():
        raise ValueError(
            f"log_path={path} already holds a run and there is no terminal to ask. "
            "Pass behavior_if_exists=resume, delete or raise."
        )
    while True:
        answer = input(f"{path} already holds a run. Type resume, delete or exit: ").strip().lower()
        if answer == "exit":
            raise ValueError(f"log_path={path} already holds a run, and you chose not to touch it.")
        if answer == "resume" or answer == "delete":
            return answer


def _check_same_options(path: Path, config: Mapping[str, Any], free_options: Collection[str]) -> None:
    if not (path / CONFIG_FILE).exists():
        raise ValueError(
            f"{path / CONFIG_FILE} is missing, so that nothing says which options the run had. Nothing was touched: "
            "put it back from a copy, give another log_path, or give the run up with behavior_if_exists=delete."
        )
    before = redacted(read_json(path / CONFIG_FILE))  # of a version that hid less
    if config.get(_CODE) and _CODE not in before:
        _log.warning(
            "%s has no digests of your code, as of older versions; it cannot be compared.", path / CONFIG_FILE
        )
    changed = [
        f"{name} was {before.get(name)!r} and is now {config.get(name)!r}"
        for name in sorted({*before, *config} - {*free_options, _BASE, _CODE})
        if before.get(name) != config.get(name)
    ]
    code, now = before.get(_CODE) or {}, config.get(_CODE) or {}
    changed += [f"the source of {name} was changed" for name in sorted(code) if code[name] != now.get(name)]
    if changed:
        strange = sorted({*before} - {*config, *free_options, _BASE, _CODE})
        damaged = (
            f" If no option was ever called {strange[0]}, {path / CONFIG_FILE} is damaged: put it back from a copy."
            if strange
            else ""
        )
        raise ValueError(
            f"log_path={path} holds a run with other options: {'; '.join(changed)}. "
            f"Resume with the same options and code, give another log_path, or behavior_if_exists=delete.{damaged}"
        )
