"""A run whose audited reward leaves the truth ends early, keeps its best checkpoint, and stays ended."""

from dataclasses import replace

from bandit_engine import CountGroup
from bandit_runs import make_run, metrics_of

from viva.run.alarms import WINDOW, StopRule
from viva.training.loop import crossed, train

GAPS = [0.5, 0.3, 0.2, 0.2, 0.2, 0.2, 0.2, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9]
"""The gap of each step: its mean over the window is lowest after step 7, and above 0.6 after step 10."""


class DriftingGroup(CountGroup):
    """Reports the gap of its step, as an audited conversation does."""

    async def compute_group_rewards(self, trajectory_group, env_group):
        results = await super().compute_group_rewards(trajectory_group, env_group)
        gap = GAPS[self.prompt // 3]  # three groups a step
        return [(reward, {**metrics, "reward_truth_gap": gap}) for reward, metrics in results]


def drifting_run(folder, **options):
    run = make_run(folder, num_steps=14, group_class=DriftingGroup, **options)
    return replace(run, stop_rule=StopRule(levels={"reward_truth_gap": 0.6}))


async def test_the_run_ends_when_the_mean_crosses_and_keeps_the_best_checkpoint(tmp_path):
    run = drifting_run(tmp_path, save_every=0)
    assert await train(run)
    steps = [row["step"] for row in metrics_of(tmp_path)]
    means = [sum(GAPS[end - WINDOW : end]) / WINDOW for end in range(WINDOW, len(GAPS) + 1)]
    ended = WINDOW + next(place for place, mean in enumerate(means) if mean > 0.6)
    assert steps == [*range(ended), ended], "and one evaluation at the end"
    best = run.folder.checkpoints.best()
    assert best is not None
    assert best.next_step == WINDOW + means.index(min(means))
    assert "above its level of 0.6" in (crossed(run) or "")


async def test_an_ended_run_that_is_resumed_does_not_go_on(tmp_path):
    await train(drifting_run(tmp_path))
    rows = metrics_of(tmp_path)
    again = drifting_run(tmp_path)
    best = again.folder.checkpoints.best()
    assert await train(again)
    assert metrics_of(tmp_path) == rows
    assert again.folder.checkpoints.best() == best


async def test_without_a_rule_the_same_run_goes_to_its_end(tmp_path):
    run = make_run(tmp_path, num_steps=14, group_class=DriftingGroup)
    assert await train(run)
    assert len(metrics_of(tmp_path)) == 15
    assert run.folder.checkpoints.best() is None
