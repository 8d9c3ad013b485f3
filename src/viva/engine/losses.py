"""The losses of ``forward_backward``, as the Tinker API defines them (https://tinker-docs.thinkingmachines.ai/losses).

All are sums over target tokens of a per-token loss of ``p``, the target's logprob under the weights being trained:

- ``cross_entropy``: ``-w p``
- ``importance_sampling``: ``-exp(p - q) A``, with ``q`` the logprob under which the token was sampled
- ``ppo``: ``-min(r A, clip(r) A)`` with ``r = exp(p - q)`` (Schulman et al. 2017, arXiv 1707.06347)
- ``cispo``: ``-stop_gradient(clip(r)) A p`` (MiniMax 2025, arXiv 2506.13585)
- ``dro``: ``-(A p - beta/2 (p - q)^2)`` (Richemond et al. 2024, arXiv 2405.19107)

Clipping thresholds are ratios, not distances from 1. Shapes: ``N`` targets, ``K`` candidates per target (only
``cross_entropy``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

__all__ = ["LOSSES", "TEMPERATURE", "Loss", "find_loss"]

TEMPERATURE = "temperature"
"""Key of ``cross_entropy``'s config, beyond the API: ``p`` is the logprob at this temperature."""

Inputs = Mapping[str, torch.Tensor]
Config = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One loss."""

    inputs: tuple[str, ...]
    """Keys of ``loss_fn_inputs`` beside ``target_tokens``, each of the targets' shape."""
    optional: tuple[str, ...] = ()
    """Those that may be left out (a weight left out is 1)."""
    config: Mapping[str, float] = field(default_factory=dict[str, float])
    """Keys of ``loss_fn_config`` and their defaults."""
    dense: bool = False
    """Whether targets may be ``[N, K]``."""
    per_token: Callable[[torch.Tensor, Inputs, Config], torch.Tensor]
    """``(logprobs, inputs, config)`` to losses, all of one shape."""
    active: Callable[[Mapping[str, np.ndarray]], np.ndarray]
    """Targets whose loss can have a gradient, booleans of the targets' shape. The loss of the others is 0."""

    def settings(self, name: str, given: Mapping[str, float | str] | None) -> dict[str, float]:
        """The config with its defaults.

        Raises:
            ValueError: An unknown key, a value that is not a number, or thresholds in the wrong order.
        """
        unknown = sorted(set(given or {}) - set(self.config))
        if unknown:
            allowed = sorted(self.config) or "none"
            raise ValueError(f"Unknown loss_fn_config keys {unknown} for loss {name!r}; allowed: {allowed}.")
        merged = dict(self.config)
        for key, value in (given or {}).items():
            if isinstance(value, str) or not 0 <= value < float("inf"):
                raise ValueError(f"loss_fn_config[{key!r}] must be a number of at least 0, not {value!r}.")
            merged[key] = float(value)
        if merged.get(TEMPERATURE, 1.0) == 0:
            raise ValueError(f"loss_fn_config[{TEMPERATURE!r}] must be above 0, not 0.")
        if merged.get("clip_low_threshold", 0.0) > merged.get("clip_high_threshold", float("inf")):
            raise ValueError(
                f"clip_low_threshold={merged['clip_low_threshold']} is above "
                f"clip_high_threshold={merged['clip_high_threshold']}. Both are ratios, such as 0.8 and 1.2."
            )
        return merged


def find_loss(name: str) -> Loss:
    """The loss of this name.

    Raises:
        ValueError: There is none.
    """
    if name not in LOSSES:
        raise ValueError(
            f"Loss {name!r} is not one of {sorted(LOSSES)}. For your own loss use forward_backward_custom."
        )
    return LOSSES[name]


def _cross_entropy(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    return -logprobs * inputs["weights"]


def _importance_sampling(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    return -torch.exp(logprobs - inputs["logprobs"]) * inputs["advantages"]


def _ppo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    ratio = torch.exp(logprobs - inputs["logprobs"])
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -torch.minimum(ratio * inputs["advantages"], clipped * inputs["advantages"])


def _cispo(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    ratio = torch.exp(logprobs.detach() - inputs["logprobs"])
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -clipped * inputs["advantages"] * logprobs


def _dro(logprobs: torch.Tensor, inputs: Inputs, config: Config) -> torch.Tensor:
    penalty = (logprobs - inputs["logprobs"]) ** 2
    return -(logprobs * inputs["advantages"] - 0.5 * config["beta"] * penalty)


def _weighted(inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    return inputs["weights"] != 0


def _has_advantage(inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    return inputs["advantages"] != 0


def _every(inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.ones_like(inputs["advantages"], dtype=bool)


_POLICY_INPUTS = ("logprobs", "advantages")

LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(
        inputs=("weights",),
        optional=("weights",),
        config={TEMPERATURE: 1.0},
        dense=True,
        per_token=_cross_entropy,
        active=_weighted,
    ),
    "importance_sampling": Loss(inputs=_POLICY_INPUTS, per_token=_importance_sampling, active=_has_advantage),
    "ppo": Loss(
        inputs=_POLICY_INPUTS,
        config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        per_token=_ppo,
        active=_has_advantage,
    ),
    # one-sided by default, as in the paper: a ratio below 1 keeps its small weight
    "cispo": Loss(
        inputs=_POLICY_INPUTS,
        config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        per_token=_cispo,
        active=_has_advantage,
    ),
    "dro": Loss(inputs=_POLICY_INPUTS, config={"beta": 0.05}, per_token=_dro, active=_every),
}
"""By the name ``forward_backward`` knows them."""
