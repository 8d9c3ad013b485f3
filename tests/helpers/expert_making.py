"""Outcomes of groups made by hand, for tests of batches with strategies."""

from tinker_cookbook.rl.types import EnvGroupBuilder, TrajectoryGroup

from viva.training.rollouts import GroupOutcome


class Group(EnvGroupBuilder):
    """A builder that is never asked to build."""

    async def make_envs(self):
        raise NotImplementedError


def outcome(builder, trajectories, rewards, *, metrics=None, **options):
    group = TrajectoryGroup(list(trajectories), list(rewards), metrics or [{} for _ in rewards])
    return GroupOutcome(builder=builder, group=group, **options)
