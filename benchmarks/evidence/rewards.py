"""Rewards of the bench that have no name in the package: Copeland scores by label probabilities, length not controlled.

One reward a judge: the policy as it is, at the start, every tenth step, its moving average, and a better model. `RARE`
is the first of them without points for ties: as answers in the same words tie, it pays an answer for being rare.
"""

from viva.judging.judge import JudgeOptions
from viva.rewards import serl

BETTER_JUDGE = "tiny"
"""The built-in policy, which was not raised to fall into the trap."""
RARE = serl(length_band=None, tie=0.0)

CURRENT, INITIAL, EVERY, EMA, BETTER = (
    serl(length_band=None, judge=JudgeOptions(policy=policy))
    for policy in ("current", "initial", "every", "ema", BETTER_JUDGE)
)
