"""What a model's folder may not ask for: code, pickles, files elsewhere."""

import json
import os
from pathlib import Path
from typing import Any, cast

__all__ = ["LOADING", "check_model_folder"]

LOADING: dict[str, Any] = {
    "trust_remote_code": False,
    "use_safetensors": True,
    "attn_implementation": "eager",
}
"""Options with which weights are loaded: no code of the repository, no pickles, and no attention that the
configuration chooses (it may name one to be fetched). Which attention is used is decided afterwards."""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def check_model_folder(folder: Path) -> None:
    """Refuse a local folder that is no model, or that would have files read elsewhere.

    Links in it are followed: models are often spread over disks that way.

    Raises:
        ValueError: It has no configuration, its weights are pickles, it is an adapter, or takes weights from elsewhere.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{str(folder)!r} is a folder without config.json. Give the folder that save_pretrained wrote."
        )
    if (folder / "adapter_config.json").exists():
        # transformers would load the model that the adapter names, wherever that is
        raise ValueError(
            f"{str(folder)!r} holds adapter_config.json besides a model. Give a folder that has the model alone: the "
            "adapter's base model, or the merged one."
        )
    weights = [path for path in folder.iterdir() if path.name.endswith(".safetensors")]
    if not weights and any(path for pattern in _PICKLES for path in folder.glob(pattern)):
        raise ValueError(
            f"{str(folder)!r} has its weights as pickles, which can run code and are not read. Load it where you trust "
            "it, and save it again with transformers' save_pretrained: that writes safetensors."
        )
    for path in folder.glob("*.index.json"):
        shards = _read(path).get("weight_map")
        if not isinstance(shards, dict):
            raise ValueError(f"{str(path)!r} has no weight_map; fetch or save the model anew")
        for shard in cast(dict[str, object], shards).values():
            _check_plain(path, shard)
    weights = _read(folder / "config.json").get("transformers_weights")
    if weights is not None:
        _check_plain(folder / "config.json", weights)
    settings = folder / "tokenizer_config.json"
    for key, value in (_read(settings) if settings.is_file() else {}).items():
        # names of files at their author's place are common there; what does not exist here is not read
        if (
            key.endswith("_file")
            and isinstance(value, str)
            and "\0" not in value
            and (folder / value).is_file()
        ):
            _check_plain(settings, value)


def _read(file: Path) -> dict[str, Any]:
    try:
        content: object = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(file)!r} is damaged ({error}); fetch or save the model anew") from error
    if not isinstance(content, dict):
        raise ValueError(f"{str(file)!r} is damaged (it must hold an object); fetch or save the model anew")
    return cast(dict[str, Any], content)


def _check_plain(file: Path, name: object) -> None:
    """Refuse anything but the name of a file beside the one that names it."""
    if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name or os.path.basename(name) != name:
        raise ValueError(
            f"{str(file)!r} would have {name!r} read; it may name files beside it only. Fetch or save the model anew."
        )
