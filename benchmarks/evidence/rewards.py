"""Rewards of the bench that have no name in the package: Copeland scores by label probabilities, length not controlled.

One reward a judge: the policy as it is, at the start, every tenth step, its moving average, and a better model.
"""

from viva.judging.judge import JudgeOptions
from viva.rewards import serl

BETTER_JUDGE = "tiny"
"""The built-in policy, which was not raised to fall into the trap."""

CURRENT, INITIAL, EVERY, EMA, BETTER = (
    serl(length_band=None, judge=JudgeOptions(policy=policy))
    for policy in ("current", "initial", "every", "ema", BETTER_JUDGE)
)
