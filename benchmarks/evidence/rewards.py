"""Rewards of the bench that have no name in the package: Copeland scores by label probabilities, length not controlled.

One reward a judge: the policy as it is, at the start, every tenth step, its moving average, and a better model. `RARE`
is the first of them without points for ties: as answers in the same words tie, it pays an answer for being rare.
"""

from dataclasses import dataclass
from statistics import fmean

from viva.judging.comparison import Outcome
from viva.judging.judge import JudgeOptions
from viva.rewards import serl
from viva.rewards.serl import Serl
from viva.rewards.solutions import Solutions

BETTER_JUDGE = "tiny"
"""The built-in policy, which was not raised to fall into the trap."""


@dataclass(frozen=True, kw_only=True)
class WinsAlone(Serl):
    """Share of its comparisons that a solution wins: ties earn nothing."""

    def pay(self, group: Solutions) -> list[float]:
        """The shares, by solution; raises what `Serl.pay` raises."""
        super().pay(group)
        return [
            fmean(
                each.outcome is (Outcome.A if each.first == own else Outcome.B)
                for each in group.comparisons or ()
                if own in (each.first, each.second)
            )
            for own in group.ids
        ]


RARE = WinsAlone(length_band=None)

CURRENT, INITIAL, EVERY, EMA, BETTER = (
    serl(length_band=None, judge=JudgeOptions(policy=policy))
    for policy in ("current", "initial", "every", "ema", BETTER_JUDGE)
)
