"""Does the engine compute the loss it was asked for? Some remote engines refuse losses, some silently ignore the name.

Every engine must know ``cross_entropy`` and ``importance_sampling``. For any other loss the engine is asked for its
value on a few tokens whose ratios lie far outside the clipping range, and the answer is compared with the formula.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import tinker

from viva.rl.clients import TrainingClient

__all__ = ["check_loss"]

_Array = npt.NDArray[np.float64]
_ALWAYS_THERE = ("cross_entropy", "importance_sampling")
_TOLERANCE = 1e-3


def _ppo(p: _Array, q: _Array, a: _Array, config: Mapping[str, float]) -> _Array:
    ratio = np.exp(p - q)
    clipped = ratio.clip(config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2))
    return -np.minimum(ratio * a, clipped * a)


def _cispo(p: _Array, q: _Array, a: _Array, config: Mapping[str, float]) -> _Array:
    ratio = np.exp(p - q)
    clipped = ratio.clip(config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 4.0))
    return -clipped * a * p


def _dro(p: _Array, q: _Array, a: _Array, config: Mapping[str, float]) -> _Array:
    return -(p * a - 0.5 * config.get("beta", 0.05) * (p - q) ** 2)


_FORMULAS: Mapping[str, Callable[[_Array, _Array, _Array, Mapping[str, float]], _Array]] = MappingProxyType(
    {"cispo": _cispo, "dro": _dro, "ppo": _ppo}
)
"""Loss per token of the trainer's logprob p, the sampler's q and the advantage a."""

_SHIFTS = np.array([2.0, -2.0, 0.1, 2.0, -2.0, -0.1])
_ADVANTAGES = np.array([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])


async def check_loss(client: TrainingClient, loss_fn: str, config: Mapping[str, float] | None = None) -> None:
    """Make sure that the engine knows a loss; nothing is changed in it.

    Raises:
        ValueError: If the engine refuses the loss, computes something else, or does not tell what it computed.
    """
    if loss_fn in _ALWAYS_THERE:
        return
    if loss_fn not in _FORMULAS:
        raise ValueError(f"loss_fn must be one of {', '.join((*_ALWAYS_THERE, *_FORMULAS))}; got {loss_fn!r}")
    p, _ = await _ask(client, "importance_sampling", np.zeros_like(_SHIFTS), None)
    q = p - _SHIFTS
    try:
        _, value = await _ask(client, loss_fn, q, dict(config) if config else None)
    except (ValueError, tinker.TinkerError) as error:
        raise ValueError(
            f"the engine refuses loss_fn={loss_fn}: {error}. Use importance_sampling."
        ) from error
    expected = float(_FORMULAS[loss_fn](p, q, _ADVANTAGES, config or {}).sum())
    if value is None or not math.isclose(value, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
        raise ValueError(
            f"the engine was asked for loss_fn={loss_fn} and answered {value} where {expected:.4f} is right: "
            "it computes something else. Use importance_sampling, or another engine."
        )


async def _ask(
    client: TrainingClient, loss_fn: str, logprobs: _Array, config: dict[str, float] | None
) -> tuple[_Array, float | None]:
    """The trainer's logprobs of the probe's tokens, and the engine's total loss."""
    tokens = list(range(1, len(logprobs) + 1))
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([0, *tokens[:-1]]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=tokens, dtype="int64", shape=[len(tokens)]),
            "logprobs": tinker.TensorData.from_numpy(logprobs.astype(np.float32)),
            "advantages": tinker.TensorData.from_numpy(_ADVANTAGES.astype(np.float32)),
        },
    )
    output = await client.forward([datum], loss_fn, config)
    trained = output.loss_fn_outputs[0]["logprobs"].to_numpy().astype(np.float64)
    return trained, output.metrics.get("loss:sum")
