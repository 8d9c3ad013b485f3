"""Weights outside of the engine: adapters in PEFT's format, models in that of transformers or as a GGUF file.

A state on a server is saved for sampling, and the archive of that is read: two files are looked for in it, and no name
in it is used.
"""

import asyncio
import http.client
import json
import shutil
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import uuid4

import tinker

from viva.conversation.messages import unknown
from viva.engine.checkpoint import (
    MANIFEST,
    check_base_of,
    read_state,
    read_tensors,
    write_checkpoint,
    write_tensors,
)
from viva.engine.gguf import Metadata, is_gguf, metadata_of_file, metadata_of_model, write_gguf
from viva.engine.loading import load_errors
from viva.engine.lora import ALPHA, AdapterSettings
from viva.hub import hub_errors, pinned, split_revision
from viva.model_files import (
    BASE_FILE,
    check_base,
    model_digests,
    read_object,
    spell_rotary_twice,
    written_beside,
)
from viva.run.alarms import StopRule
from viva.run.checkpoints import Checkpoint
from viva.run.folder import RunFolder
from viva.run.secrets import without_secrets
from viva.sdk import ServiceClient, settled

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_MODEL_FILE = "model.safetensors"
_LIFETIME_S = 3600
"""Lifetime of weights saved for the download, where the server keeps to it."""
_ANSWER_S = 300.0


def export_weights(state_path: str, *, model: str, folder: Path) -> Path | None:
    """Write the weights of a state that the local engine saved into a run folder.

    The model is its base: a folder, or a name, with ``@REVISION`` if it has one.

    Returns:
        ``adapter/`` for LoRA (PEFT's format), ``model/`` for full fine-tuning (that of transformers), or ``None`` for a
        state that lies with a remote engine.

    Raises:
        ValueError: If the state is damaged, holds neither, or was saved on another base model.
    """
    if "://" in state_path:
        return None
    state, base_digests = Path(state_path), dict[str, str]()
    if (state / MANIFEST).is_file():  # engines of tests save without one
        saved = read_state(state_path)
        check_base_of(saved, model, model_digests(model))
        base_digests = saved.base_digests
    if is_adapter(state):
        with written_beside(folder / "adapter") as target:
            for name in (_CONFIG, _TENSORS):
                shutil.copyfile(state / name, target / name)
            if base_digests:
                (target / BASE_FILE).write_text(json.dumps(base_digests, indent=2) + "\n", encoding="utf-8")
        return folder / "adapter"
    if not (state / _MODEL_FILE).is_file():
        raise ValueError(f"{state} holds neither an adapter nor a model; it was changed since it was saved")
    config, tokenizer = description_of(model)
    config.dtype = "float32"  # all weights are trained in float32, whatever the type of the base
    with written_beside(folder / "model") as target:
        config.save_pretrained(target)
        spell_rotary_twice(target)
        tokenizer.save_pretrained(target)
        shutil.copyfile(state / _MODEL_FILE, target / _MODEL_FILE)
    return folder / "model"


def description_of(model: str) -> "tuple[PretrainedConfig, PreTrainedTokenizerBase]":
    """Configuration and tokenizer of a base model; `ValueError` if it cannot be had or read."""
    from transformers import AutoConfig, AutoTokenizer

    repository, revision = split_revision(model)
    with hub_errors(model, option="model_name"), load_errors(model):
        config = AutoConfig.from_pretrained(repository, revision=revision or "main", trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(
            repository, revision=revision or "main", trust_remote_code=False
        )
    return config, tokenizer


def merge_adapter_into_model(state_path: str, *, model: str, precision: str, folder: Path) -> Path:
    """Write a `merged_model` to ``model/``, in ``float32`` or ``bfloat16``, by `precision`."""
    merged, tokenizer = merged_model(state_path, model, precision)
    with written_beside(folder / "model") as target:
        merged.save_pretrained(target)
        spell_rotary_twice(target)
        tokenizer.save_pretrained(target)
    return folder / "model"


def merged_model(
    state_path: str, model: str, precision: str
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """A base model with the weights of a state, as the local engine decodes with it on the CPU, and its tokenizer.

    Where the base model's output layer shares its weights with the input embeddings and the adapter changes it, the two
    part.

    Raises:
        ValueError: If the state is damaged, or of another model.
    """
    from viva.engine.model import output_layer, read_base_model, resolve_device, resolve_precision
    from viva.engine.policy import stored_snapshot

    state = read_state(state_path)
    base = read_base_model(model, resolve_device("cpu"), resolve_precision(precision))
    check_base_of(state, base.name, base.digests)
    merged = stored_snapshot(base, state.settings, state.folder).merged()
    merged.config.tie_word_embeddings = output_layer(merged).weight is merged.get_input_embeddings().weight
    return merged, base.tokenizer


def ended_with(run: RunFolder, stop_rule: StopRule | None) -> Checkpoint | None:
    """The checkpoint whose weights are the run's result: the best one if the stop rule ended it, else the last.

    Raises:
        ValueError: If there is a stop rule, and the metrics that it goes by are damaged.
    """
    last = run.checkpoints.latest()
    if stop_rule is not None and last is not None:
        run.checkpoints.check_logs(last)
    is_stopped = stop_rule is not None and stop_rule.crossed(run.log.metrics()) is not None
    return (run.checkpoints.best() if is_stopped else None) or last


def choose_checkpoint(run: RunFolder, name: str | None, *, stop_rule: StopRule | None) -> Checkpoint:
    """A checkpoint of a run: ``last``, ``best`` or a name in ``checkpoints.jsonl``; else what it `ended_with`.

    Raises:
        ValueError: If there is no such checkpoint.
    """
    named = {checkpoint.name: checkpoint for checkpoint in run.checkpoints.all()}
    last, best = run.checkpoints.latest(), run.checkpoints.best()
    if last is None:
        raise ValueError(f"{run.path} has no checkpoint; give the log_path of a run that has saved one")
    if name == "best" and best is None:
        raise ValueError(
            f"{run.path} has no best checkpoint: its run had neither stop_at nor stop_on. Use checkpoint=last."
        )
    choices = {**named, "last": last, "best": best}
    chosen = ended_with(run, stop_rule) if name is None else choices.get(name)
    if chosen is None:
        allowed = ["last", *(["best"] if best else []), *named]
        raise ValueError(unknown("checkpoint", str(name), allowed))
    return chosen


async def fetch_adapter(
    service: ServiceClient, state_path: str, folder: Path, *, base_url: str | None
) -> Path:
    """Download the adapter of a state, ``tinker://...``, of hosted Tinker or a server; the folder gets its two files.

    Raises:
        ValueError: If the engine does not give its weights away; says what else there is to do.
        TinkerError: If the engine cannot be reached or knows no such state.
    """
    engine: Any = service
    find = getattr(engine.create_rest_client(), "get_checkpoint_archive_url_async", None)
    if find is None:  # newer SDKs know no archives
        return await asyncio.to_thread(_by_cookbook, state_path, folder, base_url)
    client = await settled(service.create_training_client_from_state(state_path))
    saved = await client.save_weights_for_sampler(f"export-{uuid4().hex[:12]}", ttl_seconds=_LIFETIME_S)
    run, _, name = str(saved.path).removeprefix("tinker://").partition("/")
    try:
        # SkyRL leaves the kind out of its paths and its names; Tinker's names have it
        answer = await find(run, name)
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
            shutil.copyfileobj(answer, file)
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
                    shutil.copyfileobj(content, target)
                found.add(name)
    if len(found) < 2:
        raise tarfile.ReadError(f"it holds no {' and '.join(sorted({_CONFIG, _TENSORS} - found))}")


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

_PLAIN: dict[str, tuple[object, ...]] = {
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
    """Copy an adapter into a new checkpoint of the engine's, to be sampled from or exported.

    Its model is at `base_model`, if that is not where the adapter says.

    Raises:
        ValueError: If it is of a form that the engine cannot merge, or its model is not known or another one.
    """
    remedy = "export or save the adapter anew"
    config = read_object(folder / _CONFIG, remedy)
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
    digests = read_object(folder / BASE_FILE, remedy) if (folder / BASE_FILE).is_file() else {}
    if digests:
        check_base(f"the adapter {folder}", digests, model, model_digests(model), was=_named(config) or model)
    description = {
        "base_model": model,
        "base_digests": digests,
        "adapter": asdict(AdapterSettings(rank=rank, seed=0)),
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


def _completed(config: dict[str, object], model: str, tensors: Path) -> dict[str, object]:
    """The adapter's description with its model, and with the layers it adapts, which SkyRL leaves out."""
    from safetensors import safe_open

    name, revision = split_revision(model)
    layers = config.get("target_modules")
    if not layers:
        with safe_open(tensors, framework="numpy") as file:
            layers = sorted({key.rpartition(".lora_")[0].rpartition(".")[2] for key in file.keys()})  # noqa: SIM118
    known = {"base_model_name_or_path": name, "revision": revision, "target_modules": layers}
    return config | known | {"task_type": config.get("task_type") or "CAUSAL_LM"}


def _named(config: Mapping[str, object]) -> str | None:
    """The base model as the adapter names it."""
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    return (
        pinned(str(name), str(revision) if revision and not Path(str(name)).is_dir() else None)
        if name
        else None
    )


def gguf_metadata(place: str, model: str, name: str) -> Metadata:
    """All but the weights of a GGUF file that programs show under a name.

    The base model is at `place` (of a GGUF file, everything is taken over); the engine loads it as `model`.

    Raises:
        ValueError: If llama.cpp would not compute the same, or would cut text into other tokens.
    """
    if is_gguf(place):
        return metadata_of_file(place, name)
    config, tokenizer = description_of(model)
    return metadata_of_model(config, tokenizer, name)


def export_gguf(state_path: str, *, model: str, precision: str, metadata: Metadata, file: Path) -> None:
    """Write the base model with a saved adapter merged into it, or a model of which all was trained.

    Adapters are merged in bfloat16 for that precision, as the engine does, and else in float32, which then is rounded.

    Raises:
        ValueError: If the state is damaged, or of another model, or has weights that are too large for float16.
    """
    merged, _ = merged_model(state_path, model, precision if precision == "bfloat16" else "float32")
    write_gguf(file, merged, metadata, precision)
