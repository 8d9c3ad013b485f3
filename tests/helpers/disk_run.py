"""A small run whose checkpoints are the engine's, opened as recipes open theirs; and a server of such runs.

As a program it reads jobs from standard input, one JSON object per line, does each in a fork of itself, so that the
imports are paid once, and answers with one line. See `job`.
"""

import asyncio
import contextlib
import io
import json
import os
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from bandit_engine import BanditTrainer, CountDataset, Done
from faulty_disk import KILLED, FaultyDisk

import viva.run.checkpoints
from viva.engine.checkpoint import read_checkpoint, read_tensors, write_checkpoint, write_tensors
from viva.recipes.loop import _disk_problem
from viva.run.folder import prepare_run_folder
from viva.training.loop import LoopConfig, Training, train
from viva.training.sampling import Sampling
from viva.training.update import UpdateConfig

NUM_STEPS = 5
_FILE = "state.safetensors"


class DiskTrainer(BanditTrainer):
    """A policy of eight logits, saved as the engine saves."""

    def save_state(self, name):
        path = self.state_dir / "weights" / name
        tensors = {"logits": torch.from_numpy(self.logits), "moments": torch.from_numpy(self.moments)}
        write_checkpoint(
            path,
            {"steps": self.steps},
            lambda folder: write_tensors(folder / _FILE, tensors),
            overwrite=False,
        )
        return Done(SimpleNamespace(path=str(path)))


def load(state_dir, path):
    steps = read_checkpoint(Path(path))["steps"]
    tensors = read_tensors(Path(path) / _FILE)
    state = {name: tensor.numpy() for name, tensor in tensors.items()}
    return DiskTrainer(state_dir, state | {"steps": steps})


async def opened(folder, told):
    """The folder, a client and the checkpoint it stands at; `viva.recipes.common.open_run` in small."""
    prepared = prepare_run_folder(folder, behavior="resume", config={"seed": 1, "name": "disk"})

    async def open_state(path):
        return load(prepared.folder.state_dir, path)

    found = await prepared.folder.open_newest(open_state, told.append) if prepared.resumes else None
    client, checkpoint = found or (DiskTrainer(prepared.folder.state_dir), None)
    run = prepared.open()
    run.go_back_to(checkpoint, num_steps=NUM_STEPS)
    return run, client, checkpoint


async def go(folder, told, saved):
    run, client, checkpoint = await opened(folder, told)
    save = run.checkpoints.save

    async def saving(*args, **options):
        done = await save(*args, **options)
        saved.append(done.next_step)
        return done

    run.checkpoints.save = saving
    config = LoopConfig(
        sampling=Sampling(seed=1, max_tokens=8),
        save_every=2,
        eval_every=0,
        tokens_every=1,
        update=UpdateConfig(learning_rate=0.1),
    )
    await train(
        Training(
            config=config, client=client, dataset=CountDataset(NUM_STEPS), folder=run, resume_from=checkpoint
        )
    )


def job(folder, k=0, fault="ENOSPC", limit=None, broken=False):
    """Do a run, its k-th file operation failing, or with no file longer than a limit.

    `broken` is the sabotage: an index that is written in place.

    Returns:
        ``error`` (the message a user reads; empty if it ended well), ``kind`` (the exception's class), ``told``
        (notes), ``saved`` (steps of the checkpoints that were complete), ``operations`` (their names), ``struck`` (the
        one that failed).
    """
    disk = FaultyDisk(Path(folder), k=k, fault=fault)
    told, saved = [], []
    result = {"error": "", "kind": "", "told": told, "saved": saved}
    disk.install()
    if broken:
        viva.run.checkpoints.write_atomic = lambda path, text: path.write_text(text)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            asyncio.run(go(Path(folder), told, saved))
    except (OSError, ValueError) as error:
        result |= {"error": _disk_problem(error) or str(error), "kind": type(error).__name__}
    return result | {"operations": disk.operations, "struck": disk.struck}


def serve():
    for line in sys.stdin:
        asked = json.loads(line)
        receiving, sending = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(receiving)
            try:
                result = job(**asked)
                with os.fdopen(sending, "w") as file:
                    file.write(json.dumps(result))
            finally:
                os._exit(0)  # a traceback was printed
        os.close(sending)
        with os.fdopen(receiving) as file:
            text = file.read()
        _, status = os.waitpid(child, 0)
        killed = os.waitstatus_to_exitcode(status) == KILLED
        sys.stdout.write((text or json.dumps({"killed": killed})) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    serve()
