"""What malicious files are made of, and what loads them."""

import io
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from watched import MARK

from viva.conversation.rendering import load_renderer
from viva.engine import LocalServiceClient
from viva.engine.checkpoint import MANIFEST
from viva.model_files import sealed
from viva.recipes.config import DataOptions
from viva.recipes.hub_data import load_hub
from viva.run.export import staged_adapter

CODE = f"open({MARK!r}, 'w').close()"
SHELL = f"touch {MARK}"


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Path], object]
    """Writes into an empty folder."""
    load: Callable[[Path], object]


class _Reduced:
    def __init__(self, function, *args):
        self.reduced = function, args

    def __reduce__(self):
        return self.reduced


def payloads():
    """Pickles that run code in different ways and protocols."""
    import os
    import subprocess

    yield "system", pickle.dumps(_Reduced(os.system, SHELL), 0)
    yield "exec", pickle.dumps(_Reduced(exec, CODE), 2)
    yield "popen", pickle.dumps(_Reduced(subprocess.Popen, SHELL.split()), 4)
    yield "nested", pickle.dumps({"state": [_Reduced(eval, f"exec({CODE!r})")]}, 5)
    buffer = io.BytesIO()
    torch.save({"weight": _Reduced(os.system, SHELL)}, buffer)
    yield "torch", buffer.getvalue()
    buffer = io.BytesIO()
    np.save(buffer, np.array([_Reduced(os.system, SHELL)], dtype=object), allow_pickle=True)
    yield "numpy", buffer.getvalue()


def load_model(folder: Path) -> None:
    """As a run loads it: the base, and a sample of it."""
    service = LocalServiceClient()
    client = service.create_lora_training_client(str(folder), rank=1, seed=0)
    load_renderer(client.get_tokenizer(), model_name=str(folder), renderer_name="chat_template")


def load_state(folder: Path) -> None:
    LocalServiceClient().create_training_client_from_state_with_optimizer(str(folder))


def load_adapter(folder: Path) -> None:
    staged = staged_adapter(folder, folder.parent / f"{folder.name}-staged")
    LocalServiceClient().create_sampling_client(model_path=str(staged))


def load_data(path: Path) -> None:
    load_hub(DataOptions(hf_dataset_name=str(path), hf_prompt_column="prompt"))


def load_only(path: Path) -> None:
    """A data set that is a single file in a folder."""
    (file,) = path.iterdir()
    load_data(file)


def copied(source: Path, change: Callable[[Path], object]) -> Callable[[Path], object]:
    def make(folder):
        shutil.copytree(source, folder, dirs_exist_ok=True)
        change(folder)

    return make


def edited(name: str, **change) -> Callable[[Path], object]:
    def edit(folder):
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | change))

    return edit


def resealed(folder: Path) -> None:
    """A manifest as somebody who knows the format would write it."""
    import hashlib

    content = json.loads((folder / MANIFEST).read_text())
    listed = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in content["files"]}
    (folder / MANIFEST).write_text(json.dumps(sealed(content | {"files": listed})))


def save_adapter(folder: Path, base: Path, tensors: Path) -> None:
    """An adapter of a run, as ``peft`` writes it."""
    folder.mkdir()
    shutil.copyfile(tensors / "adapter_config.json", folder / "adapter_config.json")
    save_file(load_file(tensors / "adapter_model.safetensors"), folder / "adapter_model.safetensors")
    edited("adapter_config.json", base_model_name_or_path=str(base))(folder)
