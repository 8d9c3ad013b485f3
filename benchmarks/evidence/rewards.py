"""Rewards of the bench that have no name in the package: Copeland scores by label probabilities, length not controlled.

One reward a judge: the policy as it is, at the start, every tenth step, its moving average, and a better model. `RARE`
is the first of them without points for ties: as answers in the same words tie, it pays an answer for being rare.
"""

from dataclasses import dataclass
from statistics import fmean

from viva.judging.judge import JudgeOptions
from viva.rewards import serl
from viva.rewards.serl import Serl, judgements_of
from viva.rewards.solutions import Solutions

BETTER_JUDGE = "tiny"
"""The built-in policy, which was not raised to fall into the trap."""


@dataclass(frozen=True, kw_only=True)
class WinsAlone(Serl):
    """Share of its comparisons that a solution wins: ties earn nothing."""

    def pay(self, group: Solutions) -> list[float]:
        """The shares, by solution; raises what `Serl.pay` raises."""
        super().pay(group)
        judgements = judgements_of(group.comparisons or ())
        return [
            fmean(one.winner == each for one in judgements if each in (one.first, one.second))
            for each in group.ids
        ]


RARE = WinsAlone(length_band=None)

CURRENT, INITIAL, EVERY, EMA, BETTER = (
    serl(length_band=None, judge=JudgeOptions(policy=policy))
    for policy in ("current", "initial", "every", "ema", BETTER_JUDGE)
)
