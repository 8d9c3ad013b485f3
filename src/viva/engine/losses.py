"""The losses of ``forward_backward``, as the Tinker API defines them (https://tinker-docs.thinkingmachines.ai/losses).

All are sums over target tokens of a per-token loss of ``p``, the target's logprob under the weights being trained:

- ``cross_entropy``: ``-w p``
- ``importance_sampling``: ``-exp(p - q) A``, with ``q`` the logprob under which the token was sampled
- ``ppo``: ``-min(r A, clip(r) A)`` with ``r = exp(p - q)`` (Schulman et al. 2017, arXiv 1707.06347)
- ``cispo``: ``-stop_gradient(clip(r)) A p`` (MiniMax 2025, arXiv 2506.13585)
- ``dro``: ``-(A p - beta/2 (p - q)^2)`` (Richemond et al. 2024, arXiv 2405.19107)

Clipping thresholds are ratios, not distances from 1.

A place in a batch may carry targets of several examples (those that share it), and several different ones. Logits
are computed once per place and a logprob once per place and token; the loss sees every target of every example, and the
slopes of those that are the same are added up. Some places at a time go forward and backward through the output layer,
since logits cost as much memory per place as the vocabulary is large, and become their own gradient in place; then the
gradients of all go backward through the rest of the model together.

Shapes: ``N`` targets of an example, ``K`` candidates per target (only ``cross_entropy``); ``A`` targets of all examples
of a batch, ``M`` of them wanted, ``U`` distinct pairs of place and token, ``R`` distinct places, ``H`` hidden size,
``V`` vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from viva.engine.model import head_logits, output_layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from viva.engine.packing import DatumArrays, MicroBatch

TEMPERATURE = "temperature"
"""Key of every loss's config, beyond the API: ``p`` is the logprob at this temperature."""

Inputs = Mapping[str, torch.Tensor]
Config = Mapping[str, float]


def _has_advantage(inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    return inputs["advantages"] != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One loss; by default one of a policy, by the advantages of what it has sampled."""

    inputs: tuple[str, ...] = ("logprobs", "advantages")
    """Keys of ``loss_fn_inputs`` beside ``target_tokens``, each of the targets' shape."""
    optional: tuple[str, ...] = ()
    """Inputs that may be left out (a weight left out is 1)."""
    config: Mapping[str, float] = field(default_factory=dict[str, float])
    """Keys of ``loss_fn_config`` beside the temperature, and their defaults."""
    dense: bool = False
    """Whether targets may be ``[N, K]``."""
    per_token: Callable[[torch.Tensor, Inputs, Config], torch.Tensor]
    """``(logprobs, inputs, config)`` to losses, all of one shape."""
    active: Callable[[Mapping[str, np.ndarray]], np.ndarray] = _has_advantage
    """Targets whose loss can have a gradient, booleans of the targets' shape. The loss of the others is 0."""

    def settings(self, name: str, given: Mapping[str, float | str] | None) -> dict[str, float]:
        """The config with its defaults.

        Raises:
            ValueError: An unknown key, a value that is not a number, or thresholds in the wrong order.
        """
        merged = {TEMPERATURE: 1.0, **self.config}
        unknown = sorted(set(given or {}) - set(merged))
        if unknown:
            raise ValueError(
                f"Unknown loss_fn_config keys {unknown} for loss {name!r}; allowed: {sorted(merged)}."
            )
        for key, value in (given or {}).items():
            if isinstance(value, str) or not 0 <= value < float("inf"):
                raise ValueError(f"loss_fn_config[{key!r}] must be a number of at least 0, not {value!r}.")
            merged[key] = float(value)
        if merged[TEMPERATURE] == 0:
            raise ValueError(f"loss_fn_config[{TEMPERATURE!r}] must be above 0, not 0.")
        if merged.get("clip_low_threshold", 0.0) > merged.get("clip_high_threshold", float("inf")):
            raise ValueError(
                f"clip_low_threshold={merged['clip_low_threshold']} is above "
                f"clip_high_threshold={merged['clip_high_threshold']}. Both are ratios, such as 0.8 and 1.2."
            )
        return merged


def find_loss(name: str) -> Loss:
    """The loss of this name; `ValueError` if there is none."""
    if name not in LOSSES:
        raise ValueError(
            f"Loss {name!r} is not one of {sorted(LOSSES)}. For your own loss use forward_backward_custom."
        )
    return LOSSES[name]


def _ppo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    ratio = torch.exp(logprobs - inputs["logprobs"])
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -torch.minimum(ratio * inputs["advantages"], clipped * inputs["advantages"])


def _cispo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    ratio = torch.exp(logprobs.detach() - inputs["logprobs"])
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -clipped * inputs["advantages"] * logprobs


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(
        inputs=("weights",),
        optional=("weights",),
        dense=True,
        per_token=lambda p, given, config: -p * given["weights"],
        active=lambda given: given["weights"] != 0,
    ),
    "importance_sampling": Loss(
        per_token=lambda p, given, config: -torch.exp(p - given["logprobs"]) * given["advantages"]
    ),
    "ppo": Loss(config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, per_token=_ppo),
    # one-sided by default, as in the paper: a ratio below 1 keeps its small weight
    "cispo": Loss(config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}, per_token=_cispo),
    "dro": Loss(
        config={"beta": 0.05},
        per_token=lambda p, given, config: (
            -(p * given["advantages"] - 0.5 * config["beta"] * (p - given["logprobs"]) ** 2)
        ),
        active=lambda given: np.ones_like(given["advantages"], dtype=bool),
    ),
}
"""By the name ``forward_backward`` knows them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """Every wanted target of a batch, flattened."""

    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the examples' targets, in the order of the batch."""
    wanted: np.ndarray
    """``[A]`` booleans, which of the examples' targets these are."""
    active: np.ndarray
    """``[M]`` booleans."""
    inputs: Mapping[str, np.ndarray]
    """Inputs of the loss, ``[M]`` each."""
    pairs: np.ndarray
    """``[M]`` index of the target's pair."""
    read: np.ndarray
    """``[R]`` ascending places of the batch that carry a pair."""
    places: np.ndarray
    """``[U]`` ascending indices into these, of the pairs."""
    tokens: np.ndarray
    """``[U]`` token ids, ascending within a place."""

    def evaluate(
        self,
        module: "PreTrainedModel",
        hidden: torch.Tensor,
        loss: Loss,
        config: Mapping[str, float],
        max_logits: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Logprobs and losses of the targets, ``[M]`` each; with gradients enabled also the backward pass.

        They come from ``[R, H]`` hidden states of the places that are read, by `max_logits` logits at a time. A
        target's loss must depend on no other target.

        Raises:
            FloatingPointError: The loss is not finite.
        """
        logprobs, losses = np.empty(len(self.pairs), np.float32), np.zeros(len(self.pairs), np.float32)
        slopes = torch.zeros_like(hidden) if torch.is_grad_enabled() else None
        for pairs, is_trained in self._chunks(module, max_logits):
            chosen = np.flatnonzero(np.isin(self.pairs, pairs))
            places = torch.from_numpy(np.unique(self.places[pairs])).to(hidden.device)
            part = hidden.detach()[places].requires_grad_(is_trained and slopes is not None)
            with torch.set_grad_enabled(part.requires_grad):
                found = self._logprobs(module, part, pairs, config.get(TEMPERATURE, 1.0))
            own = np.searchsorted(pairs, self.pairs[chosen])
            logprobs[chosen] = found.detach().cpu().numpy()[own]
            active = self.active[chosen]
            trained = chosen[active]
            losses[trained], weights = self._losses(logprobs, trained, loss, config)
            if part.requires_grad:
                summed = np.bincount(own[active], weights, minlength=len(pairs))
                with np.errstate(over="ignore"):  # the step refuses a gradient that is not finite
                    found.backward(torch.from_numpy(summed.astype(np.float32)).to(found.device))
            if slopes is not None and part.grad is not None:
                slopes[places] = part.grad
        if slopes is not None and hidden.requires_grad:
            hidden.backward(slopes)
        return logprobs, losses

    def _losses(
        self, logprobs: np.ndarray, chosen: np.ndarray, loss: Loss, config: Mapping[str, float]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Losses of the chosen targets and their derivatives by the logprob."""
        leaf = torch.from_numpy(logprobs[chosen]).requires_grad_(True)
        inputs = {key: torch.from_numpy(value[chosen]) for key, value in self.inputs.items()}
        with torch.enable_grad():
            losses = loss.per_token(leaf, inputs, config)
            total = losses.sum()
        if not torch.isfinite(total):
            raise FloatingPointError(
                f"The loss is {total.item()}. Look for extreme logprobs or advantages in the data."
            )
        return losses.detach().numpy(), torch.autograd.grad(total, leaf)[0].numpy()

    def _chunks(self, module: "PreTrainedModel", max_logits: int) -> list[tuple[np.ndarray, bool]]:
        """Pairs whose logits are computed together, whole places, and whether they have active targets."""
        rows = rows_at_once(output_layer(module).weight.shape[0], max_logits)
        # what shares a place with an active target is computed along with it
        is_trained = np.isin(self.places, self.places[self.pairs[self.active]])
        chunks: list[tuple[np.ndarray, bool]] = []
        for kind in (False, True):
            pairs = np.flatnonzero(is_trained == kind)
            starts = np.flatnonzero(np.diff(self.places[pairs], prepend=-1))
            chunks += [(part, kind) for part in np.split(pairs, starts[rows::rows]) if len(part)]
        return chunks

    def split(self, values: np.ndarray, other: float) -> list[np.ndarray]:
        """``[M]`` values in the shapes of the examples' targets, with another in the place of what is not wanted."""
        whole = np.full(len(self.wanted), other, dtype=values.dtype)
        whole[self.wanted] = values
        bounds = np.cumsum([int(np.prod(shape)) for shape in self.shapes])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(whole, bounds), self.shapes, strict=True)]

    def _logprobs(
        self, module: "PreTrainedModel", hidden: torch.Tensor, pairs: np.ndarray, temperature: float
    ) -> torch.Tensor:
        """Logprobs of pairs from the hidden states of their places."""
        _, rows, counts = np.unique(self.places[pairs], return_inverse=True, return_counts=True)
        columns = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
        # padding repeats token 0 of a place, which nobody reads
        tokens = np.zeros((len(counts), int(counts.max())), dtype=np.int64)
        tokens[rows, columns] = self.tokens[pairs]
        index = [torch.from_numpy(array).to(hidden.device) for array in (tokens, rows, columns)]
        return target_logprobs(module, hidden, index[0], temperature)[index[1], index[2]]


def gather_targets(batch: "MicroBatch", examples: Sequence["DatumArrays"], vocab_size: int) -> Targets:
    """The targets of a batch; `vocab_size` is above every token id."""
    rows = [examples[index] for index in batch.indices]
    places = [
        np.repeat(places, example.targets.size // len(places))
        for places, example in zip(batch.places, rows, strict=True)
    ]
    wanted = np.concatenate([row.wanted.reshape(-1) for row in rows])

    def flat(arrays: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([array.reshape(-1) for array in arrays])[wanted]

    codes = flat(places) * vocab_size + flat([row.targets for row in rows])
    distinct, pairs = np.unique(codes, return_inverse=True)
    read, places_of_pairs = np.unique(distinct // vocab_size, return_inverse=True)
    return Targets(
        shapes=tuple(row.targets.shape for row in rows),
        wanted=wanted,
        active=flat([row.active for row in rows]),
        inputs={key: flat([row.inputs[key] for row in rows]) for key in rows[0].inputs},
        pairs=pairs,
        read=read,
        places=places_of_pairs,
        tokens=distinct % vocab_size,
    )


_LOGITS = 2**23
_ROWS = 128
"""More logits at once are no faster and leave the cache; fewer rows read the output layer too often."""


def rows_at_once(vocab_size: int, max_logits: int) -> int:
    """Positions whose logits are computed together, at least 1."""
    return max(1, min(max_logits // vocab_size, max(_ROWS, _LOGITS // vocab_size)))


def target_logprobs(
    module: "PreTrainedModel", hidden: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Logprobs of ``[M, K]`` target tokens behind ``[M, H]`` hidden states after the final norm, in float32.

    With gradients enabled they have a graph that can be gone through once. The temperature divides the logits.
    """
    logits = head_logits(module, hidden)
    scaled = logits if temperature == 1 else logits / temperature
    return cast(torch.Tensor, _TargetLogprobs.apply(scaled, targets))


class _TargetLogprobs(torch.autograd.Function):
    """``[M, V]`` logits and ``[M, K]`` targets to ``[M, K]`` logprobs."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # torch's log_softmax adds up 262,144 words in float32 with an error of 1e-4, logsumexp of 3e-6
        logprobs = logits - logits.logsumexp(dim=1, keepdim=True)
        ctx.save_for_backward(logprobs, targets)
        return logprobs.gather(1, targets)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        logprobs, targets = ctx.saved_tensors
        grad = grad_outputs[0]
        # nobody else has these logprobs: they become the gradient in their own place
        slopes = logprobs.exp_().mul_(-grad.sum(dim=1, keepdim=True))
        return slopes.scatter_add_(1, targets, grad), None
