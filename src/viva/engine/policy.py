"""The weights being trained: losses, gradients, updates, snapshots, files.

Everything here runs at once in the caller's thread; the training client queues calls of it.

Shapes: ``B`` sequences padded to ``T`` tokens, ``M`` positions that carry a target.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from torch import nn

from viva.engine.adam import AdamW
from viva.engine.batches import Example, micro_batches
from viva.engine.checkpoint import read_tensors, write_tensors
from viva.engine.limits import EngineLimits
from viva.engine.logprobs import target_logprobs
from viva.engine.lora import ALPHA, AdapterSettings, adapter_tensors, add_adapter, merge_adapter
from viva.engine.losses import Loss
from viva.engine.model import BaseModel, structure_copy

__all__ = ["LossResult", "ModuleBuilder", "Policy", "stored_builder"]

_ADAPTER_FILE = "adapter_model.safetensors"
_OPTIMIZER_FILE = "optimizer.safetensors"
_WEIGHTS_FILE = "model.safetensors"

ModuleBuilder = Callable[[], Any]
"""Builds a decode copy of the model with the weights of one moment."""

LossResult = tuple[list[np.ndarray], list[np.ndarray]]
"""Logprobs and losses of the targets, one pair of arrays per example."""


class Policy:
    """A base model with trainable weights and their optimiser."""

    def __init__(self, base: BaseModel, settings: AdapterSettings, limits: EngineLimits) -> None:
        self.base = base
        self.settings = settings
        self._limits = limits
        self._wrapped: Any = None
        if settings.rank:
            self._wrapped = add_adapter(base, settings)
            self._module: Any = self._wrapped.base_model.model
            self._parameters = adapter_tensors(self._wrapped)
        else:
            # trained in float32 whatever the precision of the base, which stays as it is
            copies = {id(p): nn.Parameter(p.detach().float().clone()) for p in base.module.parameters()}
            self._module = structure_copy(base.module, copies)
            self._parameters = dict(self._module.named_parameters())
        self.optimizer = AdamW(self._parameters)
        self._failure: str | None = None

    def run(
        self, examples: Sequence[Example], loss: Loss, config: Mapping[str, float], *, backward: bool
    ) -> Generator[None, None, LossResult]:
        """Losses of examples and, with ``backward``, the gradient of their sum, added to what is accumulated.

        Yields after every micro-batch.

        Raises:
            FloatingPointError: A loss is not finite.
        """
        logprobs: list[np.ndarray] = [np.empty(0)] * len(examples)
        losses: list[np.ndarray] = [np.empty(0)] * len(examples)
        try:
            for indices in micro_batches(examples, self._limits.training_tokens):
                batch = [examples[index] for index in indices]
                results = self._run_batch(batch, loss, config, backward=backward)
                for index, (row_logprobs, row_losses) in zip(indices, results, strict=True):
                    logprobs[index], losses[index] = row_logprobs, row_losses
                yield
        except (
            BaseException
        ) as error:  # also an interrupt between two micro-batches leaves a partial gradient
            if backward:
                self._drop_gradients(f"{type(error).__name__}: {error}")
            raise
        return logprobs, losses

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

    def snapshot(self) -> ModuleBuilder:
        """Freeze the present weights; later steps do not change what the builder builds."""
        return _builder(self.base, self.settings, self._weights())

    def save(self, folder: Path, *, optimizer: bool) -> None:
        """Write the weights (an adapter in PEFT's format, or a whole model) and the optimiser's state."""
        if self._wrapped is None:
            self._module.config.save_pretrained(folder)
            self.base.tokenizer.save_pretrained(folder)
            write_tensors(folder / _WEIGHTS_FILE, self._weights())
        else:
            self._wrapped.peft_config["default"].save_pretrained(str(folder))
            write_tensors(
                folder / _ADAPTER_FILE, {_peft_name(name): w for name, w in self._weights().items()}
            )
        if optimizer:
            write_tensors(folder / _OPTIMIZER_FILE, self.optimizer.state())

    def load(self, folder: Path, *, num_steps: int | None) -> None:
        """Take over stored weights, dropping accumulated gradients.

        Args:
            folder: Written by `save`.
            num_steps: Steps the stored optimiser had taken; ``None`` starts with a fresh optimiser.

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
        optimizer = AdamW(self._parameters)
        if num_steps is not None:
            if not (folder / _OPTIMIZER_FILE).is_file():
                raise ValueError(
                    f"{str(folder)!r} has no optimiser state; it was saved for sampling. Use save_state's."
                )
            optimizer.load(read_tensors(folder / _OPTIMIZER_FILE), num_steps)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
        self.optimizer = optimizer
        self._failure = None
        self._clear_gradients()

    def _run_batch(
        self, batch: Sequence[Example], loss: Loss, config: Mapping[str, float], *, backward: bool
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        device = next(iter(self._parameters.values())).device
        lengths = [len(example.tokens) for example in batch]
        tokens = np.zeros((len(batch), max(lengths)), dtype=np.int64)
        for line, example in zip(tokens, batch, strict=True):
            line[: len(example.tokens)] = example.tokens
        real = np.arange(tokens.shape[1])[None] < np.array(lengths)[:, None]
        active = np.concatenate([example.active for example in batch])
        with torch.set_grad_enabled(backward and bool(active.any())):
            # padding is on the right, where causal attention does not look
            hidden = self._module.get_decoder()(
                input_ids=torch.from_numpy(tokens).to(device), use_cache=False
            ).last_hidden_state[torch.from_numpy(real).to(device)]
            logprobs, losses = self._losses(hidden, batch, active, loss, config)
            total = losses.sum()
            if not torch.isfinite(total):
                raise FloatingPointError(
                    f"The loss is {total.item()}. Look for extreme logprobs or advantages in the data."
                )
            if total.requires_grad:
                total.backward()
        shapes = [example.targets.shape for example in batch]
        sizes = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
        flat = [np.split(t.detach().float().cpu().numpy().reshape(-1), sizes) for t in (logprobs, losses)]
        return [(a.reshape(s), b.reshape(s)) for a, b, s in zip(*flat, shapes, strict=True)]

    def _losses(
        self,
        hidden: torch.Tensor,
        batch: Sequence[Example],
        active: np.ndarray,
        loss: Loss,
        config: Mapping[str, float],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and losses of all targets, ``[M]`` or ``[M, K]``; only those of active targets have a graph."""
        targets = torch.from_numpy(np.concatenate([example.targets for example in batch])).to(hidden.device)
        chosen = torch.from_numpy(active).to(hidden.device)
        positions = chosen if chosen.ndim == 1 else chosen.any(dim=1)
        logprobs = torch.zeros(targets.shape, device=hidden.device)
        if bool((~positions).any()):
            with torch.no_grad():
                logprobs[~positions] = target_logprobs(
                    self._module, hidden[~positions], targets[~positions], self._limits.logits
                )
        losses = torch.zeros(targets.shape, device=hidden.device)
        if bool(positions.any()):
            trained = target_logprobs(
                self._module, hidden[positions], targets[positions], self._limits.logits
            )
            logprobs[positions] = trained.detach()
            inputs = {
                key: torch.from_numpy(np.concatenate([example.inputs[key] for example in batch])).to(
                    hidden.device
                )
                for key in loss.inputs
            }
            where = chosen[positions]
            per_token = loss.per_token(
                trained[where], {key: value[positions][where] for key, value in inputs.items()}, config
            )
            losses = losses.masked_scatter(chosen, per_token)
        return logprobs, losses

    def _weights(self) -> dict[str, torch.Tensor]:
        """Copies of the trained weights."""
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def _drop_gradients(self, reason: str) -> None:
        self._failure = reason
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None


def _read_weights(folder: Path, settings: AdapterSettings) -> dict[str, torch.Tensor]:
    """Trained weights of a checkpoint, by the names `Policy` uses, on the CPU."""
    if not settings.rank:
        return read_tensors(folder / _WEIGHTS_FILE)
    stored = read_tensors(folder / _ADAPTER_FILE)
    return {
        name.removeprefix("base_model.model.").removesuffix(".weight"): tensor
        for name, tensor in stored.items()
    }


def stored_builder(base: BaseModel, settings: AdapterSettings, folder: Path) -> ModuleBuilder:
    """A builder for the weights of a checkpoint, which are read now."""
    device = base.module.device
    weights = {name: tensor.to(device) for name, tensor in _read_weights(folder, settings).items()}
    return _builder(base, settings, weights)


def _builder(
    base: BaseModel, settings: AdapterSettings, weights: Mapping[str, torch.Tensor]
) -> ModuleBuilder:
    if settings.rank:
        return lambda: merge_adapter(base, weights, ALPHA / settings.rank)
    dtype = base.module.dtype
    originals = dict(base.module.named_parameters())
    copies = {
        id(originals[name]): nn.Parameter(w.to(dtype), requires_grad=False) for name, w in weights.items()
    }
    return lambda: base.decode_copy(copies)


def _peft_name(name: str) -> str:
    return f"base_model.model.{name}.weight"
