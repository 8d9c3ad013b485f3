"""Loading a causal language model, and structures that share its tensors.

The base weights are loaded once per service and never written to: training wraps a copy of the *structure* with
LoRA, sampling merges the LoRA into fresh tensors of another copy.
"""

import copy
import math
import os
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from viva.engine.attention import RAGGED_ATTENTION, RaggedCache, ragged_attention
from viva.engine.kernels import can_compile
from viva.engine.loading import check_layers, check_loaded, load_errors
from viva.engine.trees import TREE_ATTENTION, TreeStep, pack_tree, tree_attention
from viva.hub import hub_errors, split_revision
from viva.model_files import LOADING, check_model_folder, model_digests

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fast": torch.float32}
"""Types of the base weights."""

_PROBE_LONG, _PROBE_SHORT = 5, 2
_PROBE_TEXT = "How many apples are left when three friends share seven of them and then buy two more?"
_TREE_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers in which a token sees the tokens on its path in a tree and nothing else of the packed row."""
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Relative to the largest logit."""
_PROBE_ERRORS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError)
"""Errors that an architecture that calls or stores its attention in another way may raise from within."""


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """A loaded model. Its tensors are shared by everything made from it and must not be written to."""

    name: str
    """Path or hub name it was loaded from."""
    module: "PreTrainedModel"
    """The ``transformers`` causal language model, frozen and in eval mode."""
    tokenizer: "PreTrainedTokenizerBase"
    eos_ids: tuple[int, ...]
    """Tokens that end a text when a request names no stop sequence."""
    context_length: int
    vocab_size: int
    """Size of the output layer."""
    takes_trees: bool = False
    """Whether training may compute what sequences share once, as a prefix tree."""
    digests: dict[str, str] = field(default_factory=dict[str, str])
    """From `viva.model_files.model_digests`."""
    token_texts: dict[int, str] = field(default_factory=dict[int, str])
    """Text of single tokens, filled as stop strings are looked for."""

    def decode_copy(self, replace: Mapping[int, torch.Tensor] | None = None) -> "PreTrainedModel":
        """A copy of the structure that reads keys and values from a `RaggedCache`; tensors are shared or replaced."""
        module = structure_copy(self.module, replace)
        cast(Any, module.config)._attn_implementation = RAGGED_ATTENTION
        return module


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device to compute on; ``None`` means a GPU if there is one.

    Raises:
        ValueError: The device is not there, or of a kind that the engine does not compute on.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:  # no name of a device
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        raise ValueError(
            f"device must be cpu, cuda or cuda:N, or left out for a GPU if there is one; got {str(device)!r}"
        )
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r} was asked for, but torch finds no CUDA GPU. Use device='cpu'.")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={str(device)!r} is not there; torch finds {torch.cuda.device_count()} CUDA GPUs, numbered from 0"
        )
    return chosen


def resolve_precision(precision: str) -> torch.dtype:
    """The dtype of the base weights; `ValueError` for a name that is not supported."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} is not supported; choose from {sorted(PRECISIONS)}.")
    return PRECISIONS[precision]


def decode_precision(precision: str, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes in which a copy that samples computes, and in which it keeps its matrices.

    ``"fast"`` computes in bfloat16 where that is quick, else on a CPU in float32, with matrices in bfloat16.

    Raises:
        ValueError: With ``"fast"`` on a GPU without bfloat16, or on such a CPU without kernels.
    """
    dtype = resolve_precision(precision)
    if precision != "fast":
        return dtype, dtype
    if device.type == "cpu":
        find = getattr(torch.cpu, "get_capabilities", dict)  # older torch cannot tell
        is_quick = any(find().get(name) for name in ("avx512_bf16", "amx_bf16"))
        if not is_quick and can_compile(torch.empty(0)):
            return torch.float32, torch.bfloat16
    else:
        is_quick = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if not is_quick:
        raise ValueError(
            f"precision='fast' samples in bfloat16, for which torch {torch.__version__} finds no instructions on this "
            f"{device.type} device, and there are no kernels of the engine that do without. Use precision='float32'."
        )
    return torch.bfloat16, torch.bfloat16


def load_base_model(name: str, device: torch.device, dtype: torch.dtype) -> BaseModel:
    """Load a model and its tokenizer, and check that our decoding computes what the model computes.

    Raises:
        ValueError: As `read_base_model`, or the architecture is one the engine cannot decode.
    """
    base = read_base_model(name, device, dtype)
    _check_positions(base)
    _check_decoding(base, device)
    reason = _why_no_trees(base, device)
    if reason is not None:
        warnings.warn(
            f"Training of {type(base.module).__name__} ({name!r}) computes every datum by itself, also what several of "
            f"them share, which is slower: {reason}. Nothing has to be done, results are the same; which "
            "models share stands in docs/engine.md.",
            stacklevel=2,
        )
    return replace(base, takes_trees=reason is None)


def read_base_model(name: str, device: torch.device, dtype: torch.dtype) -> BaseModel:
    """Load a model and its tokenizer without computing anything with it.

    Its name is a folder, or ``NAME`` or ``NAME@REVISION`` on the hub. Code from the repository is never run.

    Raises:
        ValueError: The path is not a model, the hub does not give it, or its files do not fit one another.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if os.path.isdir(name):
        check_model_folder(Path(name))
    repository, revision = split_revision(name)
    with _no_progress_bar(), hub_errors(name, option="model_name"), load_errors(name):
        config = AutoConfig.from_pretrained(repository, revision=revision or "main", trust_remote_code=False)
    check_layers(name, config)
    with _no_progress_bar(), hub_errors(name, option="model_name"), load_errors(name):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            repository,
            revision=revision or "main",
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_loaded` refuses them, and says which
            **LOADING,
        )
        tokenizer = AutoTokenizer.from_pretrained(
            repository, revision=revision or "main", trust_remote_code=False
        )
    # it would warn of "indexing errors" once a prompt is too long, which the engine refuses by its own message
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    module, report = loaded
    check_loaded(name, report, tokenizer)
    has_softcap = getattr(module.config, "attn_logit_softcapping", None) is not None
    module.config._attn_implementation = "eager" if has_softcap else "sdpa"
    module = module.to(device).eval().requires_grad_(False)
    vocab_size = int(module.get_output_embeddings().weight.shape[0])
    register_attention()
    return BaseModel(
        name=name,
        module=module,
        tokenizer=tokenizer,
        eos_ids=_eos_ids(module, tokenizer, vocab_size),
        context_length=int(getattr(module.config, "max_position_embeddings", None) or 2**31),
        vocab_size=vocab_size,
        digests=model_digests(name, getattr(module.config, "_commit_hash", None)),
    )


def register_attention() -> None:
    """Make the engine's attention functions known to ``transformers`` by name. Harmless to repeat."""
    from transformers import AttentionInterface

    AttentionInterface.register(RAGGED_ATTENTION, ragged_attention)
    AttentionInterface.register(TREE_ATTENTION, tree_attention)


def structure_copy(
    module: "PreTrainedModel", replace: Mapping[int, torch.Tensor] | None = None
) -> "PreTrainedModel":
    """Copy modules and configuration but share every tensor, ties included.

    Tensors of `replace` take the place of those whose ``id`` they stand under.
    """
    shared: dict[int, object] = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}
    return copy.deepcopy(module, {**shared, **(replace or {})})


def cast_weights(module: "PreTrainedModel", dtype: torch.dtype) -> "PreTrainedModel":
    """A `structure_copy` with weights in another type, ties kept; the module itself if it has no others."""
    cast = {
        id(weight): nn.Parameter(weight.detach().to(dtype), requires_grad=False)
        for weight in module.parameters()
        if weight.dtype != dtype
    }
    return structure_copy(module, cast) if cast else module


def decoder_layers(module: "PreTrainedModel") -> nn.ModuleList:
    """The layers of a causal language model, whatever it calls them."""
    return next(child for child in module.get_decoder().children() if isinstance(child, nn.ModuleList))


def output_layer(module: "PreTrainedModel") -> nn.Linear:
    """The layer that gives logits, ``[V, H]``."""
    return cast(nn.Linear, module.get_output_embeddings())


def head_logits(module: "PreTrainedModel", hidden: torch.Tensor) -> torch.Tensor:
    """Logits in float32, ``[N, V]``, of ``[N, H]`` hidden states after the decoder's final norm."""
    logits = output_layer(module)(hidden).float()
    cap = getattr(module.config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


@contextmanager
def attention_by(module: "PreTrainedModel", name: str) -> Generator[None, None, None]:
    """Let a model attend through the function of this name for a while."""
    config: Any = module.config
    before, config._attn_implementation = config._attn_implementation, name
    try:
        yield
    finally:
        config._attn_implementation = before


@contextmanager
def _no_progress_bar() -> Generator[None, None, None]:
    """Hide the bar for reading weights into memory. Downloads keep theirs."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _eos_ids(module: nn.Module, tokenizer: "PreTrainedTokenizerBase", vocab_size: int) -> tuple[int, ...]:
    """End-of-text tokens of the generation config and the tokenizer, in ascending order.

    Those that the model has no logit for can end nothing and are left out.
    """
    found: set[int] = set()
    generation = getattr(module, "generation_config", None)
    for value in (getattr(generation, "eos_token_id", None), tokenizer.eos_token_id):
        if value is not None:
            found.update(cast(list[int], value) if isinstance(value, list | tuple) else [cast(int, value)])
    return tuple(sorted(token for token in found if 0 <= token < vocab_size))


def _check_positions(base: BaseModel) -> None:
    """Refuse rotary embeddings that change with the longest sequence of a batch: results would depend on it."""
    parameters = getattr(base.module.config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    kinds = {str(value.get("rope_type")) for value in [parameters, *nested]}
    unstable = sorted(kinds & {"dynamic", "longrope"})
    if unstable:
        raise ValueError(
            f"{base.name!r} has rotary embeddings of type {unstable[0]!r}, which depend on the longest sequence of a "
            "batch, so a sample would depend on what else is decoded. Such models are not supported."
        )


def _check_decoding(base: BaseModel, device: torch.device) -> None:
    """Compare decoding two rows of different lengths with the model's own forward pass.

    Unknown architectures (other attention variants, recurrent layers, scaled logits) show up here, not as wrong
    samples later.
    """
    kind = f"{type(base.module).__name__} ({base.name!r})"
    text = torch.tensor(_probe_tokens(base, _PROBE_LONG + 1), device=device)
    module = base.decode_copy()
    with torch.inference_mode():
        try:
            expected = base.module(input_ids=text[None], use_cache=False).logits[0]
            cache = RaggedCache(rows=2)
            cache.forward(module, text[None, :_PROBE_LONG].repeat(2, 1), past=[0, 0])
            last = text[[_PROBE_LONG, _PROBE_SHORT]][:, None]
            hidden = cache.forward(module, last, past=[_PROBE_LONG, _PROBE_SHORT])
        except _PROBE_ERRORS as error:
            raise ValueError(
                f"The engine cannot decode {kind}: {error}. Supported are decoder models whose layers are full or "
                "sliding-window attention, such as Llama, Qwen2/3, Mistral and Gemma."
            ) from error
        actual = head_logits(base.module, hidden[:, 0])
    error = deviation(actual, expected[[_PROBE_LONG, _PROBE_SHORT]], base.module.dtype)
    if error is not None and math.isnan(error):
        raise ValueError(
            f"{kind} computes logits that are no finite numbers: its weights are damaged, or too large for this "
            "precision. Fetch it anew, or use precision=float32."
        )
    if error is not None:
        raise ValueError(
            f"The engine's decoding of {kind} is off by {error:.3g} from the model's own logits, so this architecture "
            "is not supported. Supported are Llama, Qwen2/3, Mistral, Gemma and others that compute logits alike."
        )


def _probe_tokens(base: BaseModel, count: int) -> list[int]:
    """Tokens of plain words.

    The first ids of a vocabulary are control tokens, on which a trained model in bfloat16 is off by whole nats whoever
    computes it.
    """
    tokens: list[int] = base.tokenizer.encode(_PROBE_TEXT, add_special_tokens=False)
    known = [token for token in tokens if token < base.vocab_size] or [1]
    return [known[place % len(known)] for place in range(count)]


def _why_no_trees(base: BaseModel, device: torch.device) -> str | None:
    """Compare a small prefix tree with the model's own forward pass; the reason if training cannot use trees."""
    kinds = set(getattr(base.module.config, "layer_types", None) or ()) - _TREE_LAYERS
    if kinds:
        return f"it has layers of type {sorted(kinds)[0]!r}"
    text = np.array(_probe_tokens(base, 2 * _PROBE_LONG - 1))
    branch = np.concatenate([text[:_PROBE_LONG], text[:_PROBE_SHORT]])
    sequences = sorted([text, branch], key=lambda tokens: tokens.tolist())
    tree = pack_tree(sequences, call_entries=0)
    module = structure_copy(base.module)
    with torch.inference_mode():
        expected = [
            base.module(input_ids=torch.from_numpy(tokens)[None].to(device), use_cache=False).logits[0, -1]
            for tokens in sequences
        ]
        try:
            with attention_by(module, TREE_ATTENTION):
                hidden = TreeStep(tree, device).forward(module)[0]
        except _PROBE_ERRORS as error:
            return str(error)
        actual = head_logits(base.module, hidden[[int(path[-1]) for path in tree.paths]])
    error = deviation(actual, torch.stack(expected), base.module.dtype)
    return None if error is None else f"its logits in a prefix tree are off by {error:.3g}"


def deviation(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> float | None:
    """Largest difference of logits if it is more than rounding of a model's `dtype`, or not a number; else ``None``."""
    error = (actual - expected.float()).abs().max().item()
    is_rounding = error <= _PROBE_TOLERANCE[dtype] * expected.abs().max().item()
    return None if is_rounding else error
