"""``best_of``: draw k, imitate only the best, or only the successes. The classical expert iteration.

Best-of-k distillation (Anthony et al. 2017, arXiv 1705.08439, is the frame; STaR, arXiv 2203.14465, and ReST-EM, arXiv
2312.06585, keep all successes). Every kept completion has advantage 1, every other one 0: no contrast, no baseline.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup

from viva.experts.strategy import Completion, ExpertGroupBuilder

__all__ = ["BestOfGroupBuilder"]


@dataclass(kw_only=True)
class BestOfGroupBuilder(ExpertGroupBuilder):
    """Any builder or strategy, of which only the successes are imitated.

    Args:
        keep: ``best``: of the successes the one with the highest reward, the first of equals; ``all``: every one.
        threshold: A success has finished and earned more than this.
    """

    strategy_id: str = "best_of"
    keep: Literal["best", "all"] = "best"
    threshold: float = 0.0

    def __post_init__(self) -> None:
        """Check."""
        super().__post_init__()
        if self.keep not in ("best", "all"):
            raise ValueError(f"keep must be 'best' or 'all'; got {self.keep!r}")

    def completions(self, group: TrajectoryGroup) -> list[Sequence[Completion]]:
        """What would be trained anyhow, with advantage 1 where it is kept and 0 elsewhere."""
        rewards_G = group.get_total_rewards()
        successes = [
            seat
            for seat, (trajectory, reward) in enumerate(zip(group.trajectories_G, rewards_G, strict=True))
            if reward > self.threshold and _has_finished(trajectory)
        ]
        if self.keep == "best" and successes:
            successes = [max(successes, key=lambda seat: (rewards_G[seat], -seat))]
        return [
            [replace(completion, advantage=float(seat in successes)) for completion in completions]
            for seat, completions in enumerate(super().completions(group))
        ]

    def credit(self) -> None:
        """None: what is kept is imitated whole."""
        return None


def _has_finished(trajectory: Trajectory) -> bool:
    return bool(trajectory.transitions) and trajectory.transitions[-1].ac.stop_reason == "stop"
