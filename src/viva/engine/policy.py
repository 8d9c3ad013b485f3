"""The weights being trained: losses, gradients, updates, snapshots, files.

Everything here runs at once in the caller's thread; the training client queues calls of it.

A layer keeps what its backward pass needs. If that would fill most of the memory, layers keep only their inputs and are
computed again in the backward pass (Chen et al. 2016, arXiv 1604.06174): a third slower, and the same to the bit.

Shapes: ``B`` rows padded to ``T`` tokens.
"""

import logging
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tinker
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from viva.engine.adam import AdamW
from viva.engine.checkpoint import read_tensors, write_tensors
from viva.engine.layers import confine_last_layer
from viva.engine.lora import (
    ALPHA,
    AdapterSettings,
    adapter_tensors,
    add_adapter,
    check_adapter,
    merge_adapter,
    write_adapter_config,
)
from viva.engine.losses import Loss, Targets, gather_targets
from viva.engine.model import BaseModel, attention_by, decoder_layers, structure_copy
from viva.engine.packing import CostModel, DatumArrays, MicroBatch, plan_batches
from viva.engine.scheduler import EngineLimits
from viva.engine.trees import TREE_ATTENTION, TreeStep
from viva.model_files import spell_rotary_twice

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTER_FILE = "adapter_model.safetensors"
_OPTIMIZER_FILE = "optimizer.safetensors"
_AVERAGE_FILE = "average.safetensors"
_WEIGHTS_FILE = "model.safetensors"

_FREE_SHARE = 0.6
"""Share of the free memory that layers may keep for the backward pass."""

_ENOUGH_BYTES = 2**31
"""Memory that layers keep in one micro-batch on a CPU; larger ones are no faster."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """The weights of one moment, which later steps do not change."""

    base: BaseModel
    weights: Mapping[str, torch.Tensor]
    """Weights of an adapter by name, or all of the model's."""
    scale: float | None
    """``alpha / rank`` of the adapter; ``None`` if these are all of the model's weights."""

    def merged(self) -> "PreTrainedModel":
        """A decode copy of the model with these weights."""
        if self.scale is not None:
            return merge_adapter(self.base, self.weights, self.scale)
        dtype = self.base.module.dtype
        originals = dict(self.base.module.named_parameters())
        copies = {
            id(originals[name]): nn.Parameter(weight.to(dtype), requires_grad=False)
            for name, weight in self.weights.items()
        }
        return self.base.decode_copy(copies)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossResult:
    """Logprobs and losses of a pass over examples."""

    logprobs: list[np.ndarray]
    """Logprobs of the targets, one array per example; NaN where they were not wanted."""
    losses: list[np.ndarray]
    """Losses of the targets, one array per example."""
    num_computed: int
    """Tokens that went through the model, padding included."""


class Policy:
    """A base model with trainable weights and their optimiser."""

    def __init__(self, base: BaseModel, settings: AdapterSettings, limits: EngineLimits) -> None:
        self.base = base
        self.settings = settings
        self._limits = limits
        if settings.rank:
            self._module = add_adapter(base, settings)
            self._parameters = adapter_tensors(self._module)
        else:
            # trained in float32 whatever the precision of the base, which stays as it is
            copies = {id(p): nn.Parameter(p.detach().float().clone()) for p in base.module.parameters()}
            self._module = structure_copy(base.module, copies)
            self._parameters = dict(self._module.named_parameters())
        self._is_confined = confine_last_layer(self._module)
        self._costs = CostModel.of(base.module)
        self._enough_tokens: int | None = None
        if base.module.device.type == "cpu":
            kept = activation_bytes(base.module.config, 1, 1, base.module.dtype.itemsize)
            self._enough_tokens = _ENOUGH_BYTES // kept
        self.optimizer = AdamW(self._parameters)
        self._average: dict[str, torch.Tensor] | None = None
        """An average of the weights over time, in float32, where one was begun."""
        self._failure: str | None = None
        self._has_warned = False

    def run(
        self, examples: Sequence[DatumArrays], loss: Loss, config: Mapping[str, float], *, backward: bool
    ) -> Generator[None, None, LossResult]:
        """Losses of examples and, with ``backward``, the gradient of their sum, added to what is accumulated.

        Yields after every micro-batch.

        Raises:
            FloatingPointError: A loss is not finite.
        """
        logprobs: list[np.ndarray] = [np.empty(0)] * len(examples)
        losses: list[np.ndarray] = [np.empty(0)] * len(examples)
        num_computed = 0
        with self.whole_gradient() if backward else nullcontext():
            for batch in plan_batches(
                examples,
                self._costs,
                self._limits.training_tokens,
                trees=self.base.takes_trees,
                enough_tokens=self._enough_tokens,
            ):
                targets = gather_targets(batch, examples, self.base.vocab_size)
                results = self._run_batch(batch, targets, loss, config, backward=backward)
                found = map(targets.split, results, (np.nan, 0.0))
                for index, *values in zip(batch.indices, *found, strict=True):
                    logprobs[index], losses[index] = values
                num_computed += batch.tokens.size if len(targets.read) else 0
                yield
        if backward:
            # data that push nothing have a gradient of zero: the step after them is one of momentum alone
            for parameter in self._parameters.values():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return LossResult(logprobs=logprobs, losses=losses, num_computed=num_computed)

    @contextmanager
    def whole_gradient(self) -> Generator[None, None, None]:
        """Count the computations within as a whole: if one fails, the gradient is dropped and the next `step` fails."""
        try:
            yield
        except (
            BaseException
        ) as error:  # also an interrupt between two micro-batches leaves a partial gradient
            self._failure = f"{type(error).__name__}: {error}"
            self._clear_gradients()
            raise

    def step(self, params: tinker.AdamParams) -> dict[str, float]:
        """Update the weights from the accumulated gradient and clear it.

        Raises:
            RuntimeError: There is no gradient, or computing a part of it failed.
            FloatingPointError: The gradient is not finite. The weights are unchanged, the gradient is cleared.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            self._clear_gradients()
            raise RuntimeError(
                f"The step was not taken: a forward_backward since the last step failed ({failure}), so the gradient "
                "is incomplete and was dropped. The weights are unchanged; training can go on."
            )
        if all(parameter.grad is None for parameter in self._parameters.values()):
            raise RuntimeError("optim_step was called without a gradient. Call forward_backward first.")
        try:
            return self.optimizer.step(params)
        finally:
            self._clear_gradients()

    def snapshot(self) -> Snapshot:
        """The present weights."""
        return Snapshot(base=self.base, weights=self._weights(), scale=self.settings.scale)

    def begin_average(self) -> None:
        """Begin an exponential moving average of the weights, at the present ones."""
        self._average = self._weights()

    def move_average(self, decay: float) -> None:
        """Move the average towards the present weights: ``average <- decay * average + (1 - decay) * weights``.

        Raises:
            ValueError: None was begun.
        """
        average = self._begun_average()
        for name, parameter in self._parameters.items():
            average[name].lerp_(parameter.detach(), 1 - decay)

    def average_snapshot(self) -> Snapshot:
        """The average as it is.

        Raises:
            ValueError: None was begun.
        """
        average = {name: tensor.clone() for name, tensor in self._begun_average().items()}
        return Snapshot(base=self.base, weights=average, scale=self.settings.scale)

    def _begun_average(self) -> dict[str, torch.Tensor]:
        if self._average is None:
            raise ValueError(
                "There is no average of these weights: none was begun, or the state that was loaded has none. Call "
                "begin_average first."
            )
        return self._average

    def description(self, user_metadata: Mapping[str, str]) -> dict[str, object]:
        """The description of a checkpoint, which `viva.engine.checkpoint.read_state` reads."""
        name = self.base.name
        return {
            "base_model": os.path.abspath(name) if os.path.isdir(name) else name,
            "base_digests": self.base.digests,
            "adapter": asdict(self.settings),
            "alpha": ALPHA,
            "num_steps": self.optimizer.num_steps,
            "user_metadata": dict(user_metadata),
        }

    def save(self, folder: Path, *, optimizer: bool) -> None:
        """Write the weights (an adapter in PEFT's format, or a whole model), the optimiser's state and the average.

        Raises:
            FloatingPointError: A weight is not finite; nothing is written.
        """
        for name, parameter in self._parameters.items():
            if not torch.isfinite(parameter).all():
                raise FloatingPointError(
                    f"The weights {name!r} are no longer finite numbers, so they were not saved. Go back to an earlier "
                    "checkpoint and lower the learning rate."
                )
        if not self.settings.rank:
            self._module.config.save_pretrained(folder)
            spell_rotary_twice(folder)
            self.base.tokenizer.save_pretrained(folder)
            write_tensors(folder / _WEIGHTS_FILE, self._weights())
        else:
            write_adapter_config(self.base, self.settings, folder)
            weights = {f"base_model.model.{name}.weight": w for name, w in self._weights().items()}
            write_tensors(folder / _ADAPTER_FILE, weights)
        if optimizer:
            write_tensors(folder / _OPTIMIZER_FILE, self.optimizer.moments)
            if self._average is not None:
                write_tensors(folder / _AVERAGE_FILE, self._average)

    def load(self, folder: Path, *, num_steps: int | None) -> None:
        """Take over weights that `save` wrote, dropping accumulated gradients.

        With `num_steps`, the steps that the stored optimiser had taken, its state is taken over, too, with the
        average; else it is fresh, and there is no average.

        Raises:
            ValueError: The weights are those of another model or adapter. Nothing was changed.
        """
        weights = _read_weights(folder, self.settings)
        expected = {name: parameter.shape for name, parameter in self._parameters.items()}
        found = {name: tensor.shape for name, tensor in weights.items()}
        if expected != found:
            differing = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
            raise ValueError(
                f"{str(folder)!r} holds weights of another model or adapter; for instance {differing[0]!r} has shape "
                f"{found.get(differing[0])} there and {expected.get(differing[0])} here."
            )
        optimizer, average = AdamW(self._parameters), None
        if num_steps is not None:
            if not (folder / _OPTIMIZER_FILE).is_file():
                raise ValueError(
                    f"{str(folder)!r} has no optimiser state; it was saved for sampling. Use save_state's."
                )
            optimizer.load(read_tensors(folder / _OPTIMIZER_FILE), num_steps)
            if (folder / _AVERAGE_FILE).is_file():
                stored = read_tensors(folder / _AVERAGE_FILE)
                average = {
                    name: stored[name].to(parameter.device) for name, parameter in self._parameters.items()
                }
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
        self.optimizer, self._average = optimizer, average
        self._failure = None
        self._clear_gradients()

    def _run_batch(
        self, batch: MicroBatch, targets: Targets, loss: Loss, config: Mapping[str, float], *, backward: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        if not len(targets.read):
            return np.empty(0, np.float32), np.empty(0, np.float32)
        backward = backward and bool(targets.active.any())
        with ExitStack() as contexts:
            contexts.enter_context(torch.set_grad_enabled(backward))
            if batch.tree is not None:
                contexts.enter_context(attention_by(self._module, TREE_ATTENTION))
            if backward and self._needs_recomputing(*batch.tokens.shape):
                contexts.enter_context(recomputed(decoder_layers(self._module)))
            hidden = self._hidden(batch, targets.read)
            return targets.evaluate(self._module, hidden, loss, config, self._limits.logits)

    def _needs_recomputing(self, num_rows: int, length: int) -> bool:
        """Whether what the layers would keep is too much for what is free. It changes no result."""
        free = free_bytes(self.base.module.device)
        kept = activation_bytes(self._module.config, num_rows, length, self._module.dtype.itemsize)
        if free is None or kept <= _FREE_SHARE * free:
            return False
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "Training %d tokens at once would keep about %.1f GB, %.1f GB are free: layers are computed again in "
                "the backward pass, which is slower. Fewer training_tokens need less memory.",
                num_rows * length,
                kept / 1e9,
                free / 1e9,
            )
        return True

    def _hidden(self, batch: MicroBatch, read: np.ndarray) -> torch.Tensor:
        """Hidden states after the final norm at ascending places of the flattened batch, ``[R, H]``."""
        device = self.base.module.device
        places = torch.from_numpy(read).to(device)
        given = {"read": places} if self._is_confined else {}
        if batch.tree is not None:
            hidden = TreeStep(batch.tree, device, read).forward(self._module, **given)
        else:
            tokens = torch.from_numpy(batch.tokens).to(device)
            hidden = self._module.get_decoder()(input_ids=tokens, use_cache=False, **given).last_hidden_state
        hidden = hidden.flatten(0, 1)
        return hidden if self._is_confined else hidden[places]

    def _weights(self) -> dict[str, torch.Tensor]:
        """Copies of the trained weights."""
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def _clear_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None


def _read_weights(folder: Path, settings: AdapterSettings) -> dict[str, torch.Tensor]:
    """Trained weights of a checkpoint, by the names `Policy` uses, on the CPU."""
    if not settings.rank:
        return read_tensors(folder / _WEIGHTS_FILE)
    stored = read_tensors(folder / _ADAPTER_FILE)
    # an adapter that a server has saved may be of another type
    return {
        name.removeprefix("base_model.model.").removesuffix(".weight"): tensor.float()
        for name, tensor in stored.items()
    }


def stored_snapshot(base: BaseModel, settings: AdapterSettings, folder: Path) -> Snapshot:
    """The weights of a checkpoint, which are read now."""
    device = base.module.device
    weights = {name: tensor.to(device) for name, tensor in _read_weights(folder, settings).items()}
    if settings.rank:
        check_adapter(base, weights, settings.rank, folder)
    return Snapshot(base=base, weights=weights, scale=settings.scale)


_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def activation_bytes(config: Any, num_rows: int, length: int, itemsize: int) -> int:
    """About what the layers of a model keep for the backward pass; rather too much than too little.

    The rows have `length` tokens, padding included, the numbers `itemsize` bytes.
    """
    heads = int(config.num_attention_heads)
    attended = heads * int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    wide = [getattr(config, name, None) for name in ("intermediate_size", "ffn_dim", "n_inner")]
    inner = next((int(size) for size in wide if size), 4 * int(config.hidden_size))
    inner *= int(getattr(config, "num_experts_per_tok", None) or 1)
    # norms and residuals; queries, keys and values before and after the rotation, and the output; the gated product
    numbers = 10 * int(config.hidden_size) + 6 * attended + 4 * inner
    if config._attn_implementation == "eager":  # keeps scores, bounded scores and weights
        numbers += 3 * heads * length
    return num_rows * length * int(config.num_hidden_layers) * numbers * itemsize


def free_bytes(device: torch.device) -> int | None:
    """Memory that could be taken now, ``None`` where that cannot be found out."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    found = [value for value in (_machine_bytes(), _container_bytes()) if value is not None]
    return min(found, default=None)


@contextmanager
def recomputed(layers: nn.ModuleList) -> Generator[None, None, None]:
    """Within this context, layers keep only their inputs. The backward pass belongs into it, too."""
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _machine_bytes() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:  # not Linux
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kilobytes[0]) * 1024 if kilobytes else None


def _container_bytes() -> int | None:
    """Memory that the limit of the control group leaves; file pages that can be dropped do not count as used."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
