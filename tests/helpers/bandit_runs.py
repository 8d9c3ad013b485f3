"""Runs of the training loop on the bandit engine."""

import json
from pathlib import Path

from bandit_engine import GOOD, BanditTrainer, CountDataset, CountGroup, load_bandit

from viva.run.folder import prepare_run_folder
from viva.training.loop import LoopConfig, Training
from viva.training.sampling import Sampling
from viva.training.update import UpdateConfig


def make_run(folder: Path, *, num_steps=6, group_class=CountGroup, behavior="resume", **options):
    run_folder = prepare_run_folder(folder, behavior=behavior, config={}).open()
    resume_from = run_folder.checkpoints.latest()
    run_folder.go_back_to(resume_from, num_steps=num_steps)
    state_dir = run_folder.state_dir
    client = (
        load_bandit(state_dir, run_folder.checkpoints.resolve(resume_from))
        if resume_from
        else BanditTrainer(state_dir)
    )
    config = {"save_every": 2, "eval_every": 2} | options
    sampling = Sampling(seed=config.pop("seed", 3), max_tokens=12)
    update = UpdateConfig(learning_rate=0.1, num_substeps=config.pop("num_substeps", 1))
    return Training(
        config=LoopConfig(update=update, sampling=sampling, **config),
        client=client,
        dataset=CountDataset(num_steps, group_class=group_class),
        folder=run_folder,
        resume_from=resume_from,
        evaluators=[good_share],
    )


async def good_share(sampler, step, begin):
    return {"test/good": float(sampler.logprobs[GOOD])}


def metrics_of(folder: Path):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]
