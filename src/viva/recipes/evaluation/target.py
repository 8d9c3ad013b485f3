"""The policy behind ``RUN_OR_MODEL``: a run's checkpoint, a model, an adapter, or weights on a remote engine."""

import hashlib
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tinker_cookbook.renderers.base import Renderer

from viva.engine.checkpoint import MANIFEST
from viva.judging.judge import SamplingClient
from viva.model_files import check_base, model_digests
from viva.recipes.common import has_run, located, renderer_of, resolve_model
from viva.run.alarms import StopRule
from viva.run.export import choose_checkpoint, is_adapter, staged_adapter
from viva.run.folder import RunFolder
from viva.sdk import ServiceClient, settled
from viva.training.service import EngineConfig, context_window
from viva.view.files import read_config

BASE = "base"
"""The checkpoint of a run before its first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A policy that can be evaluated."""

    name: str
    """As it was given."""
    kind: str
    """``run``, ``model``, ``adapter`` or ``weights``."""
    model: str | None
    """The model that the engine loads; ``None``: the weights name it themselves."""
    weights: str | None = None
    """Saved weights, as the engine takes them; ``None``: the model as it is."""
    checkpoint: str | None = None
    """Name, of a run."""
    next_step: int | None = None
    """Steps that the checkpoint was trained for."""
    folder: Path | None = None
    """The run's folder."""
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    """The run's options."""

    @property
    def summary(self) -> dict[str, object]:
        """Its entry in the result file."""
        names = ("name", "kind", "model", "checkpoint", "next_step")
        return {name: getattr(self, name) for name in names}

    @property
    def digest(self) -> str | None:
        """Digest that tells saved weights from others; ``None`` for a model, which its name tells."""
        if self.weights is None or "://" in self.weights:
            return self.weights
        files = [Path(self.weights) / name for name in (MANIFEST, "adapter_model.safetensors")]
        found = next((file for file in files if file.is_file()), None)
        return None if found is None else hashlib.sha256(found.read_bytes()).hexdigest()

    def check_readable(self, engine: EngineConfig, what: str) -> None:
        """Refuse weights that lie where an engine cannot read them; ``what`` has them, for the message."""
        is_here = self.weights is not None and "://" not in self.weights
        if self.weights is not None and is_here != (engine.engine == "local"):
            place = "on this machine" if is_here else "with a remote engine"
            other = "local" if is_here else "remote"
            raise ValueError(
                f"{what} has its weights {place}, and engine={engine.engine} cannot read them; give engine={other}, or "
                "a model that this engine can load"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPolicy:
    """A policy on an engine."""

    client: SamplingClient
    service: ServiceClient
    engine: EngineConfig
    model: str
    renderer: Renderer
    context_window: int | None


def find_target(name: str, *, checkpoint: str | None = None, model_name: str | None = None) -> Target:
    """The target of a name: a run folder, else saved or exported weights, else a model.

    `model_name` is the base model of weights that do not name it, or where it is now.

    Raises:
        ValueError: If there is no such thing, or no such checkpoint.
    """
    path = Path(name).expanduser()
    if "://" not in name and (has_run(path) or "recipe" in read_config(path)):
        return _find_checkpoint(name, path, checkpoint, model_name)
    if checkpoint is not None:
        raise ValueError(f"checkpoint={checkpoint} needs the folder of a run; {name} is none")
    model = None if model_name is None else resolve_model(model_name)
    if "://" in name or (path / MANIFEST).is_file():
        return Target(name=name, kind="weights", model=model, weights=name if "://" in name else str(path))
    if is_adapter(path):
        return Target(name=name, kind="adapter", model=model, weights=str(path))
    return Target(name=name, kind="model", model=resolve_model(name))


def _find_checkpoint(name: str, folder: Path, wanted: str | None, model_name: str | None) -> Target:
    config = located(read_config(folder), folder)
    model = model_name or config.get("model_name")
    revision = None if model_name else config.get("model_revision")
    target = Target(
        name=name,
        kind="run",
        model=None if model is None else resolve_model(str(model), revision),
        folder=folder,
        config=config,
    )
    if wanted == BASE:
        if model is None:
            raise ValueError(
                f"{folder} does not say which model it trained; checkpoint=base needs its config.json"
            )
        return replace(target, checkpoint=BASE, next_step=0)
    run = RunFolder(folder)
    if wanted is not None and wanted.isdecimal():
        wanted = wanted.zfill(6)
    found = choose_checkpoint(run, wanted, stop_rule=StopRule.of(config))
    return replace(
        target, weights=run.checkpoints.resolve(found), checkpoint=found.name, next_step=found.next_step
    )


def untrained(target: Target) -> Target:
    """The policy before training: a run's or adapter's model as it is; of any other target, itself.

    Raises:
        ValueError: If weights do not name the model that they belong to.
    """
    if target.weights is None:
        return target
    if target.model is None:
        raise ValueError(f"{target.name} does not say which model it was trained from; give model_name=...")
    kind = "run" if target.kind == "run" else "model"
    return replace(target, kind=kind, weights=None, checkpoint=BASE, next_step=0)


async def open_policy(
    target: Target, engine: EngineConfig, *, renderer_name: str | None, service: ServiceClient
) -> OpenPolicy:
    """Load a policy for sampling from the service client of an engine.

    Raises:
        ValueError: If the weights cannot be read or do not fit the model.
    """
    client = await _client(target, engine, service)
    model = target.model or str(await client.get_base_model_async())
    return OpenPolicy(
        client=client,
        service=service,
        engine=engine,
        model=model,
        renderer=renderer_of(client, model, renderer_name),
        context_window=context_window(model) if engine.engine == "local" else None,
    )


async def _client(target: Target, engine: EngineConfig, service: ServiceClient) -> Any:
    if target.weights is None:
        if engine.engine == "local" and target.model is not None:
            recorded = target.config.get("base_digests") or {}
            was = str(target.config.get("model_name"))
            check_base(f"the run {target.name}", recorded, target.model, model_digests(target.model), was=was)
        return await settled(service.create_sampling_client(base_model=target.model))
    if target.kind == "adapter":
        if engine.engine == "remote":
            raise ValueError(f"the adapter {target.name} is a local folder; engine=remote cannot read it")
        with tempfile.TemporaryDirectory(prefix="viva-eval-") as folder:
            staged = staged_adapter(Path(target.weights), Path(folder) / "adapter", target.model)
            return await settled(service.create_sampling_client(model_path=str(staged)))
    if "://" in target.weights and "sampler_weights" not in target.weights:
        # remote engines sample from weights saved for that only; a saved state has to be loaded first
        training = await settled(service.create_training_client_from_state_with_optimizer(target.weights))
        return await settled(training.save_weights_and_get_sampling_client())
    if engine.engine == "remote":
        return await settled(service.create_sampling_client(model_path=target.weights))
    return await settled(service.create_sampling_client(model_path=target.weights, base_model=target.model))
