"""Weights out: what ``viva export`` writes of a run for ``peft`` and ``transformers``."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Literal

import chz

_STAGING = ".export~"


@chz.chz
class ExportOptions:
    """Options of ``viva export``."""

    to: str | None = chz.field(default=None, doc="folder to write to; RUN/export by default")
    checkpoint: str | None = chz.field(
        default=None, doc="last, best or a name in checkpoints.jsonl; default: what the run ended with"
    )
    member: str | None = chz.field(
        default=None, doc="of a run with several policies, the one to write; default: the main one"
    )
    merge: bool = chz.field(default=True, doc="also write the base model with the adapter merged into it")
    precision: Literal["float32", "bfloat16"] | None = chz.field(
        default=None, doc="of the merged model; default: that of the run"
    )
    model_name: str | None = chz.field(default=None, doc="where the base model is now, if it has moved")
    base_url: str | None = chz.field(default=None, doc="where the run's server is now, if it has moved")
    overwrite: bool = chz.field(default=False, doc="replace what an export left there")


def export_run(run_dir: str | Path, options: ExportOptions) -> list[Path]:
    """Write adapter, merged model and a card for each.

    Args:
        run_dir: The run's folder.
        options: See `ExportOptions`.

    Returns:
        The folders written: ``adapter`` and ``model``, or ``model`` alone where all weights were trained.

    Raises:
        ValueError: If there is no such run, checkpoint or member, a remote engine does not give its weights away, the
            folder has one, or a precision is given where nothing is merged because all weights were trained.
    """
    from viva.recipes.common import located, resolve_model
    from viva.run.alarms import StopRule
    from viva.run.checkpoints import state_name
    from viva.run.export import choose_checkpoint
    from viva.run.folder import RunFolder
    from viva.view.model_card import ModelCard, model_card
    from viva.view.run_index import read_run

    run = read_run(run_dir)
    if "model_name" not in run.config:
        raise ValueError(
            f"{run_dir} has no config.json with a model_name; give the log_path of a recipe's run"
        )
    is_whole = run.config.get("lora_rank") == 0
    if is_whole and options.precision is not None:
        raise ValueError(
            f"precision={options.precision} is that of a merged model, but {run_dir} trained all weights "
            "(lora_rank=0): they are written as they were trained, in float32. Leave precision out."
        )
    saved = RunFolder(run.folder).checkpoints
    rule = StopRule.of(run.config)
    checkpoint = choose_checkpoint(RunFolder(run.folder), options.checkpoint, stop_rule=rule)
    state_path = saved.resolve(checkpoint, state_name(checkpoint, options.member))
    if options.to is not None and not options.to.strip():
        raise ValueError(f"to must be the path of a folder, like to=exported; got {options.to!r}")
    target = run.folder / "export" if options.to is None else Path(options.to).expanduser()
    name = options.model_name or str(run.config["model_name"])
    place = options.model_name or str(located(run.config, run.folder)["model_name"])
    model = resolve_model(place, None if options.model_name else run.config.get("model_revision"))
    _check_free(target, model, overwrite=options.overwrite)
    trained_on = str(run.config.get("precision", "float32"))
    trained_on = "float32" if trained_on == "fast" else trained_on  # that is how it sampled
    precision = "float32" if is_whole else options.precision or trained_on
    with TemporaryDirectory(prefix="viva-export-") as folder, _complete_or_absent(target) as staging:
        if "://" in state_path:
            state_path = _fetched(state_path, run.config, options.base_url, model, Path(folder))
        written = _write(
            state_path,
            model=model,
            folder=staging,
            precision=precision if options.merge else None,
            name=checkpoint.name,
        )
        for path in written:
            is_adapter = path.name == "adapter"
            card = ModelCard(
                run=run,
                num_steps=checkpoint.next_step,
                kind="adapter" if is_adapter else "model",
                base_model=name,
                precision=trained_on if is_adapter else precision,
            )
            (path / "README.md").write_text(model_card(card), encoding="utf-8")
    return [target / path.name for path in written]


@contextmanager
def _complete_or_absent(target: Path) -> Generator[Path]:
    """A folder in the target, whose folders go there when all of them are complete."""
    from viva.model_files import replace_folder
    from viva.run.files import note_written

    is_new = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    for leftover in target.glob(f"{_STAGING}*"):  # of an export that was killed
        shutil.rmtree(leftover)
    staging = Path(mkdtemp(prefix=_STAGING, dir=target))
    note_written([staging], as_folder=True)
    try:
        yield staging
        for path in sorted(staging.iterdir()):
            place = target / path.name
            replace_folder(path, place)
            note_written([file for file in sorted(place.rglob("*")) if file.is_file()])
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if is_new and not any(target.iterdir()):
            target.rmdir()


def _fetched(
    state_path: str, config: Mapping[str, Any], base_url: str | None, model: str, folder: Path
) -> str:
    """A state of a remote engine as one of the local engine."""
    import tinker

    from viva.run.export import fetch_adapter, staged_adapter
    from viva.training.remote import explain
    from viva.training.service import EngineConfig
    from viva.training.sessions import Engines

    engine = EngineConfig(engine="remote", base_url=base_url or config.get("base_url"))

    async def fetch() -> Path:
        async with Engines(folder) as engines:
            service = engines.service(engine)
            return await fetch_adapter(service, state_path, folder / "fetched", base_url=engine.base_url)

    try:
        return str(staged_adapter(asyncio.run(fetch()), folder / "state", model))
    except tinker.TinkerError as error:
        raise ValueError(explain(error, engine.server) or str(error)) from error


def _write(state_path: str, *, model: str, folder: Path, precision: str | None, name: str) -> list[Path]:
    """The adapter and, with a precision, the model it is merged into; or the model of which all was trained."""
    from viva.run.export import export_weights, merge_adapter_into_model

    try:
        merged: Path | None = None
        if precision is not None and (Path(state_path) / "adapter_config.json").is_file():
            # first: it finds out whether adapter and model fit, before anything is written
            merged = merge_adapter_into_model(state_path, model=model, precision=precision, folder=folder)
        first = export_weights(state_path, model=model, folder=folder)
        written = [path for path in (first, merged) if path is not None]
    except (ValueError, OSError) as error:
        if Path(state_path).is_dir():
            raise
        raise ValueError(
            f"the checkpoint {name} was removed while it was exported: the run goes on and keeps its last ones. "
            "Export again."
        ) from error
    return written


def _check_free(target: Path, model: str, *, overwrite: bool) -> None:
    for name in ("adapter", "model"):
        if Path(model).resolve().is_relative_to((target / name).resolve()):
            raise ValueError(
                f"{target / name} would replace the base model, which is {model}; give another folder (to=...)"
            )
        if (target / name).exists() and not overwrite:
            raise ValueError(
                f"{target / name} exists; give another folder (to=...), or overwrite=true to replace it"
            )
