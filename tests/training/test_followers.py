"""Which weights a judge has at which step, also after a run was resumed, and which of them its folder keeps."""

import asyncio
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from bandit_engine import Done
from hypothesis import given, settings
from hypothesis import strategies as st

from viva.engine.checkpoint import read_checkpoint, write_checkpoint
from viva.judging.judge import PolicyRef
from viva.model_files import MismatchError
from viva.run.folder import RunFolder
from viva.training.followers import Current, Every, PastSelves


@dataclass
class Sampler:
    """Weights after so many steps."""

    version: int

    def sample(self, prompt, num_samples, sampling_params):
        raise NotImplementedError


@dataclass
class Engine:
    """A training client and its service: saved weights are the number of steps after which they were saved."""

    root: Path
    is_remote: bool = False
    steps: int = 0
    stored: dict[str, int] = field(default_factory=dict)

    def save_weights_for_sampler(self, name, ttl_seconds=None):
        del ttl_seconds
        return Done(SimpleNamespace(path=self._put("sampler_weights", name)))

    def save_state(self, name, ttl_seconds=None):
        del ttl_seconds
        return Done(SimpleNamespace(path=self._put("weights", name)))

    def _put(self, kind, name):
        if self.is_remote:
            path = f"tinker://run/{kind}/{name}"
            self.stored[path] = self.steps
            return path
        folder = self.root / "state" / kind / name
        write_checkpoint(folder, {"steps": self.steps}, _write_nothing, overwrite=True)
        return str(folder)

    def create_sampling_client(self, model_path, base_model=None):
        del base_model
        if self.is_remote:
            return Sampler(self.stored[model_path])
        return Sampler(read_checkpoint(Path(model_path))["steps"])


def _write_nothing(folder):
    del folder


def follower(folder: RunFolder, engine: Engine, every: int, *, staleness: int = 0, start=None) -> Every:
    where = {"client": engine, "service": engine, "base_model": None, "folder": folder}
    past = PastSelves(name="judge", whose="judge", every=every, most=1, known=dict(start or {}), **where)
    return Every(policy=PolicyRef(), past=past, max_staleness=staleness)


def judges(folder: RunFolder) -> set[str]:
    place = folder.path / "state" / "sampler_weights"
    return {path.name for path in place.iterdir()} if place.is_dir() else set()


async def play(folder, engine, every, steps, *, start=None, save_every=3) -> list[int]:
    """Versions that judged the steps; what a loop does with a follower."""
    judge, seen = follower(folder, engine, every, start=start), []
    for step in steps:
        engine.steps = step
        await judge.reach(step)
        judge.follow(Sampler(step), step)
        seen.append(judge.policy.current().version)
        await judge.trained()
        engine.steps = step + 1
        if (step + 1) % save_every == 0:
            await folder.checkpoints.save(
                engine, next_step=step + 1, log_sizes={}, beside=judge.beside(step + 1)
            )
            needed = {name for each in folder.checkpoints.all() for name in each.beside}
            assert engine.is_remote or judges(folder) == needed
    return seen


@settings(max_examples=30)  # each saves checkpoints of 24 steps
@given(st.integers(2, 9), st.integers(1, 20), st.integers(1, 5), st.booleans())
def test_a_judge_is_refreshed_every_so_many_steps_also_across_a_resume(
    tmp_path_factory, every, stop, save_every, is_remote
):
    path = tmp_path_factory.mktemp("run")
    folder, engine = RunFolder(path), Engine(path, is_remote)
    folder.checkpoints.begin()
    seen = asyncio.run(play(folder, engine, every, range(stop), save_every=save_every))
    assert seen == [step // every * every for step in range(stop)]
    resumed = RunFolder(path)
    last = resumed.checkpoints.latest()
    first = 0 if last is None else last.next_step
    start = {} if last is None else {name: resumed.checkpoints.resolve(last, name) for name in last.beside}
    again = asyncio.run(play(resumed, engine, every, range(first, 24), start=start, save_every=save_every))
    assert again == [step // every * every for step in range(first, 24)]


@pytest.mark.parametrize("staleness", [1, 2, 5])
async def test_rollouts_ahead_are_judged_by_the_weights_of_their_own_policy(tmp_path, staleness):
    folder, engine = RunFolder(tmp_path), Engine(tmp_path, is_remote=True)
    folder.checkpoints.begin()
    judge = follower(folder, engine, 3, staleness=staleness)
    for step in range(12):
        engine.steps = step
        await judge.reach(step)
        for version in range(max(0, step - staleness), step + 1):
            judge.follow(Sampler(version), version)
            assert judge.policy.current().version == version // 3 * 3


async def test_a_judge_that_follows_is_the_sampler_itself():
    policy, sampler = PolicyRef(), Sampler(3)
    Current(policy).follow(sampler, 3)
    assert policy.current() is sampler


async def test_a_checkpoint_without_the_judges_weights_is_refused(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(ValueError, match="does not name the weights of its judge, judge-000004"):
        await follower(folder, Engine(tmp_path), 4).reach(5)


async def test_a_checkpoint_whose_judge_is_gone_damaged_or_exchanged_is_not_used(tmp_path):
    folder, engine = RunFolder(tmp_path), Engine(tmp_path)
    folder.checkpoints.begin()
    await play(folder, engine, 4, range(6))
    last = folder.checkpoints.latest()
    assert last.beside == {"judge-000004": "state/sampler_weights/judge-000004"}
    assert folder.checkpoints.check_state(last)
    place = tmp_path / "state" / "sampler_weights" / "judge-000004"
    write_checkpoint(place, {"steps": 3}, _write_nothing, overwrite=True)
    with pytest.raises(MismatchError, match="are not those that were saved there for the checkpoint 000006"):
        folder.checkpoints.check_state(last)
    (place / "checkpoint.json").write_text("{}")
    with pytest.raises(ValueError, match=r"judge-000004/checkpoint\.json' is damaged"):
        folder.checkpoints.check_state(last)
    shutil.rmtree(place)
    assert folder.checkpoints.latest().next_step == 3
    assert "judge-000004 is gone" in folder.checkpoints.damage()[0]


async def test_only_the_runs_own_weights_are_deleted(tmp_path):
    folder, engine = RunFolder(tmp_path), Engine(tmp_path)
    folder.checkpoints.begin()
    for name in ("mine", "judge-x", "judge-000099"):
        (tmp_path / "state" / "sampler_weights" / name).mkdir(parents=True)
    await play(folder, engine, 2, range(5), save_every=9)
    assert judges(folder) == {"mine", "judge-x", "judge-000004"}
