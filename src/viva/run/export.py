"""Export of a run's weights: the trained adapter in PEFT format, and whole models in that of transformers."""

import difflib
import json
import shutil
from pathlib import Path
from typing import Any

from viva.hub import split_revision
from viva.model_files import BASE_FILE, model_digests, spell_rotary_twice
from viva.run.checkpoints import Checkpoint
from viva.run.files import written_beside
from viva.run.folder import RunFolder
from viva.run.log import StopRule

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_MODEL_FILE = "model.safetensors"


def export_weights(state_path: str, *, model: str, folder: Path) -> Path | None:
    """Write the weights of a saved state into a run folder.

    Args:
        state_path: A state saved by the local engine.
        model: Folder of the base model, or its name, with ``@REVISION`` if it has one.
        folder: The run folder.

    Returns:
        ``adapter/`` for LoRA (``peft.PeftModel.from_pretrained`` loads it), ``model/`` for full fine-tuning
        (``transformers`` loads it), or ``None`` for a state that lies with a remote engine.

    Raises:
        ValueError: If the state is damaged, holds neither, or was saved on another base model.
    """
    if "://" in state_path:
        return None
    from viva.engine.checkpoint import MANIFEST, check_base_of, read_state

    state, base_digests = Path(state_path), dict[str, str]()
    if (state / MANIFEST).is_file():  # engines of tests save without one
        saved = read_state(state_path)
        check_base_of(saved, model, model_digests(model))
        base_digests = saved.base_digests
    if all((state / name).is_file() for name in _ADAPTER_FILES):
        with written_beside(folder / "adapter") as target:
            for name in _ADAPTER_FILES:
                shutil.copyfile(state / name, target / name)
            if base_digests:
                (target / BASE_FILE).write_text(json.dumps(base_digests, indent=2) + "\n", encoding="utf-8")
        return folder / "adapter"
    if not (state / _MODEL_FILE).is_file():
        raise ValueError(f"{state} holds neither an adapter nor a model; it was changed since it was saved")
    from transformers import AutoConfig, AutoTokenizer

    repository, revision = split_revision(model)
    config: Any = AutoConfig.from_pretrained(repository, revision=revision or "main", trust_remote_code=False)
    config.dtype = "float32"  # all weights are trained in float32, whatever the type of the base
    tokenizer: Any = AutoTokenizer.from_pretrained(
        repository, revision=revision or "main", trust_remote_code=False
    )
    with written_beside(folder / "model") as target:
        config.save_pretrained(target)
        spell_rotary_twice(target)
        tokenizer.save_pretrained(target)
        shutil.copyfile(state / _MODEL_FILE, target / _MODEL_FILE)
    return folder / "model"


def merge_adapter_into_model(state_path: str, *, model: str, precision: str, folder: Path) -> Path:
    """Write the base model with a saved adapter merged into it: the weights that the local engine decodes with.

    Where the base model's output layer shares its weights with the input embeddings and the adapter changes it, the two
    part: the model that is written has an output layer of its own.

    Args:
        state_path: A state with an adapter, saved by the local engine.
        model: Name or folder of the base model.
        precision: Type of the written weights, ``float32`` or ``bfloat16``.
        folder: The model goes to its ``model/``.

    Raises:
        ValueError: If the state is damaged, or of another model.
    """
    from viva.engine.checkpoint import check_base_of, read_state
    from viva.engine.model import load_base_model, resolve_device, resolve_precision
    from viva.engine.policy import stored_builder

    state = read_state(state_path)
    base = load_base_model(model, resolve_device("cpu"), resolve_precision(precision))
    check_base_of(state, base.name, base.digests)
    merged: Any = stored_builder(base, state.settings, state.folder)()
    merged.config.tie_word_embeddings = (
        merged.get_output_embeddings().weight is merged.get_input_embeddings().weight
    )
    with written_beside(folder / "model") as target:
        merged.save_pretrained(target)
        spell_rotary_twice(target)
        base.tokenizer.save_pretrained(target)
    return folder / "model"


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
    """A checkpoint of a run.

    Args:
        run: The run.
        name: ``last``, ``best`` or a name in ``checkpoints.jsonl``; ``None`` for what the run `ended_with`.
        stop_rule: The run's, if it has one.

    Raises:
        ValueError: If there is no such checkpoint.
    """
    named = {checkpoint.name: checkpoint for checkpoint in run.checkpoints.all()}
    last, best = run.checkpoints.latest(), run.checkpoints.best()
    if last is None:
        raise ValueError(f"{run.path} has no checkpoint; give the log_path of a run that has saved one")
    if name == "best" and best is None:
        raise ValueError(f"{run.path} has no best checkpoint: its run had no stop_at. Use checkpoint=last.")
    choices = {**named, "last": last, "best": best}
    chosen = ended_with(run, stop_rule) if name is None else choices.get(name)
    if chosen is None:
        allowed = ["last", "best", *named]
        close = difflib.get_close_matches(str(name), allowed, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown checkpoint {name!r}; allowed: {', '.join(allowed)}.{hint}")
    return chosen
