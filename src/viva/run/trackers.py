"""Trackers of a run's metrics besides its own files: the console, TensorBoard, Trackio, Weights & Biases.

Each tracker gets every step once, though a resumed run repeats those since its last checkpoint: ``trackers.json`` says
what each was given. One that missed steps (it was added later, or the run was killed) gets them from ``metrics.jsonl``.

The loggers of ``tinker_cookbook`` are not used: they know no resumed runs, and W&B's would send code and host name.
"""

import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx

from viva.conversation.messages import unknown
from viva.run.files import CONFIG_FILE, note_written, read_json, write_json
from viva.run.folder import RunFolder

CONSOLE = "console"
"""The line per step on the terminal."""
PACKAGES = ("tensorboard", "trackio", "wandb")
"""Trackers that need a package, which has their name, like the extra of viva that installs it."""
MEMORY = "trackers.json"

_WANDB = "wandb"
_WITH_PROJECT = ("trackio", _WANDB)
_DEFAULT_PROJECT = "viva"
_REFUSED = 2
"""Exit code of a run that cannot begin."""
_IN_FOLDER = ("tensorboard", _WANDB)
"""Trackers that keep files in a folder of the run's, which has their name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerChoice:
    """One tracker."""

    name: str
    project: str = _DEFAULT_PROJECT
    """Project of the run in Trackio and Weights & Biases."""
    run_name: str | None = None
    """The run's name there; ``None`` for that of its folder."""


def choose_trackers(
    texts: Sequence[str], *, wandb_project: str | None = None, wandb_name: str | None = None
) -> tuple[TrackerChoice, ...]:
    """Read the option ``trackers``: a name each, for some of them with ``:PROJECT``.

    `wandb_project` is another way to write ``wandb:PROJECT``, `wandb_name` the run's name there.

    Raises:
        ValueError: If one is unknown, named twice, or its package is not installed, with the command that installs it;
            or if the options contradict each other.
    """
    choices: list[TrackerChoice] = []
    for text in _with_project(texts, wandb_project, wandb_name):
        name, colon, project = text.partition(":")
        if name not in (CONSOLE, *PACKAGES):
            told = unknown("tracker", name, [CONSOLE, *PACKAGES])
            raise ValueError(f"{told} (metrics.jsonl in log_path is always written.)")
        if any(name == other.name for other in choices):
            raise ValueError(f"trackers names {name} twice; name it once")
        if colon and (name not in _WITH_PROJECT or not project):
            raise ValueError(
                f"trackers: {text!r} is not a tracker; a project goes behind {' or '.join(_WITH_PROJECT)}, as in "
                f"{_WITH_PROJECT[-1]}:my-project"
            )
        if name in PACKAGES and not _is_installed(name):
            raise ValueError(
                f"trackers={name} needs the package {name}, which is not installed: pip install 'viva-rl[{name}]'"
            )
        run_name = wandb_name if name == _WANDB else None
        choices.append(TrackerChoice(name=name, project=project or _DEFAULT_PROJECT, run_name=run_name))
    return tuple(choices)


def _with_project(texts: Sequence[str], project: str | None, run_name: str | None) -> list[str]:
    """The option with the tracker that ``wandb_project`` asks for."""
    for option, value in (("wandb_project", project), ("wandb_name", run_name)):
        if value is not None and not value.strip():
            raise ValueError(f"{option} must be a name; got {value!r}. Give one, or leave the option out.")
    place = next((place for place, text in enumerate(texts) if text.partition(":")[0] == _WANDB), None)
    if place is None and project is None and run_name is not None:
        raise ValueError(
            f"wandb_name={run_name} names a run in Weights & Biases, but trackers has no wandb: give "
            "wandb_project=PROJECT as well, or add wandb to trackers"
        )
    if project is None:
        return list(texts)
    wanted = f"{_WANDB}:{project}"
    if place is None:
        return [*texts, wanted]
    if texts[place] not in (_WANDB, wanted):
        raise ValueError(
            f"trackers={texts[place]} and wandb_project={project} name two projects; give one of them"
        )
    return [*texts[:place], wanted, *texts[place + 1 :]]


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    # trackers like to leave folders of their own name behind, which look like packages without a file
    return spec is not None and spec.origin is not None


class _TrackedRun:
    """A run as its trackers know it, with ``trackers.json``: its id for them, and which step each is to get next."""

    def __init__(self, folder: Path, next_step: int | None) -> None:
        self.folder = folder
        self.name = folder.resolve().name
        self.next_step = next_step
        """The step at which the run goes on, or begins; ``None`` if it has nothing left to do."""
        self._path = folder / MEMORY
        stored = read_json(self._path) if self._path.exists() else {}
        # an identity, no result: two runs of equal options must not meet in one data base
        self.run_id: str = stored.get("run_id") or secrets.token_hex(4)
        self._next_steps: dict[str, int] = stored.get("next_steps", {})
        # before a tracker sees the id: a run that dies before its first step goes on under the same one
        self._write()
        self.config = read_json(folder / CONFIG_FILE)
        """The options. Nothing else about program or machine is handed on."""

    def next_step_of(self, tracker: str) -> int:
        return self._next_steps.get(tracker, 0)

    def remember(self, tracker: str, next_step: int) -> None:
        self._next_steps[tracker] = max(next_step, self.next_step_of(tracker))
        self._write()

    def _write(self) -> None:
        content = {"run_id": self.run_id, "next_steps": dict(sorted(self._next_steps.items()))}
        write_json(self._path, content)


class OpenTracker(ABC):
    """A place that keeps the metrics of a run; a `viva.training.loop.MetricSink`."""

    takes_back = False
    """Whether it forgets, when it is opened for a resumed run, the steps that this run repeats."""

    def __init__(self, run: _TrackedRun, choice: TrackerChoice) -> None:
        self._tracked = run
        self._name = choice.name

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep one step."""

    @abstractmethod
    def close(self, exit_code: int = 0) -> None:
        """Write out what is pending; the exit code is that of the process, 0 if the run is complete."""

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand on one step, if the tracker does not have it."""
        if self.takes_back or step >= self._tracked.next_step_of(self._name):
            self.log(step, metrics)
            self._tracked.remember(self._name, step + 1)

    def catch_up(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Hand on what was missed of the steps that are over."""
        missed_from = self._tracked.next_step_of(self._name)
        for row in rows:
            step = int(row["step"])
            if step >= missed_from:
                self(step, {name: value for name, value in row.items() if name != "step"})


class _TensorBoard(OpenTracker):
    """Event files in the run's folder, for ``tensorboard --logdir LOG_PATH``; repeated steps hide earlier values."""

    takes_back = True

    def __init__(self, run: _TrackedRun, choice: TrackerChoice) -> None:
        super().__init__(run, choice)
        from torch.utils.tensorboard import SummaryWriter  # pyright: ignore[reportPrivateImportUsage]

        # also from step 0: a run that died before its first checkpoint has left steps that are repeated
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.next_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, exit_code: int = 0) -> None:
        del exit_code  # the file has no place for it
        self._writer.close()


class _Trackio(OpenTracker):
    """A run in Trackio's local data base, or where its environment variables say; a resumed run goes on in it."""

    def __init__(self, run: _TrackedRun, choice: TrackerChoice) -> None:
        super().__init__(run, choice)
        import trackio  # pyright: ignore[reportMissingImports] - an optional extra

        self._run = trackio.init(
            project=choice.project,
            # Trackio knows runs by their names alone, and folders of different runs may have one name
            name=f"{choice.run_name or run.name}-{run.run_id}",
            config=dict(run.config),
            resume="allow",
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, exit_code: int = 0) -> None:
        del exit_code  # Trackio does not keep it
        self._run.finish()


class _WeightsAndBiases(OpenTracker):
    """A run in Weights & Biases; a resumed run goes on in it.

    Only options and metrics are sent: no source code, console text, package list, host name or machine statistics.
    ``WANDB_MODE=offline`` keeps them in the run's folder for ``wandb sync``.
    """

    def __init__(self, run: _TrackedRun, choice: TrackerChoice) -> None:
        super().__init__(run, choice)
        import wandb  # pyright: ignore[reportMissingImports] - an optional extra

        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            host="undisclosed",
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        hook = sys.excepthook
        try:
            self._run = wandb.init(
                project=choice.project,
                name=choice.run_name or run.name,
                id=run.run_id,
                resume="allow",
                config=dict(run.config),
                dir=str(run.folder),
                settings=settings,
            )
        except wandb.Error as error:
            raise ValueError(
                f"trackers=wandb cannot start: {error} Log in with 'wandb login', or set WANDB_MODE=offline."
            ) from error
        finally:
            # that of wandb prints tracebacks with the secrets in them; `close` hands on the exit code
            sys.excepthook = hook

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, exit_code: int = 0) -> None:
        self._run.finish(exit_code=exit_code)  # with another code than 0 the run is shown as failed


_TRACKERS = {"tensorboard": _TensorBoard, "trackio": _Trackio, _WANDB: _WeightsAndBiases}


def open_trackers(
    choices: Sequence[TrackerChoice], folder: RunFolder, *, next_step: int | None = 0
) -> tuple[OpenTracker, ...]:
    """Open all trackers but the console, and let them catch up with the run's log, which is cut back already.

    The run goes on at `next_step`; ``None`` if it has nothing left to do.

    Raises:
        ValueError: If a tracker cannot start.
    """
    chosen = [choice for choice in choices if choice.name != CONSOLE]
    if not chosen:
        return ()
    run = _TrackedRun(folder.path, next_step)
    opened: list[OpenTracker] = []
    with ExitStack() as cleanup:
        for choice in chosen:
            place = folder.path / choice.name
            if choice.name in _IN_FOLDER and not place.exists():
                note_written([place], as_folder=True)
            tracker = _start(run, choice)
            cleanup.callback(tracker.close, _REFUSED)
            tracker.catch_up(folder.log.metrics())
            opened.append(tracker)
        cleanup.pop_all()
    return tuple(opened)


def _start(run: _TrackedRun, choice: TrackerChoice) -> OpenTracker:
    try:
        return _TRACKERS[choice.name](run, choice)
    except (OSError, RuntimeError, httpx.HTTPError) as error:
        raise ValueError(
            f"trackers={choice.name} cannot start: {type(error).__name__}: {error}. See to it, or leave it out of "
            "trackers."
        ) from error
