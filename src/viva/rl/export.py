"""What a run leaves for others: the trained adapter in PEFT format, or the whole model if all of it was trained."""

import shutil
from pathlib import Path

__all__ = ["export_weights"]

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_MODEL_FILE = "model.safetensors"


def export_weights(state_path: str, *, model: str, folder: Path) -> Path | None:
    """Write the weights of a saved state into a run folder.

    Args:
        state_path: A state saved by the local engine.
        model: Name or folder of the base model.
        folder: The run folder.

    Returns:
        ``adapter/`` for LoRA (``peft.PeftModel.from_pretrained`` loads it), ``model/`` for full fine-tuning
        (``transformers`` loads it), or ``None`` for a state that lies with a remote engine.

    Raises:
        ValueError: If the state holds neither.
    """
    if "://" in state_path:
        return None
    state = Path(state_path)
    if all((state / name).is_file() for name in _ADAPTER_FILES):
        target = _empty(folder / "adapter")
        for name in _ADAPTER_FILES:
            shutil.copyfile(state / name, target / name)
        return target
    if not (state / _MODEL_FILE).is_file():
        raise ValueError(f"{state} holds neither an adapter nor a model; it was changed since it was saved")
    from transformers import AutoConfig, AutoTokenizer

    target = _empty(folder / "model")
    AutoConfig.from_pretrained(model).save_pretrained(target)
    AutoTokenizer.from_pretrained(model).save_pretrained(target)
    shutil.copyfile(state / _MODEL_FILE, target / _MODEL_FILE)
    return target


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
