"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): which layers, which starting values, training, merging.

The layer computes ``W x + b + (alpha / rank) B A x`` with ``W`` and ``b`` frozen. ``alpha`` is 32 as in Tinker, so that
a learning rate keeps its meaning over ranks. ``A`` starts uniform in ``+-1/sqrt(inputs)``, from the adapter's own seed;
``B`` starts at zero. Forward and backward pass are written out: the adapter is added within the products, so that
nothing of the size of the layer's inputs or outputs is scaled, added or cast beside them, and only the inputs and ``r``
numbers per row are kept.

Shapes: ``n`` rows of ``I`` inputs, ``O`` outputs, rank ``r``.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from viva.engine.layers import replace_parts
from viva.engine.linear import product
from viva.engine.model import BaseModel, structure_copy
from viva.hub import split_revision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALPHA = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """The part of a model that is trained."""

    rank: int
    """0 trains all weights."""
    seed: int
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True

    @property
    def scale(self) -> float | None:
        """``alpha / rank``; ``None`` where all weights are trained."""
        return ALPHA / self.rank if self.rank else None

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"rank must be at least 1, or 0 to train all weights, not {self.rank}.")
        if not (self.train_mlp or self.train_attn or self.train_unembed):
            raise ValueError("At least one of train_mlp, train_attn and train_unembed must be True.")
        if self.rank == 0 and not (self.train_mlp and self.train_attn and self.train_unembed):
            raise ValueError(
                "rank=0 trains all weights; train_mlp, train_attn and train_unembed must stay True."
            )


def target_modules(module: nn.Module, settings: AdapterSettings) -> list[str]:
    """Full names of the linear layers to adapt, in the model's order.

    Raises:
        ValueError: There are none of a kind that is wanted.
    """
    kinds = _kinds(module)
    wanted = [flag for flag in ("train_attn", "train_mlp", "train_unembed") if getattr(settings, flag)]
    missing = [flag for flag in wanted if flag not in kinds.values()]
    if missing:
        raise ValueError(
            f"{type(module).__name__} has no linear layers for {', '.join(missing)} (experts kept in one tensor cannot "
            "be adapted). Train all weights: lora_rank=0 in a recipe, and rank 0 in a program that makes the training "
            "client itself, which can also turn these off."
        )
    return [name for name, kind in kinds.items() if kind in wanted]


def _kinds(module: nn.Module) -> dict[str, str]:
    """The flag that each linear layer belongs to, by the layer's full name."""
    output: nn.Module = module.get_output_embeddings()  # pyright: ignore[reportCallIssue, reportAssignmentType]
    kinds: dict[str, str] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            is_attention = "attn" in name or "attention" in name
            kinds[name] = (
                "train_unembed" if layer is output else "train_attn" if is_attention else "train_mlp"
            )
    return kinds


def _stacked_experts(module: nn.Module) -> list[str]:
    """Names of the tensors that hold the weights of all experts of a layer, ``[experts, outputs, inputs]``."""
    return [name for name, weight in module.named_parameters() if weight.ndim == 3 and "expert" in name]


def _warn_of_experts(base: BaseModel, settings: AdapterSettings) -> None:
    stacked = _stacked_experts(base.module)
    if stacked and settings.train_mlp:
        left = sum(base.module.get_parameter(name).numel() for name in stacked)
        share = left / sum(weight.numel() for weight in base.module.parameters())
        warnings.warn(
            f"The adapter reaches dense layers and shared experts of {base.name!r}; its routed experts "
            f"({share:.0%} of the weights, kept in one tensor per layer) have no adapter and stay as they are. "
            "Rank 0 (lora_rank=0 in a recipe) trains them, too.",
            stacklevel=2,
        )


def add_adapter(base: BaseModel, settings: AdapterSettings) -> "PreTrainedModel":
    """A copy of the model's structure with an adapter in float32. The base tensors stay shared and frozen."""
    module = structure_copy(base.module)
    names = target_modules(module, settings)
    _warn_of_experts(base, settings)
    for name in names:
        layer = cast(nn.Linear, module.get_submodule(name))
        module.set_submodule(name, AdaptedLinear(layer, settings.rank, ALPHA / settings.rank))
    generator = torch.Generator().manual_seed(settings.seed % 2**63)
    for name, parameter in adapter_tensors(module).items():
        # B stays zero
        if name.endswith(".lora_A"):
            bound = parameter.shape[1] ** -0.5
            with torch.no_grad():
                parameter.copy_((torch.rand(parameter.shape, generator=generator) * 2 - 1) * bound)
    return replace_parts(module)


def write_adapter_config(base: BaseModel, settings: AdapterSettings, folder: Path) -> None:
    """Write the adapter's description as ``peft`` does, with its sets in a fixed order."""
    import peft

    repository, revision = split_revision(base.name)
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=ALPHA,
        **_targets(base.module, settings),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=repository,
        revision=revision,
    )
    # peft holds some as sets, whose order depends on the process
    text = json.dumps(config.to_dict(), indent=2, sort_keys=True, default=sorted)
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")


def check_adapter(base: BaseModel, adapter: Mapping[str, torch.Tensor], rank: int, folder: Path) -> None:
    """Refuse an adapter of a folder that does not fit the model; see `merge_adapter`.

    Raises:
        ValueError: It names a layer that the model lacks, or has another rank or other shapes.
    """
    layers = cast(dict[str, nn.Linear], dict(base.module.named_modules()))
    advice = f"Give the model that it was trained on; this is {base.name!r}."
    for name in _adapted(adapter):
        if name not in layers or f"{name}.lora_B" not in adapter:
            raise ValueError(
                f"the adapter {str(folder)!r} changes {name}, which the model does not have. {advice}"
            )
        down, up = (adapter[f"{name}.{part}"].shape for part in ("lora_A", "lora_B"))
        shape = layers[name].weight.shape
        if (*down, *up) != (rank, shape[1], shape[0], rank):
            raise ValueError(
                f"the adapter {str(folder)!r} has tensors of the shapes {list(down)} and {list(up)} for {name} "
                f"of {list(shape)}, with the rank {rank} they must be {[rank, shape[1]]} and "
                f"{[shape[0], rank]}. {advice}"
            )


def merge_adapter(base: BaseModel, adapter: Mapping[str, torch.Tensor], scale: float) -> "PreTrainedModel":
    """A decode copy of the model with an adapter merged into fresh tensors; the model's own are not changed.

    The adapter is ``<layer>.lora_A`` and ``<layer>.lora_B`` by layer name, `scale` is ``alpha / rank``.
    """
    module = base.decode_copy()
    for name in _adapted(adapter):
        layer = cast(nn.Linear, module.get_submodule(name))
        weight = layer.weight.detach()
        down, up = adapter[f"{name}.lora_A"], adapter[f"{name}.lora_B"]
        merged = torch.addmm(weight.float(), up, down, alpha=scale)
        layer.weight = nn.Parameter(merged.to(weight.dtype), requires_grad=False)
    return module


def _adapted(adapter: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the layers that an adapter changes."""
    return [name.removesuffix(".lora_A") for name in adapter if name.endswith(".lora_A")]


def adapter_tensors(module: nn.Module) -> dict[str, nn.Parameter]:
    """The adapter's parameters as ``<layer>.lora_A`` and ``<layer>.lora_B``, in the model's order."""
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if name.endswith((".lora_A", ".lora_B"))
    }


def _targets(module: nn.Module, settings: AdapterSettings) -> dict[str, Any]:
    """The adapted layers as ``peft`` names them.

    In a model with stacked experts it takes any target that ends in the name of an expert's projection for the stack.
    Layers of that kind are given there by their weights, which it takes as they are.
    """
    names, kinds = target_modules(module, settings), _kinds(module)
    if not _stacked_experts(module):
        return {"target_modules": _short_names(module, names)}
    apart = [name for name in names if kinds[name] == "train_mlp"]
    others = [name for name in names if name not in apart]
    return {
        "target_modules": _short_names(module, others),
        "target_parameters": sorted(f"{name}.weight" for name in apart),
    }


def _short_names(module: nn.Module, names: list[str]) -> list[str]:
    """Last parts of the names if they select just these layers (as adapters usually say it), else the full names."""
    short = sorted({name.rpartition(".")[2] for name in names})
    selected = [name for name, _ in module.named_modules() if name.rpartition(".")[2] in short]
    return short if selected == names else names


class AdaptedLinear(nn.Linear):
    """A linear layer that shares its frozen tensors with another, and an adapter in float32 that starts at zero."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        # not nn.Linear's, which would make weights of its own
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = scale
        device = layer.weight.device
        self.lora_A = nn.Parameter(torch.zeros(rank, layer.in_features, device=device))
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, rank, device=device))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[..., I]`` inputs to ``[..., O]`` outputs, of the weight's type."""
        output = cast(
            torch.Tensor,
            _AdaptedProduct.apply(
                input.reshape(-1, self.in_features),
                self.weight,
                self.bias,
                self.lora_A,
                self.lora_B,
                self.scale,
            ),
        )
        return output.view(*input.shape[:-1], self.out_features)


class _AdaptedProduct(torch.autograd.Function):
    """``[n, I]`` to ``[n, O]``. The adapter is rounded to the weight's type, its gradient is float32."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        lora_a: torch.Tensor,
        lora_b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        down, up = lora_a.to(weight.dtype), lora_b.to(weight.dtype)
        low = product(inputs, down).mul_(scale)
        output = product(inputs, weight, bias).addmm_(low, up.T)
        ctx.save_for_backward(inputs, weight, down, up, low)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        inputs, weight, down, up, low = ctx.saved_tensors
        grad = grad_outputs[0]
        slope = product(grad, up.T).mul_(ctx.scale)
        grad_inputs = product(grad, weight.T).addmm_(slope, down) if ctx.needs_input_grad[0] else None
        return grad_inputs, None, None, (slope.T @ inputs).float(), (grad.T @ low).float(), None
