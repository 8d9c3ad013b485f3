"""The folder of one run: what is in it, and what to do if it is there already.

``config.json`` (the options, from an allow-list: no environment, no secrets), ``metrics.jsonl``, ``transcripts.jsonl``,
``samples.jsonl`` (if the recipe keeps samples), ``tokens.jsonl``
(`viva.rl.token_records`), ``checkpoints.jsonl``, ``state/`` (saved by the local engine), at the
end ``adapter/`` and ``report.html``, and what trackers, ``viva export`` and ``viva eval`` leave.
"""

import json
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from viva.rl.checkpoints import Checkpoint, Checkpoints
from viva.rl.files import write_atomic
from viva.rl.run_log import RunLog
from viva.rl.secrets import without_secrets

__all__ = ["BehaviorIfExists", "RunFolder", "check_behavior", "open_run_folder"]

BehaviorIfExists: TypeAlias = Literal["ask", "delete", "resume", "raise"]

_CONFIG = "config.json"
_MARKS = (_CONFIG, "metrics.jsonl", "checkpoints.jsonl")
_RETIRED = ("wandb_name", "wandb_project")
"""Options of version 0.1.0 that ``trackers`` has replaced; a run that has them may be resumed without."""
_ENTRIES = (
    *_MARKS,
    "transcripts.jsonl",
    "samples.jsonl",
    "tokens.jsonl",
    "state",
    "adapter",
    "model",
    "report.html",
    "tensorboard",
    "trackers.json",
    "wandb",
    "export",
    "eval",
)


class RunFolder:
    """An open run folder."""

    def __init__(self, path: Path, *, keep_checkpoints: int = 3, ttl_seconds: int | None = None) -> None:
        self.path = path
        self.log = RunLog(path)
        self.checkpoints = Checkpoints(path, keep=keep_checkpoints, ttl_seconds=ttl_seconds)

    @property
    def state_dir(self) -> Path:
        """Where the local engine saves its state."""
        return self.path / "state"

    def go_back_to(self, checkpoint: Checkpoint | None, *, num_steps: int) -> None:
        """Remove whatever was logged or saved after a checkpoint (``None``: after the run's beginning).

        A run of `num_steps` that is complete is left as it is.
        """
        if checkpoint is not None and checkpoint.final and checkpoint.next_step >= num_steps:
            return
        self.checkpoints.discard_after(checkpoint)
        self.checkpoints.discard_unlisted(self.state_dir / "weights")
        self.log.cut_back(checkpoint.log_sizes if checkpoint else {})


def check_behavior(behavior: str) -> None:
    """Reject an unknown behavior, or ``ask`` where nobody can answer.

    Raises:
        ValueError: See above.
    """
    if behavior not in get_args(BehaviorIfExists):
        raise ValueError(
            f"behavior_if_exists must be one of {', '.join(get_args(BehaviorIfExists))}; got {behavior!r}"
        )


def open_run_folder(
    path: Path,
    *,
    behavior: BehaviorIfExists,
    config: Mapping[str, Any],
    free_options: Collection[str] = (),
    ask: Callable[[str], str] | None = None,
    ttl_seconds: int | None = None,
) -> RunFolder:
    """Make or reopen the folder of a run and write its ``config.json``.

    Args:
        path: The folder.
        behavior: What to do if it holds a run: ``resume`` continues it, ``delete`` starts anew, ``raise`` refuses,
            ``ask`` asks on the terminal.
        config: The run's options as JSON values. Credentials in URLs are removed.
        free_options: Options that a resumed run may change; all others must be as they were.
        ask: Puts a question and returns the answer; default: the terminal.
        ttl_seconds: When a remote engine may delete the checkpoints before the last and the best.

    Raises:
        ValueError: If the folder may not be used, or its run had other options.
    """
    check_behavior(behavior)
    config = json.loads(without_secrets(json.dumps(dict(config), allow_nan=False)))
    if _holds_run(path):
        behavior = _asked(path, ask) if behavior == "ask" else behavior
        if behavior == "raise":
            raise ValueError(
                f"log_path={path} already holds a run. Give another log_path, "
                "or behavior_if_exists=resume to continue it or =delete to start anew."
            )
        if behavior == "delete":
            _delete_run(path)
        else:
            _check_same_options(path, config, free_options)
    elif path.exists() and not path.is_dir():
        raise ValueError(f"log_path={path} is a file; give a folder")
    path.mkdir(parents=True, exist_ok=True)
    write_atomic(path / _CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    return RunFolder(path, ttl_seconds=ttl_seconds)


def _holds_run(path: Path) -> bool:
    return any((path / name).exists() for name in _MARKS)


def _delete_run(path: Path) -> None:
    """Delete what runs write, and nothing else that may be in the folder."""
    for entry in (path / name for name in _ENTRIES):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


def _asked(path: Path, ask: Callable[[str], str] | None) -> BehaviorIfExists:
    if ask is None:
        if not sys.stdin.isatty():
            raise ValueError(
                f"log_path={path} already holds a run and there is no terminal to ask. "
                "Pass behavior_if_exists=resume, delete or raise."
            )
        ask = input
    while True:
        answer = ask(f"{path} already holds a run. Type resume, delete or exit: ").strip().lower()
        if answer == "exit":
            raise ValueError(f"log_path={path} already holds a run, and you chose not to touch it.")
        if answer == "resume" or answer == "delete":
            return answer


def _check_same_options(path: Path, config: Mapping[str, Any], free_options: Collection[str]) -> None:
    if not (path / _CONFIG).exists():
        return
    before: dict[str, Any] = json.loads((path / _CONFIG).read_text(encoding="utf-8"))
    changed = [
        f"{name} was {before.get(name)!r} and is now {config.get(name)!r}"
        for name in sorted({*before, *config} - {*free_options, *_RETIRED})
        if before.get(name) != config.get(name)
    ]
    if changed:
        raise ValueError(
            f"log_path={path} holds a run with other options: {'; '.join(changed)}. "
            "Resume with the same options, give another log_path, or behavior_if_exists=delete."
        )
