"""One run of any recipe, from its options to the exported adapter.

It loads torch: a recipe imports it where it plans a run, after ``--help`` and when the thread settings are in place.
"""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console
from tinker_cookbook.renderers.base import Renderer

from viva.conversation.messages import counted
from viva.conversation.rendering import load_renderer
from viva.engine.gguf import gguf_folder, is_gguf
from viva.hub import pinned, split_revision
from viva.judging.judge import POLICIES
from viva.model_files import model_digests
from viva.recipes import FailedRunError, RefusedRunError
from viva.run.checkpoints import Checkpoint, member_state, members_beside
from viva.run.files import note_written
from viva.run.folder import BehaviorIfExists, PreparedFolder, RunFolder, prepare_run_folder
from viva.run.secrets import printable
from viva.run.trackers import OpenTracker, TrackerChoice, open_trackers
from viva.sdk import ServiceClient, TrainingClient, settled
from viva.tiny import MODEL_NAME, model_path
from viva.training.data import ExampleDataset
from viva.training.followers import PastSelves
from viva.training.remote import saved_model, state_deleter
from viva.training.service import (
    EngineConfig,
    context_window,
    default_learning_rate,
    end_session,
    ending_of,
    make_service,
)

if TYPE_CHECKING:
    from viva.recipes.plan import Plan
    from viva.training.loop import Training

DEFAULT_BATCH_SIZE = 128

MEMBERS = "members"
"""Folder of a run that holds, by name, what is exported of its policies beside the main one."""

REFUSED = 2
"""Exit code of a run that cannot begin."""

NOBODY = "none"
"""As ``eval_judge``: no test answers are judged."""

_PATHS = ("model_name", "train_prompts_path", "test_prompts_path", "judge_prompt_path", "judge", "eval_judge")
"""Options that may be paths of files that a run reads."""
_CODE = ("grader", "protocol", "reward")
"""Options that may name the user's code in a file, as ``path.py:NAME``."""
_BUILT_IN_RATE = 1.5e-3  # measured, see benchmarks/log.md


def resolve_batch_size(batch_size: int | None, unit: int, name: str = "num_agents") -> int:
    """Trajectories per batch; by default the largest multiple of `unit` up to `DEFAULT_BATCH_SIZE` (or one unit).

    The unit is the smallest batch, such as one conversation; `name` is the option that sets it.

    Raises:
        ValueError: If a given size is not a positive multiple of the unit.
    """
    if batch_size is None:
        return max(DEFAULT_BATCH_SIZE // unit, 1) * unit
    if batch_size < 1 or batch_size % unit:
        below = batch_size // unit * unit
        nearest = [size for size in (below, below + unit) if size > 0] or [unit]
        raise ValueError(
            f"batch_size must be divisible by {name}: got batch_size={batch_size} and {name}={unit}. "
            f"Nearest allowed: {' or '.join(map(str, nearest))}."
        )
    return batch_size


def has_run(folder: Path) -> bool:
    """Whether a run wrote its checkpoints or metrics into a folder."""
    return any((folder / name).is_file() for name in ("checkpoints.jsonl", "metrics.jsonl"))


def resolve_model(model_name: str, revision: str | None = None) -> str:
    """The name or folder the engine loads; ``tiny`` is the built-in policy, a GGUF file is unpacked into a folder.

    The revision of a model on the hub is a branch, tag or commit; the engine takes it as ``NAME@REVISION``.

    Raises:
        ValueError: If it looks like a path that is not a model folder, or a revision is given for what is not on the
            hub.
    """
    path = Path(model_name).expanduser()
    if revision is not None:
        if model_name == MODEL_NAME or path.exists():
            raise ValueError(
                f"model_revision={revision} is that of a model on the hub, but model_name={model_name} is not there; "
                "leave model_revision out"
            )
        if not revision or "@" in model_name:
            raise ValueError(
                f"model_revision must be a branch, a tag or a commit of model_name=NAME; got {revision!r} for "
                f"model_name={model_name}"
            )
        return pinned(resolve_model(model_name), revision)
    if model_name == MODEL_NAME:
        return str(model_path())
    if has_run(path):
        raise ValueError(
            f"model_name={model_name} is a run, not a model: give the model that it trained, and with "
            "load_checkpoint_path the weights that it saved (state_path in its checkpoints.jsonl), or train a folder "
            "that viva export writes"
        )
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"model_name={model_name} is a folder without config.json, not a Hugging Face model"
            )
        return str(path)
    if is_gguf(model_name):
        return str(gguf_folder(model_name))
    if model_name.startswith((".", "/", "~")) or split_revision(model_name)[0].count("/") > 1:
        raise ValueError(
            f"model_name={model_name} is not a folder, nor a GGUF file. Give a model folder, the path of a file that "
            "ends in .gguf, a hub name like Qwen/Qwen3-8B, or tiny."
        )
    return model_name


def located(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A run's options with relative paths as they hold here: it may have been copied, or be looked at from elsewhere.

    Paths in names of the user's own code are such, too, also where the digests of that code are kept. A path is looked
    for where the run was started, if that can be told (its folder still ends with its ``log_path``), then in the run's
    folder, `folder`. What lies in neither stays as it is, and means the current folder.
    """
    words = (MODEL_NAME, NOBODY, *POLICIES)
    now, then = folder.resolve(), Path(str(config.get("log_path") or "."))
    places = [now]
    if not then.is_absolute() and ".." not in then.parts and now.parts[-len(then.parts) :] == then.parts:
        places.insert(0, now.parents[len(then.parts) - 1])

    def place(path: str) -> str:
        there = next((each / path for each in places if (each / path).exists()), None)
        return path if there in (None, Path(path).resolve()) else str(there)

    found = dict(config)
    for name in _PATHS:
        path = found.get(name)
        if isinstance(path, str) and path and path not in words:
            found[name] = place(path)
    moved: dict[object, str] = {}
    for name in _CODE:
        where, _, attribute = str(found.get(name)).rpartition(":")
        if where.endswith(".py"):
            moved[found[name]] = found[name] = f"{place(where)}:{attribute}"
    if moved and config.get("user_code"):
        found["user_code"] = {moved.get(name, name): digest for name, digest in config["user_code"].items()}
    return found


def learning_rate(given: float | None, model_name: str, *, is_lora: bool, is_local: bool = False) -> float:
    """The rate that was given, else the built-in policy's own, else `viva.training.service`'s for the model.

    For a model that will be loaded here (`is_local`), its ``config.json`` may be fetched.

    Raises:
        ValueError: If none was given and nothing is known about the model.
    """
    if given is not None:
        return given
    if model_name == MODEL_NAME and is_lora:
        return _BUILT_IN_RATE
    return default_learning_rate(resolve_model(model_name), is_lora=is_lora, may_fetch=is_local)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a run that have nothing to do with its algorithm."""

    model: str
    """The model as the engine loads it, see `resolve_model`."""
    renderer_name: str | None
    engine: EngineConfig
    lora_rank: int
    seed: int
    log_path: Path
    behavior_if_exists: BehaviorIfExists
    record: Mapping[str, Any]
    """All options of the recipe, for ``config.json``."""
    free_options: Collection[str]
    """Names of those that a resumed run may change."""
    num_steps: int
    trackers: tuple[TrackerChoice, ...] = ()
    """From `viva.run.trackers.choose_trackers`."""
    load_checkpoint_path: str | None = None
    """The checkpoint with the weights of a new run."""
    ttl_seconds: int | None = None
    """See `viva.run.checkpoints.Checkpoint`."""
    num_policies: int = 1
    """Policies that talk."""

    @property
    def _base_model_argument(self) -> dict[str, str]:
        """Keyword argument that names the model of saved weights: on this machine, where its folder may have moved."""
        return {"base_model": self.model} if self.engine.engine == "local" else {}

    def check_length(self, run: Path, num_made: int) -> None:
        """Refuse (`ValueError`) a length at which a run cannot go on after the steps that it has made."""
        if num_made > self.num_steps:
            raise ValueError(
                f"the run in {run} has made {num_made} steps, and is to end after {self.num_steps}; give as many steps "
                "as before or more, or another log_path for a shorter run"
            )

    async def open_state(self, service: ServiceClient, path: str) -> TrainingClient:
        """The training client with weights and optimiser as they were saved."""
        return await settled(
            service.create_training_client_from_state_with_optimizer(path, **self._base_model_argument)
        )

    async def open_start(self, service: ServiceClient) -> TrainingClient:
        """A training client as a new run begins with it."""
        path = self.load_checkpoint_path
        if path is not None:
            return await settled(service.create_training_client_from_state(path, **self._base_model_argument))
        pending = service.create_lora_training_client(self.model, rank=self.lora_rank, seed=self.seed)
        return await settled(pending)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A run folder with an engine that stands where the run stands."""

    folder: RunFolder
    """To be closed when the run is over, like the trackers."""
    resume_from: Checkpoint | None
    service: ServiceClient
    """To be closed as well, by `viva.training.service.end_session`."""
    client: TrainingClient
    renderer: Renderer
    context_window: int | None
    trackers: tuple[OpenTracker, ...] = ()

    def past_selves(
        self, client: TrainingClient, plan: Plan, *, name: str, whose: str, every: int, most: int
    ) -> PastSelves:
        """A policy of this run as it was at some steps."""
        start, checkpoints = self.resume_from, self.folder.checkpoints
        return PastSelves(
            name=name,
            whose=whose,
            every=every,
            most=most,
            client=client,
            service=self.service,
            base_model=plan.model if plan.engine.engine == "local" else None,
            folder=self.folder,
            known={} if start is None else {each: checkpoints.resolve(start, each) for each in start.beside},
        )


EngineCheck: TypeAlias = "Callable[[ServiceClient, TrainingClient], Awaitable[None]]"
"""Refuses an engine by an exception."""


async def open_run(options: RunOptions, check: EngineCheck | None = None) -> OpenRun:
    """Open the engine (a new adapter, or the state of the last checkpoint), then the folder.

    All that can be wrong is found before anything in the folder is touched.
    """
    prepared = prepare_run_folder(
        options.log_path,
        behavior=options.behavior_if_exists,
        config=options.record,
        free_options=options.free_options,
        ttl_seconds=options.ttl_seconds,
    )
    service = None
    try:
        state_dir = prepared.folder.state_dir
        service = make_service(
            options.engine, state_dir=state_dir, one_run=True, num_policies=options.num_policies
        )
        return await _open_run_on(service, options, prepared, check)
    except BaseException as error:
        try:
            if service is not None:
                await end_session(service, ending_of(error))
        finally:
            prepared.folder.close(refused=True)
        raise


async def _open_run_on(
    service: ServiceClient, options: RunOptions, prepared: PreparedFolder, check: EngineCheck | None
) -> OpenRun:
    client, resume_from = await _open_client(options, prepared, service)
    if resume_from is not None:
        options.check_length(prepared.folder.path, resume_from.next_step)
    if options.engine.engine == "local":
        prepared = prepared.with_base(model_digests(options.model), name=options.model)
    renderer = renderer_of(client, options.model, options.renderer_name)
    if check is not None:
        await check(service, client)
    folder = prepared.open()
    folder.checkpoints.delete_on_server = state_deleter(service) if options.engine.server else None
    folder.go_back_to(resume_from, num_steps=options.num_steps)
    next_step = resume_from.next_step if resume_from else 0
    is_complete = resume_from is not None and resume_from.final and next_step >= options.num_steps
    return OpenRun(
        folder=folder,
        resume_from=resume_from,
        service=service,
        client=client,
        renderer=renderer,
        context_window=context_window(options.model) if options.engine.engine == "local" else None,
        trackers=open_trackers(options.trackers, folder, next_step=None if is_complete else next_step),
    )


def renderer_of(client: Any, model: str, name: str | None = None) -> Renderer:
    """The chat format of a client's model: the named one, else as recognised."""
    return load_renderer(client.get_tokenizer(), model_name=split_revision(model)[0], renderer_name=name)


async def _open_client(
    options: RunOptions, prepared: PreparedFolder, service: ServiceClient
) -> tuple[TrainingClient, Checkpoint | None]:
    """A client with the newest state that can be read, or a new one where there is none."""
    if prepared.resumes:
        opened = await prepared.folder.open_newest(partial(options.open_state, service), say)
        if opened is not None:
            _report_changes(prepared.folder, *opened)
            return opened
    if options.load_checkpoint_path is not None:
        await _check_start(options.load_checkpoint_path, options, service)
    return await options.open_start(service), None


async def _check_start(start: str, options: RunOptions, service: ServiceClient) -> None:
    """Refuse weights that a new run cannot start from; one that goes on does not need them any more.

    The local engine compares the base model's content, a remote one has only its name.
    """
    if options.engine.engine == "remote":
        model, rank = await saved_model(service, start)
    else:
        from viva.engine.checkpoint import read_state

        if not Path(start).is_dir():
            what = (
                "lies with a remote engine, and needs engine=remote" if "://" in start else "is not a folder"
            )
            raise ValueError(
                f"load_checkpoint_path={start} {what}; the local engine starts from a folder of weights that it saved, "
                "like RUN/state/weights/000020"
            )
        model, rank = options.model, read_state(start).settings.rank
    if model != options.model:
        raise ValueError(
            f"load_checkpoint_path={start} has weights for {model}, and model_name is {options.model}; give "
            f"model_name={model}, or weights for {options.model}"
        )
    if rank is not None and rank != options.lora_rank:
        trained = f"an adapter of rank {rank}" if rank else "all weights of a model (rank 0)"
        raise ValueError(
            f"load_checkpoint_path={start} has {trained}, and lora_rank is {options.lora_rank}; give lora_rank={rank}, "
            "or other weights"
        )


def _report_changes(folder: RunFolder, client: TrainingClient, resume_from: Checkpoint) -> None:
    say(f"resuming {folder.path} after {counted(resume_from.next_step, 'step')}")
    for name, (then, now) in folder.checkpoints.changed_environment(resume_from, client).items():
        say(
            f"note: {name} was {then} and is now {now}; the run will not be bit-identical to an uninterrupted one "
            f"(checkpoints.jsonl keeps what its steps were computed with). Where that matters, resume it with {name} "
            f"{then}"
        )


def finish_run(training: Training, *, model: str, is_complete: bool) -> None:
    """Export and report a run that its loop completed, or say how an interrupted one goes on.

    Raises:
        FailedRunError: If all conversations of all steps were void.
    """
    folder = training.folder
    received = training.interrupts.received
    if not is_complete and received is not None:
        kept = "what was sampled is kept" if training.interrupts.cut_short else "the state is saved"
        say(
            f"stopped by {received.name}; {kept}. "
            f"Go on with the same command and behavior_if_exists=resume (log_path={folder.path})"
        )
        return
    from viva.run.export import ended_with, export_weights
    from viva.training.advice import is_void
    from viva.view.report import write_report
    from viva.view.summary import headline_text

    played = [row for row in folder.log.metrics() if row.get("rollout/groups")]
    if played and all(map(is_void, played)):
        say(f"report: {write_report(folder.path)}")
        raise FailedRunError(
            f"all conversations of all {len(played)} steps are void, so nothing was trained and nothing is "
            "exported; see the warnings above and the transcripts (state void). Fix the cause and start again."
        )
    checkpoint = ended_with(folder, training.stop_rule)
    if checkpoint is not None:
        state_path = folder.checkpoints.resolve(checkpoint)
        places = {folder.path: state_path} | {
            folder.path / MEMBERS / name: folder.checkpoints.resolve(checkpoint, member_state(name))
            for name in members_beside(checkpoint)
        }
        for place, path in places.items():
            weights = export_weights(path, model=model, folder=place)
            note_written([file for file in sorted(weights.rglob("*")) if file.is_file()] if weights else [])
            say(f"weights: {weights or path}")
        if isinstance(training.dataset, ExampleDataset):
            say(f"to start a run from them: load_checkpoint_path={state_path} lora_rank=... as here")
    say(f"report: {write_report(folder.path)}")
    say(f"to look at it: viva view {shlex.quote(str(folder.path))}")
    headline = headline_text(folder.path)
    if headline is not None:
        say(headline)


async def exit_code(run: Awaitable[Signals | None]) -> int:
    """The process's exit code: 0 complete, 1 failed, 2 refused before training, 128 + signal interrupted and saved.

    What went wrong is told on the error stream.
    """
    try:
        received = await run
    except (RefusedRunError, FailedRunError) as error:
        say(f"error: {error}", is_error=True)
        return REFUSED if isinstance(error, RefusedRunError) else 1
    return 0 if received is None else 128 + received


def say(text: str, *, is_error: bool = False) -> None:
    """One line for the user, on the error stream if something went wrong; it tells no secrets."""
    Console(stderr=is_error, highlight=False).print(printable(text), soft_wrap=True, markup=False)
