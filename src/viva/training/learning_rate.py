"""The learning rate where the user gives none.

Models that tinker-cookbook knows get its ``hyperparam_utils.get_lr`` (only where that needs no network). For a model
in a local folder, the same shape of rule is applied to the folder's ``config.json``:
``5e-4 * (2000 / hidden_size) ** e`` for LoRA, a tenth of it for full fine-tuning, with ``e`` = 0.781 for the Llama
family and 0.0775 for all others, capped at `LARGEST_RATE`: a power law fitted to billions of parameters overshoots
for a model of a few million.
"""

import json
from pathlib import Path
from typing import Any, cast

from viva.hub import hub_access, hub_problem, split_revision

LARGEST_RATE = 1e-3
"""Upper bound of the rule for local models; policy gradients of small models are unstable above it."""

_BASE_RATE = 5e-4
_REFERENCE_WIDTH = 2000
_EXPONENTS = {"llama": 0.781}
_OTHER_EXPONENT = 0.0775
_FULL_SHARE = 0.1


def default_learning_rate(model_name: str, *, is_lora: bool = True, may_fetch: bool = False) -> float:
    """A sensible learning rate for a hub name or a local model folder.

    Args:
        model_name: Hub name, with ``@REVISION`` if it has one, or folder.
        is_lora: Whether an adapter is trained, or all weights.
        may_fetch: Whether the hub may be asked for the model's ``config.json``. Without it no network is used.

    Raises:
        ValueError: If nothing is known about the model, or the hub does not give its ``config.json``.
    """
    folder_config = Path(model_name).expanduser() / "config.json"
    if folder_config.is_file():
        return _local_rate(folder_config, is_lora)
    rate = _cookbook_rate(split_revision(model_name)[0], is_lora)
    if rate is not None:
        return rate
    found = cached_config(model_name) or (_fetched_config(model_name) if may_fetch else None)
    if found is not None:
        return _local_rate(found, is_lora)
    raise ValueError(f"no learning rate is known for {model_name}; pass learning_rate=..., for example 1e-4")


def read_model_config(path: Path) -> dict[str, Any]:
    """A model's ``config.json``.

    Raises:
        ValueError: If it is damaged.
    """
    try:
        config: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); fetch or save the model anew") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold an object; fetch or save the model anew")
    return cast(dict[str, Any], config)


def _local_rate(config_path: Path, is_lora: bool) -> float:
    config = read_model_config(config_path)
    nested: dict[str, Any] = config.get("text_config") or {}
    width = config.get("hidden_size") or nested.get("hidden_size")
    if not isinstance(width, int) or width < 1:
        raise ValueError(
            f"{config_path} has no hidden_size to derive a learning rate from; pass learning_rate=..."
        )
    exponent = _EXPONENTS.get(str(config.get("model_type", "")), _OTHER_EXPONENT)
    rate = min(_BASE_RATE * (_REFERENCE_WIDTH / width) ** exponent, LARGEST_RATE)
    return rate if is_lora else rate * _FULL_SHARE


def _cookbook_rate(model_name: str, is_lora: bool) -> float | None:
    from tinker_cookbook import hyperparam_utils
    from tinker_cookbook.exceptions import ConfigurationError

    try:
        # raises for models the cookbook has no sizes of; for those, get_lr would ask the network
        hyperparam_utils.get_lora_param_count(model_name)
        return hyperparam_utils.get_lr(model_name, is_lora=is_lora)
    except (ConfigurationError, NotImplementedError):
        return None


def cached_config(model_name: str) -> Path | None:
    """The ``config.json`` of a hub model that was loaded before; ``None`` if it was not. Uses no network."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    repository, revision = split_revision(model_name)
    try:
        found = try_to_load_from_cache(repository, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _fetched_config(model_name: str) -> Path | None:
    from huggingface_hub import hf_hub_download

    repository, revision = split_revision(model_name)
    try:
        with hub_access(repository):
            return Path(hf_hub_download(repository, "config.json", revision=revision))
    except (OSError, ValueError) as error:  # those of the hub are among them
        problem = hub_problem(error, name=model_name, option="model_name")
        if problem is None:  # nothing to read there, or no valid name
            return None
        raise ValueError(problem) from error
