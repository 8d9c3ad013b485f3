"""Weights out: what ``viva export`` writes of a run for ``peft``, ``transformers`` and llama.cpp."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any, Literal

import chz

if TYPE_CHECKING:
    from viva.run.checkpoints import Checkpoint
    from viva.view.run_index import RunIndex


@chz.chz
class ExportOptions:
    """Options of ``viva export``."""

    to: str | None = chz.field(
        default=None,
        doc="folder to write to (default RUN/export), or FILE.gguf: the merged model for llama.cpp",
    )
    checkpoint: str | None = chz.field(
        default=None, doc="last, best or a name in checkpoints.jsonl; default: what the run ended with"
    )
    member: str | None = chz.field(
        default=None, doc="of a run with several policies, the one to write; default: the main one"
    )
    merge: bool = chz.field(default=True, doc="also write the base model with the adapter merged into it")
    precision: Literal["float32", "bfloat16", "float16", "q8_0"] | None = chz.field(
        default=None, doc="of the merged model (the last two in a GGUF file only); default: that of the run"
    )
    model_name: str | None = chz.field(default=None, doc="where the base model is now, if it has moved")
    base_url: str | None = chz.field(default=None, doc="where the run's server is now, if it has moved")
    overwrite: bool = chz.field(default=False, doc="replace what an export left there")


def export_run(run_dir: str | Path, options: ExportOptions) -> list[Path]:
    """Write adapter and merged model, or the merged model as a GGUF file, and a card for each.

    Returns:
        The folders written: ``adapter`` and ``model``, or ``model`` alone where all weights were trained; or the GGUF
        file.

    Raises:
        ValueError: If there is no such run, checkpoint or member, a remote engine does not give its weights away, the
            folder has one, the model cannot be written as a GGUF file, or a precision is given that what is written
            cannot have.
    """
    _check_options(options)
    source = _find(run_dir, options)
    return [_export_file(source, options)] if _is_file(options) else _export_folders(source, options)


def _is_file(options: ExportOptions) -> bool:
    return options.to is not None and Path(options.to).suffix.lower() == ".gguf"


def _check_options(options: ExportOptions) -> None:
    if options.to is not None and not options.to.strip():
        raise ValueError(
            f"to must be the path of a folder, like to=exported, or of a file, like to=trained.gguf; got {options.to!r}"
        )
    if _is_file(options) and not options.merge:
        raise ValueError(f"to={options.to} holds the merged model and nothing else: leave merge=false out")
    if not _is_file(options) and options.precision in ("float16", "q8_0"):
        raise ValueError(
            f"precision={options.precision} is that of a GGUF file (to=FILE.gguf); that of the merged model in a "
            "folder is float32 or bfloat16"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    run: RunIndex
    checkpoint: Checkpoint
    state_path: str
    name: str
    """The base model as it is called."""
    place: str
    """The base model's place: a GGUF file, a folder, or its name."""
    model: str
    """The base model as the engine loads it."""
    trained_on: str
    """Precision of the base weights."""
    precision: str
    """Precision of what is written."""

    @contextmanager
    def local_state(self, base_url: str | None) -> Generator[str]:
        """The state as one of the local engine; of a remote engine, it is fetched."""
        with TemporaryDirectory(prefix="viva-export-") as folder:
            try:
                yield (
                    _fetched(self.state_path, self.run.config, base_url, self.model, Path(folder))
                    if "://" in self.state_path
                    else self.state_path
                )
            except (ValueError, OSError) as error:
                if "://" in self.state_path or Path(self.state_path).is_dir():
                    raise
                raise ValueError(
                    f"the checkpoint {self.checkpoint.name} was removed while it was exported: the run goes on and "
                    "keeps its last ones. Export again."
                ) from error

    def card(self, kind: Literal["adapter", "model", "gguf"], file: str | None = None) -> str:
        """The text of a model card."""
        from viva.view.model_card import ModelCard, model_card

        return model_card(
            ModelCard(
                run=self.run,
                num_steps=self.checkpoint.next_step,
                kind=kind,
                base_model=self.name,
                precision=self.trained_on if kind == "adapter" else self.precision,
                file=file,
            )
        )


def _find(run_dir: str | Path, options: ExportOptions) -> _Source:
    """The checkpoint of a run that the options choose."""
    from viva.recipes.common import located, resolve_model
    from viva.run.alarms import StopRule
    from viva.run.checkpoints import state_name
    from viva.run.export import choose_checkpoint
    from viva.run.folder import RunFolder
    from viva.view.run_index import read_run

    run = read_run(run_dir)
    if "model_name" not in run.config:
        raise ValueError(
            f"{run_dir} has no config.json with a model_name; give the log_path of a recipe's run"
        )
    is_whole = run.config.get("lora_rank") == 0
    if is_whole and options.precision is not None and not _is_file(options):
        raise ValueError(
            f"precision={options.precision} is that of a merged model, but {run_dir} trained all weights "
            "(lora_rank=0): they are written as they were trained, in float32. Leave precision out."
        )
    saved = RunFolder(run.folder)
    checkpoint = choose_checkpoint(saved, options.checkpoint, stop_rule=StopRule.of(run.config))
    place = options.model_name or str(located(run.config, run.folder)["model_name"])
    trained_on = str(run.config.get("precision", "float32"))
    trained_on = "float32" if trained_on == "fast" else trained_on  # that is how it sampled
    return _Source(
        run=run,
        checkpoint=checkpoint,
        state_path=saved.checkpoints.resolve(checkpoint, state_name(checkpoint, options.member)),
        name=options.model_name or str(run.config["model_name"]),
        place=place,
        model=resolve_model(place, None if options.model_name else run.config.get("model_revision")),
        trained_on=trained_on,
        precision=options.precision or ("float32" if is_whole else trained_on),
    )


def _export_folders(source: _Source, options: ExportOptions) -> list[Path]:
    """Write the adapter and the model it is merged into, or the model of which all was trained."""
    target = source.run.folder / "export" if options.to is None else Path(options.to).expanduser()
    for name in ("adapter", "model"):
        _check_free(target / name, source.model, "folder (to=...)", overwrite=options.overwrite)
    from viva.run.export import export_weights, merge_adapter_into_model

    with (
        source.local_state(options.base_url) as state_path,
        _complete_or_absent(target, ".export~") as staging,
    ):
        merged: Path | None = None
        if options.merge and (Path(state_path) / "adapter_config.json").is_file():
            # first: it finds out whether adapter and model fit, before anything is written
            merged = merge_adapter_into_model(
                state_path, model=source.model, precision=source.precision, folder=staging
            )
        first = export_weights(state_path, model=source.model, folder=staging)
        written = [path for path in (first, merged) if path is not None]
        for path in written:
            kind = "adapter" if path.name == "adapter" else "model"
            (path / "README.md").write_text(source.card(kind), encoding="utf-8")
    return [target / path.name for path in written]


def _export_file(source: _Source, options: ExportOptions) -> Path:
    """Write a GGUF file and its card beside it."""
    from viva.run.export import export_gguf, gguf_metadata

    target = Path(str(options.to)).expanduser()
    card = target.with_suffix(".md")
    if target.is_dir():
        raise ValueError(f"{target} is a folder; give the path of a file (to=FILE.gguf)")
    for path in (target, card):
        _check_free(path, source.place, "file (to=FILE.gguf)", overwrite=options.overwrite)
    metadata = gguf_metadata(source.place, source.model, target.stem)
    with (
        source.local_state(options.base_url) as state_path,
        _complete_or_absent(target.parent, f".{target.name}~") as staging,
    ):
        export_gguf(
            state_path,
            model=source.model,
            precision=source.precision,
            metadata=metadata,
            file=staging / target.name,
        )
        (staging / card.name).write_text(source.card("gguf", target.name), encoding="utf-8")
        card.unlink(missing_ok=True)  # so that no card is ever beside the weights of another export
    return target


@contextmanager
def _complete_or_absent(target: Path, prefix: str) -> Generator[Path]:
    """A folder in the target, named by a prefix, whose content goes there when all of it is complete."""
    from viva.model_files import replace_file, replace_folder
    from viva.run.files import note_written

    is_new = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    for leftover in target.glob(f"{escape(prefix)}*"):  # of an export that was killed
        shutil.rmtree(leftover)
    staging = Path(mkdtemp(prefix=prefix, dir=target))
    note_written([staging], as_folder=True)
    try:
        yield staging
        for path in sorted(staging.iterdir()):
            place = target / path.name
            if path.is_dir():
                replace_folder(path, place)
                note_written([file for file in sorted(place.rglob("*")) if file.is_file()])
            else:
                replace_file(path, place)
                note_written([place])
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
    from viva.training.service import EngineConfig, Engines

    engine = EngineConfig(engine="remote", base_url=base_url or config.get("base_url"))

    async def fetch() -> Path:
        async with Engines(folder) as engines:
            service = engines.service(engine)
            return await fetch_adapter(service, state_path, folder / "fetched", base_url=engine.base_url)

    try:
        return str(staged_adapter(asyncio.run(fetch()), folder / "state", model))
    except tinker.TinkerError as error:
        raise ValueError(explain(error, engine.server) or str(error)) from error


def _check_free(place: Path, base: str, what: str, *, overwrite: bool) -> None:
    """Refuse to write where the base model is, or what was written before; `what` else could be given."""
    if Path(base).expanduser().resolve().is_relative_to(place.resolve()):
        raise ValueError(f"{place} would replace the base model, which is {base}; give another {what}")
    if place.exists() and not overwrite:
        raise ValueError(f"{place} exists; give another {what}, or overwrite=true to replace it")
