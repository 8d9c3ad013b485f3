"""Runs that strike themselves down at a named place.

As a program it reads jobs from standard input, one JSON list ``[folder, signal, call, place]`` per line (signal
``none`` runs to the end), does each in a fork of itself, so that the imports are paid once, and answers with the
exit code.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from bandit_engine import BanditTrainer, CountDataset, load_bandit

from viva.rl.checkpoints import Checkpoints
from viva.rl.run_folder import open_run_folder
from viva.rl.run_log import RunLog
from viva.rl.train import LoopConfig, Training, train
from viva.rl.update import UpdateConfig

NUM_STEPS = 7


def strike(owner, method, *, number, at_call, after):
    """Make the n-th call of a method send a signal to this process, before or after doing its work."""
    original = getattr(owner, method)
    calls = 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == at_call and not after:
            os.kill(os.getpid(), number)
        result = original(*args, **kwargs)
        if calls == at_call and after:
            os.kill(os.getpid(), number)
        return result

    setattr(owner, method, wrapped)


PLACES = {
    "snapshot": (BanditTrainer, "save_weights_and_get_sampling_client", False),
    "rollouts": (CountDataset, "get_batch", True),
    "backward": (BanditTrainer, "forward_backward", True),
    "update": (BanditTrainer, "optim_step", True),
    "log": (RunLog, "_append", True),
    "state": (BanditTrainer, "save_state", True),
    "index": (Checkpoints, "_write", True),
}


async def main(folder: Path) -> bool:
    run_folder = open_run_folder(folder, behavior="resume", config={})
    resume_from = run_folder.checkpoints.latest()
    run_folder.go_back_to(resume_from, num_steps=NUM_STEPS)
    if resume_from is None:
        client = BanditTrainer(run_folder.state_dir)
    else:
        client = load_bandit(run_folder.state_dir, run_folder.checkpoints.resolve(resume_from))
    run = Training(
        config=LoopConfig(
            seed=1,
            max_tokens=8,
            save_every=2,
            eval_every=0,
            tokens_every=1,
            update=UpdateConfig(learning_rate=0.1),
        ),
        client=client,
        dataset=CountDataset(NUM_STEPS),
        folder=run_folder,
        resume_from=resume_from,
    )
    return await train(run)


def job(folder: str, name: str, call: int, place: str) -> int:
    if name != "none":
        owner, method, after = PLACES[place]
        strike(owner, method, number=signal.Signals[name], at_call=call, after=after)
    return 0 if asyncio.run(main(Path(folder))) else 75


def serve() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1  # a traceback was printed
            try:
                code = job(*json.loads(line))
            finally:
                sys.stdout.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"\nexit {os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
