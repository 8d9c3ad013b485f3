"""The loss of a batch's targets, and its gradient with respect to hidden states.

A place in a batch may carry targets of several examples (those that share it), and several different ones. Logits
are computed once per place and a logprob once per place and token; the loss sees every target of every example, and the
slopes of those that are the same are added up.

Shapes: ``M`` targets of all examples of a batch, ``U`` distinct pairs of place and token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from viva.engine.batches import Example
from viva.engine.logprobs import target_logprobs
from viva.engine.losses import Loss
from viva.engine.packing import Batch

__all__ = ["Targets", "gather_targets"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """Every target of a batch, flattened."""

    shapes: tuple[tuple[int, ...], ...]
    """Of the examples' targets, in the order of the batch."""
    active: np.ndarray
    """``[M]`` booleans."""
    inputs: Mapping[str, np.ndarray]
    """What the loss reads, ``[M]`` each."""
    pairs: np.ndarray
    """``[M]`` index of the target's pair."""
    places: np.ndarray
    """``[U]`` ascending places of the pairs."""
    tokens: np.ndarray
    """``[U]`` token ids, ascending within a place."""

    def evaluate(
        self, module: Any, hidden: torch.Tensor, loss: Loss, config: Mapping[str, float], max_logits: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Logprobs and losses of the targets, ``[M]`` each; with gradients enabled also the backward pass.

        Args:
            module: The causal language model.
            hidden: ``[B * T, H]`` hidden states of the batch.
            loss: What is minimised.
            config: Its settings.
            max_logits: Logits to hold at once.

        Raises:
            FloatingPointError: The loss is not finite.
        """
        # what shares a place with an active target is computed along with it
        is_trained = np.isin(self.places, self.places[self.pairs[self.active]])
        logprobs_U = np.empty(len(self.places), dtype=np.float32)
        with torch.no_grad():
            logprobs_U[~is_trained] = self._logprobs(module, hidden, ~is_trained, max_logits).cpu().numpy()
        trained = self._logprobs(module, hidden, is_trained, max_logits)
        logprobs_U[is_trained] = trained.detach().cpu().numpy()
        logprobs = logprobs_U[self.pairs]
        losses = np.zeros_like(logprobs)
        leaf = torch.from_numpy(logprobs[self.active]).requires_grad_(torch.is_grad_enabled())
        inputs = {key: torch.from_numpy(value[self.active]) for key, value in self.inputs.items()}
        per_target = loss.per_token(leaf, inputs, config)
        total = per_target.sum()
        if not torch.isfinite(total):
            raise FloatingPointError(
                f"The loss is {total.item()}. Look for extreme logprobs or advantages in the data."
            )
        losses[self.active] = per_target.detach().numpy()
        if total.requires_grad:
            (slopes,) = torch.autograd.grad(total, leaf)
            summed = np.bincount(self.pairs[self.active], slopes.numpy(), minlength=len(self.places))
            with np.errstate(over="ignore"):  # the step refuses a gradient that is not finite
                weights = summed[is_trained].astype(np.float32)
            trained.backward(torch.from_numpy(weights).to(trained.device))
        return logprobs, losses

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """``[M]`` values in the shapes of the examples' targets."""
        bounds = np.cumsum([int(np.prod(shape)) for shape in self.shapes])[:-1]
        return [
            part.reshape(shape) for part, shape in zip(np.split(values, bounds), self.shapes, strict=True)
        ]

    def _logprobs(
        self, module: Any, hidden: torch.Tensor, chosen: np.ndarray, max_logits: int
    ) -> torch.Tensor:
        """Logprobs of the chosen pairs; all pairs of a place are chosen or none."""
        places, rows, counts = np.unique(self.places[chosen], return_inverse=True, return_counts=True)
        if not len(places):
            return torch.zeros(0, device=hidden.device)
        columns = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
        # padding repeats token 0 of a place, which nobody reads
        tokens = np.zeros((len(places), int(counts.max())), dtype=np.int64)
        tokens[rows, columns] = self.tokens[chosen]
        index = [torch.from_numpy(array).to(hidden.device) for array in (places, tokens, rows, columns)]
        return target_logprobs(module, hidden[index[0]], index[1], max_logits)[index[2], index[3]]


def gather_targets(batch: Batch, examples: Sequence[Example], vocab_size: int) -> Targets:
    """The targets of a batch.

    Args:
        batch: Where the tokens are.
        examples: All examples, of which the batch names some.
        vocab_size: Above every token id.
    """
    rows = [examples[index] for index in batch.indices]
    places = [
        np.repeat(places, example.targets.size // len(places))
        for places, example in zip(batch.places, rows, strict=True)
    ]
    codes = np.concatenate(places) * vocab_size + np.concatenate([row.targets.reshape(-1) for row in rows])
    distinct, pairs = np.unique(codes, return_inverse=True)
    return Targets(
        shapes=tuple(row.targets.shape for row in rows),
        active=np.concatenate([row.active.reshape(-1) for row in rows]),
        inputs={key: np.concatenate([row.inputs[key].reshape(-1) for row in rows]) for key in rows[0].inputs},
        pairs=pairs,
        places=distinct // vocab_size,
        tokens=distinct % vocab_size,
    )
