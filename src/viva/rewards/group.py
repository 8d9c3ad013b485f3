"""Group-centred advantages: an agent is paid for doing better than its group, not for an easy problem.

Legend: ``_P`` groups of a batch (one per prompt), ``_G`` members of a group.

This is the advantage of GRPO without the division by the group's standard deviation (Shao et al., 2024, arXiv
2402.03300; Liu et al., 2025, arXiv 2503.20783, show that the division biases towards very easy and very hard
prompts).
"""

import math
from collections.abc import Sequence

__all__ = ["group_advantages"]


def group_advantages(rewards_P_G: Sequence[Sequence[float]]) -> list[list[float]]:
    """Reward minus the mean reward of the group, for every member of every group.

    A group whose rewards are all equal gets exact zeros, so that callers can tell it carries no signal.

    Args:
        rewards_P_G: Total reward of every member, group by group. Groups may differ in size.

    Returns:
        Advantages in the same shape. They sum to zero within each group, up to rounding.

    Raises:
        ValueError: If a reward is not a finite number.
    """
    return [_centred(rewards_G, index) for index, rewards_G in enumerate(rewards_P_G)]


def _centred(rewards_G: Sequence[float], index: int) -> list[float]:
    if not all(math.isfinite(reward) for reward in rewards_G):
        raise ValueError(
            f"rewards of group {index} must be finite numbers; got {list(rewards_G)}. "
            "A reward that could not be computed must raise where it is computed."
        )
    if len(set(rewards_G)) <= 1:
        return [0.0] * len(rewards_G)
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]
