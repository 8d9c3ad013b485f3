"""``none``: the context is swapped and the gap is ignored."""

from dataclasses import dataclass
from typing import ClassVar

from viva.experts.estimators.base import Baseline, Estimator, Need

__all__ = ["NoCorrection"]


@dataclass(frozen=True, kw_only=True)
class NoCorrection(Estimator):
    """Weight 1, anchor ``p_old``: policy gradient as if the completion had been drawn under the training context.

    Never uses the sampler's probabilities, so it has low variance at any gap. Its expected update is the gradient of
    ``E_q[A log p]``: imitation of good hinted answers, avoidance of bad ones, with a pull as strong as the gap
    (an update many times larger than the on-policy one for the same advantages).
    """

    name: ClassVar[str] = "none"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.OLD_LOGPROBS})
    is_unbiased: ClassVar[bool] = False
    baselines: ClassVar[tuple[Baseline, ...]] = (Baseline.STRATUM, Baseline.PROMPT_UNION)
