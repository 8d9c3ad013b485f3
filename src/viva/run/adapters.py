"""Adapters in PEFT's format: fetched from a remote engine, and made readable for the local one.

Servers give away what was saved for sampling, as an archive. So a state is opened, saved for sampling under a name of
its own, and its archive is read. No name in an archive is used: two files are looked for, and all else is passed over.
"""

import asyncio
import http.client
import json
import tarfile
import tempfile
import urllib.request
import zlib
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlsplit
from uuid import uuid4

import tinker

from viva.engine.checkpoint import read_tensors, write_checkpoint, write_tensors
from viva.engine.lora import ALPHA, AdapterSettings
from viva.hub import pinned, split_revision
from viva.model_files import BASE_FILE, check_base, model_digests
from viva.run.clients import ServiceClient, settled
from viva.run.secrets import without_secrets

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_LIFETIME_S = 3600
"""Lifetime of weights saved for the download, where the server keeps to it."""
_ANSWER_S = 300.0
_BLOCK = 1 << 20


async def fetch_adapter(
    service: ServiceClient, state_path: str, folder: Path, *, base_url: str | None
) -> Path:
    """Download the adapter of a saved state.

    Args:
        service: Of the engine that has it.
        state_path: ``tinker://...``, from ``save_state``.
        folder: Gets the adapter's two files.
        base_url: Where the engine is; ``None`` for hosted Tinker.

    Returns:
        The folder.

    Raises:
        ValueError: If the engine does not give its weights away; says what else there is to do.
        TinkerError: If the engine cannot be reached or knows no such state.
    """
    engine: Any = service
    find = getattr(engine.create_rest_client(), "get_checkpoint_archive_url_async", None)
    if find is None:  # newer SDKs know no archives
        return await asyncio.to_thread(_by_cookbook, state_path, folder, base_url)
    client: Any = await settled(service.create_training_client_from_state(state_path))
    saved: Any = await client.save_weights_for_sampler(f"export-{uuid4().hex[:12]}", ttl_seconds=_LIFETIME_S)
    run, _, name = str(saved.path).removeprefix("tinker://").partition("/")
    try:
        # SkyRL leaves the kind out of its paths and its names; Tinker's names have it
        answer: Any = await find(run, name)
    except tinker.APIStatusError as error:
        raise ValueError(_no_archive(state_path, base_url, error)) from error
    url = str(answer.url)
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(
            f"the engine says that the archive is at {without_secrets(url)}, which is no web address"
        )
    try:
        await asyncio.to_thread(_read_archive, url, folder)
    except (OSError, http.client.HTTPException, EOFError, zlib.error, tarfile.TarError) as error:
        message = f"the archive of {state_path} could not be read: {error}. Export again."
        raise ValueError(without_secrets(message)) from error
    return folder


def _read_archive(url: str, folder: Path) -> None:
    """Take the adapter's two files out of an archive, whatever else is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() as file:
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
            _copy(answer, file)
        file.seek(0)
        found: set[str] = set()
        with tarfile.open(fileobj=file) as archive:
            for member in archive:
                name = member.name.replace("\\", "/").rpartition("/")[2]
                if name not in (_CONFIG, _TENSORS) or not member.isreg():
                    continue
                if name in found:
                    raise tarfile.ReadError(f"it holds {name} twice")
                content = archive.extractfile(member)
                assert content is not None  # a regular file
                with (folder / name).open("xb") as target:
                    _copy(content, target)
                found.add(name)
    if len(found) < 2:
        raise tarfile.ReadError(f"it holds no {' and '.join(sorted({_CONFIG, _TENSORS} - found))}")


def _copy(source: IO[bytes], target: IO[bytes]) -> None:
    while block := source.read(_BLOCK):
        target.write(block)


def _by_cookbook(state_path: str, folder: Path, base_url: str | None) -> Path:
    from tinker_cookbook import weights
    from tinker_cookbook.exceptions import WeightsDownloadError

    try:
        weights.download(tinker_path=state_path, output_dir=str(folder), base_url=base_url)
    except WeightsDownloadError as error:
        raise ValueError(_no_archive(state_path, base_url, error)) from error
    missing = [name for name in (_CONFIG, _TENSORS) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"what was downloaded of {state_path} holds no {' and '.join(missing)}")
    return folder


def _no_archive(state_path: str, base_url: str | None, error: Exception) -> str:
    where = (
        "see your runs on its web page"
        if base_url is None
        else "copy them from where it keeps its checkpoints (a SkyRL server: --checkpoints-base), or try the SDK that "
        "it was made for"
    )
    return without_secrets(f"the engine does not give the weights of {state_path} away ({error}); {where}.")


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
        ValueError: If it is of a form that the engine cannot merge, or its model is not known or another one.
    """
    config = _object(folder / _CONFIG)
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
    # an adapter of Viva has the digests of its base model with it
    digests = _object(folder / BASE_FILE) if (folder / BASE_FILE).is_file() else {}
    if digests:
        check_base(f"the adapter {folder}", digests, model, model_digests(model), was=_named(config) or model)
    description = {
        "base_model": model,
        "base_digests": digests,
        "adapter": AdapterSettings(rank=rank, seed=0).to_json(),
        "alpha": ALPHA,
        "num_steps": 0,
        "user_metadata": {},
    }

    def write(to: Path) -> None:
        # in float32, as the engine saves them; a server may keep another type
        write_tensors(
            to / _TENSORS, {name: each.float() for name, each in read_tensors(folder / _TENSORS).items()}
        )
        (to / _CONFIG).write_text(json.dumps(_completed(config, model, to / _TENSORS), indent=2))

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


def _object(path: Path) -> dict[str, Any]:
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; export or save the adapter anew") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold an object; export or save the adapter anew")
    return cast("dict[str, Any]", found)
