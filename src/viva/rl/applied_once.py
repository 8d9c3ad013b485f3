"""Was an optimiser step applied twice?

If the answer to a request is lost, the SDK sends it again under the same number. Servers that do not look at the number
do it twice. Gradients sent twice are harmless where the server averages them; a repeated step is not: it moves the
weights by what the optimiser remembers. No engine counts its steps aloud, but those that tell the gradient's norm give
it away: the first step has used the gradient up, so the second one's is exactly zero.
"""

from collections.abc import Sequence

import numpy as np
import tinker

from viva.rl.remote import EngineError

__all__ = ["RepeatedStepError", "check_applied_once"]

_NORM = "grad_norm"
_CLIPPING = "ppo"
"""Gives no gradient where it clips, so that zero says nothing."""


class RepeatedStepError(EngineError):
    """The engine's weights are no longer those of the run."""


def check_applied_once(
    data_D: Sequence[tinker.Datum], response: tinker.OptimStepResponse, loss_fn: str
) -> None:
    """Make sure that a step used the gradient of the data it followed.

    Args:
        data_D: What the step was to learn from.
        response: What the engine said.
        loss_fn: Of the data.

    Raises:
        RepeatedStepError: If the gradient was used up before.
    """
    metrics = response.metrics or {}
    norms = [value for name, value in metrics.items() if name.rpartition("/")[2] == _NORM]
    if loss_fn == _CLIPPING or any(norms) or not norms:
        return
    if any(np.any(datum.loss_fn_inputs["advantages"].to_numpy()) for datum in data_D):
        raise RepeatedStepError(
            "the engine has applied an optimiser step twice: an answer was lost, the request was sent again, and "
            "the gradient was gone by then. The weights since the last checkpoint are not to be trusted."
        )
