"""A note of a run to its user: how long it will take, from the first step that was measured."""

from collections.abc import Mapping

from viva.conversation.wording import counted
from viva.recipes.common import say

__all__ = ["StepTime"]

_WORTH_TELLING_S = 60.0


class StepTime:
    """Watches a run's metrics and tells after the first measured step how long the others will take.

    Args:
        num_steps: Of the whole run.
    """

    def __init__(self, *, num_steps: int) -> None:
        self._num_steps = num_steps
        self._has_spoken = False

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Look at one step's metrics."""
        left = self._num_steps - step - 1
        if self._has_spoken or "time/rollouts" not in metrics or left < 1:
            return
        self._has_spoken = True
        seconds = metrics["time/step"] - metrics.get("time/evaluation", 0.0)
        hours = seconds * left / 3600
        told = f"{hours:,.1f} hours" if hours >= 1 else f"{hours * 60:,.1f} minutes"
        if seconds * left >= _WORTH_TELLING_S:
            others = counted(left, "other step")
            say(
                f"step {step + 1} took {seconds:.1f} s without evaluation; at that rate {others} will take {told}"
            )
