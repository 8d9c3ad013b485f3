"""``iid``: the bare question, sampled and trained in the same context. Plain policy gradient (GRPO) over a group."""

from tinker_cookbook.rl.types import EnvGroupBuilder

from viva.experts.strategy import IID, ExpertGroupBuilder

__all__ = ["iid"]


def iid(builder: EnvGroupBuilder, *, weight: float | None = None) -> ExpertGroupBuilder:
    """The builder as the strategy ``iid``: its datums are those of tinker-cookbook.

    These are the samples that every ratio estimator is anchored at: keep at least half of a batch of them.
    """
    return ExpertGroupBuilder(inner=builder, strategy_id=IID, weight=weight)
