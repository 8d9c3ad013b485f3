"""Adapters in PEFT's format, as runs export them, made readable for the engine."""

import json
from pathlib import Path
from typing import Any, cast

from viva.engine.checkpoint import read_tensors, write_checkpoint, write_tensors
from viva.engine.lora import ALPHA, AdapterSettings
from viva.hub import pinned, split_revision
from viva.model_files import BASE_FILE

__all__ = ["is_adapter", "staged_adapter"]

_CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"
_MERGE = (
    "merge it into its model (peft: merge_and_unload, save_pretrained) and give the merged folder instead"
)

_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "lora_alpha": (ALPHA,),
    "bias": ("none", None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "fan_in_fan_out": (False, None),
}
"""Settings of adapters that the engine can merge."""


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter in PEFT's format."""
    return (folder / _CONFIG).is_file() and (folder / _TENSORS).is_file()


def staged_adapter(folder: Path, target: Path, base_model: str | None = None) -> Path:
    """Copy an adapter into a checkpoint of the engine's, to be sampled from or exported.

    Args:
        folder: The adapter.
        target: The checkpoint to write.
        base_model: Its model, if that is not where the adapter says.

    Raises:
        ValueError: If it is of a form that the engine cannot merge, or its model is not known.
    """
    config = _config(folder)
    for name, allowed in _PLAIN.items():
        if config.get(name) not in allowed:
            raise ValueError(
                f"the adapter {folder} has {name}={config.get(name)!r}; the engine reads {allowed[0]!r} only: {_MERGE}"
            )
    model = base_model or _named(config)
    if not model:
        raise ValueError(f"the adapter {folder} does not name its base model; give model_name=...")
    rank: object = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"the adapter {folder} needs its rank as r in {_CONFIG}, 1 or more; got r={rank!r}")
    settings = AdapterSettings(rank=rank, seed=0)
    description = {
        "base_model": str(model),
        "base_digests": _base_digests(folder),
        "adapter": settings.to_json(),
        "alpha": ALPHA,
        "num_steps": 0,
        "user_metadata": {},
    }

    def write(to: Path) -> None:
        # in float32, as the engine saves them; a server may keep another type
        write_tensors(
            to / _TENSORS, {name: each.float() for name, each in read_tensors(folder / _TENSORS).items()}
        )
        (to / _CONFIG).write_text(json.dumps(_completed(config, str(model), to / _TENSORS), indent=2))

    write_checkpoint(target, description, write, overwrite=False)
    return target


def _completed(config: dict[str, Any], model: str, tensors: Path) -> dict[str, Any]:
    """The adapter's description with its model, and with the layers it adapts, which SkyRL leaves out."""
    from safetensors import safe_open

    name, revision = split_revision(model)
    layers = config.get("target_modules")
    if not layers:
        with safe_open(tensors, framework="numpy") as file:
            layers = sorted({key.rpartition(".lora_")[0].rpartition(".")[2] for key in file.keys()})  # noqa: SIM118
    known = {"base_model_name_or_path": name, "revision": revision, "target_modules": layers}
    return config | known | {"task_type": config.get("task_type") or "CAUSAL_LM"}


def _named(config: dict[str, Any]) -> str | None:
    """The base model as the adapter names it."""
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    return (
        pinned(str(name), str(revision) if revision and not Path(str(name)).is_dir() else None)
        if name
        else None
    )


def _base_digests(folder: Path) -> dict[str, str]:
    """Digests of the base model, which an adapter of Viva has with it."""
    return _object(folder / BASE_FILE) if (folder / BASE_FILE).is_file() else {}


def _config(folder: Path) -> dict[str, Any]:
    return _object(folder / _CONFIG)


def _object(path: Path) -> dict[str, Any]:
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; export or save the adapter anew") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold an object; export or save the adapter anew")
    return cast("dict[str, Any]", found)
