"""Errors of reading a model with their remedies; nothing is filled in that a model lacks."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_ADVICE = "Fetch it anew, or save it anew with save_pretrained."
_LONGEST = 300
_SHOWN = 3


@contextmanager
def load_errors(name: str) -> Generator[None, None, None]:
    """Turn errors of reading a model or its tokenizer into a `ValueError` that names the model, by path or hub name.

    Raises:
        ValueError: A file is missing or damaged, or does not fit the others.
    """
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        yield
    except torch.OutOfMemoryError:
        raise  # of the machine, not of the model
    # what transformers lets through where a file holds something else than it expects
    except (
        *(OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, ArithmeticError),
        *(RuntimeError, StrictDataclassError, SafetensorError),
    ) as error:
        if (
            isinstance(error, OSError)
            and error.errno is not None
            and not isinstance(error, FileNotFoundError)
        ):
            raise  # of the disk, not of the model
        raise ValueError(f"the model {name!r} cannot be loaded: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    if "trust_remote_code" in text:
        return "it needs code from its own repository, which is never run. Use a model that transformers has."
    if text.startswith("Validation error"):  # the cause stands in its second line
        text = " ".join(text.split())
    text = text.partition("\n")[0][:_LONGEST].rstrip(".")
    if not isinstance(error, OSError | ValueError):
        text = f"{type(error).__name__}: {text}"
    return f"{text}. {_ADVICE}"


def check_layers(name: str, config: "PretrainedConfig") -> None:
    """Refuse a model whose layers carry a state from token to token, by a `ValueError`, before weights are fetched."""
    kinds: list[str] = getattr(config.get_text_config(), "layer_types", None) or []
    recurrent = sorted({kind for kind in kinds if not kind.endswith("attention") or "linear" in kind})
    if recurrent:
        raise ValueError(
            f"the model {name!r} ({config.model_type}) has layers of the kind {recurrent[0]!r}, which the local engine "
            "neither decodes nor trains. Supported are models whose layers are full or sliding-window attention, such "
            "as Llama, Mistral, Gemma, Qwen2 and Qwen3 (for example Qwen/Qwen3-4B-Instruct-2507), not Qwen3-Next or "
            "Qwen3.5 and later. Choose another model, or a server that runs this one (engine=remote)."
        )


def check_loaded(name: str, report: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase") -> None:
    """Refuse a model that would be completed with random weights, and a tokenizer that reads nothing.

    Raises:
        ValueError: Weights are missing or of other shapes, by ``from_pretrained``'s report, or the tokenizer is none.
    """
    missing = sorted(str(key) for key in report["missing_keys"])
    if missing:
        raise ValueError(
            f"the model {name!r} lacks {len(missing)} tensors that its config.json asks for: "
            f"{_some(missing)}. {_ADVICE}"
        )
    shapes = sorted(
        f"{key} has the shape {list(found)} and should have {list(wanted)}"
        for key, found, wanted in report["mismatched_keys"]
    )
    if shapes:
        raise ValueError(
            f"the model {name!r} has {len(shapes)} tensors of other shapes than its config.json asks for: "
            f"{_some(shapes)}. {_ADVICE}"
        )
    if not tokenizer.encode("A", add_special_tokens=False):
        raise ValueError(
            f"the model {name!r} has no tokenizer that reads text: 'A' is no token for it. Its folder needs "
            f"tokenizer.json. {_ADVICE}"
        )


def _some(texts: list[str]) -> str:
    return ", ".join(texts[:_SHOWN]) + (", ..." if len(texts) > _SHOWN else "")
