"""Was an optimiser step applied twice?

If the answer to a request is lost, the SDK sends it again under the same number. Servers that do not look at the number
do it twice. Gradients sent twice are harmless where the server averages them; a repeated step is not: it moves the
weights by what the optimiser remembers. No engine counts its steps aloud, but those that tell the gradient's norm give
it away: the first step has used the gradient up, so the second one's is exactly zero.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import tinker

from viva.training.remote import EngineError

__all__ = ["RepeatedStepError", "check_applied_once"]

_NORM = "grad_norm"
_CLIPPING = "ppo"
"""Gives no gradient where it clips, so that zero says nothing."""
_LEAST = 1e-6
"""Advantages and logprobs nearer to 0 than this may give a gradient that is rounded to 0."""


class RepeatedStepError(EngineError):
    """The engine's weights are no longer those of the run."""


def check_applied_once(
    data_D: Sequence[tinker.Datum],
    output: tinker.ForwardBackwardOutput,
    response: tinker.OptimStepResponse,
    loss_fn: str,
) -> None:
    """Make sure that a step used the gradient of the data it followed.

    Args:
        data_D: What the step was to learn from.
        output: What the engine said of their loss.
        response: What it said of the step.
        loss_fn: Of the data.

    Raises:
        RepeatedStepError: If the gradient was used up before.
    """
    metrics = response.metrics or {}
    norms = [value for name, value in metrics.items() if name.rpartition("/")[2] == _NORM]
    if loss_fn == _CLIPPING or any(norms) or not norms:
        return
    if _has_gradient(data_D, output):
        raise RepeatedStepError(
            "the engine has applied an optimiser step twice: an answer was lost, the request was sent again, and "
            "the gradient was gone by then. The weights since the last checkpoint are not to be trusted."
        )


def _has_gradient(data_D: Sequence[tinker.Datum], output: tinker.ForwardBackwardOutput) -> bool:
    """Whether the gradient cannot be 0: a token that is not certain has an advantage that its equals do not undo."""
    nets: dict[tuple[bytes, bytes], np.ndarray] = defaultdict(lambda: np.zeros(1))
    for datum, record in zip(data_D, output.loss_fn_outputs, strict=True):
        targets_T = datum.loss_fn_inputs["target_tokens"].to_numpy()
        is_open_T = record["logprobs"].to_numpy() < -_LEAST
        tokens_T = np.asarray(datum.model_input.to_ints())
        key = (tokens_T.tobytes(), targets_T.tobytes())
        nets[key] = nets[key] + is_open_T * datum.loss_fn_inputs["advantages"].to_numpy()
    return any(bool(np.any(np.abs(net_T) > _LEAST)) for net_T in nets.values())
