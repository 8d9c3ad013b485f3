"""What a run tells its user about a judge that cannot be read: once, with the option that changes it."""

from collections.abc import Mapping

from viva.judging.judge import JudgeMode
from viva.judging.tournament import NoValidComparisonsError
from viva.recipes.common import say

__all__ = ["JudgeAdvice"]

_UNREADABLE = f"rollout/errors/{NoValidComparisonsError.__name__}"
_INVALID = "void/judge/invalid_rate"
_OFF_SET_MASS = "void/judge/off_set_mass"


class JudgeAdvice:
    """Watches a run's metrics and speaks up at the first conversation whose judge cannot be read.

    Args:
        mode: The judge's.
        max_off_set_mass: The judge's, in ``logprob`` mode.
    """

    def __init__(self, *, mode: JudgeMode, max_off_set_mass: float) -> None:
        self._mode: JudgeMode = mode
        self._max_off_set_mass = max_off_set_mass
        self._has_spoken = False

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Look at one step's metrics."""
        if self._has_spoken or _UNREADABLE not in metrics or _INVALID not in metrics:
            return
        self._has_spoken = True
        say(
            f"note: step {step + 1} has conversations without a reward, and nothing is learned from those: "
            f"{metrics[_INVALID]:.0%} of the judge's comparisons in them are invalid. {self._reason(metrics)}"
        )

    def _reason(self, metrics: Mapping[str, float]) -> str:
        if self._mode == "verdict":
            return (
                "Its replies hold no verdict that can be read, as those of a model that does not follow "
                "instructions yet. Choose judge_mode=logprob, a higher judge_max_tokens, or a model that does."
            )
        mass = metrics.get(_OFF_SET_MASS, 1.0)
        return (
            f"Where its verdict should begin, it gives {mass:.1%} of the probability to other tokens than the "
            f"labels; judge_max_off_set_mass={self._max_off_set_mass} allows no more than that. A model with random "
            "weights, or one that does not know the format, judges so. Choose judge_max_off_set_mass=1.0, which "
            "compares the labels however improbable they are, judge_mode=verdict, or a model that follows "
            "instructions."
        )
