"""A run with faults that measures itself: conversation preference RL on the local engine with a small random model.

As a program: ``soaked_run.py FOLDER SECONDS PERIOD``. It begins or resumes the run in the folder, lets 2 % of all
calls of agents and judges fail, fills the disk now and then (the run fails at its next flush and is resumed in this
same process), and interrupts itself after so many seconds. Every PERIOD seconds it appends a line to
``FOLDER/soak.jsonl``.
"""

import asyncio
import errno
import gc
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from failing_calls import FailingSampler
from random_models import make_model

from viva.recipes import common
from viva.recipes.config import parse_options
from viva.recipes.conversation_preference_rl import Config
from viva.recipes.demo import demo_options
from viva.recipes.loop import run_recipe
from viva.sdk import settled

FAILING_SHARE = 0.02
HANG_SHARE = 0.02
"""Of the failing calls; every one costs the time limit."""
FULL_DISKS = 7
"""So often the disk is full, at equal distances."""

OPTIONS = {
    "num_agents": "2",
    "batch_size": "4",
    "max_rounds": "2",
    "tournament_pattern": "all_pairs_one_way",
    "max_tokens": "16",
    "lora_rank": "4",
    "max_steps": "1000000",
    "max_training_datapoints": "4000000",
    "learning_rate": "1e-6",
    "save_every": "20",
    "eval_every": "500",
    "max_test_samples": "4",
    "max_retries": "5",
    "policy_timeout_s": "10",
    "behavior_if_exists": "resume",
}


class FullDisk:
    """Once armed, the next flush finds no space."""

    def __init__(self) -> None:
        self.armed = False
        self.num_hit = 0
        self._flush = os.fsync

    def __call__(self, descriptor: int) -> None:
        if self.armed:
            self.armed = False
            self.num_hit += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._flush(descriptor)


class Meter:
    """Looks at the process whenever a step begins."""

    def __init__(self, folder: Path, seconds: float, period: float, disk: FullDisk) -> None:
        self._folder, self._seconds, self._period, self._disk = folder, seconds, period, disk
        self._began = self._measured = self._filled = 0.0
        self._last: tuple[float, float] | None = None
        self._steps: list[tuple[float, float]] = []
        self._num_rows = self._num_told = self._num_undisturbed = 0
        self.num_steps = 0
        self.num_resumed = 0
        self.failed: Counter[str] = Counter()
        self.core: Any = None

    def step_begins(self) -> None:
        now, worked = time.monotonic(), time.process_time()
        if not self._began:
            self._began = self._measured = self._filled = now
        if self._last is not None:
            self._steps.append((round(now - self._last[0], 4), round(worked - self._last[1], 4)))
        self.num_steps += 1
        elapsed = now - self._began
        self._num_undisturbed += 1
        is_due = now - self._filled > self._seconds / (FULL_DISKS + 1)
        # where a step takes longer than that, a run whose disk is always full would get nowhere and never end
        if is_due and self._num_undisturbed > 2 and (elapsed < self._seconds or not self._disk.num_hit):
            self._filled = now
            self._disk.armed = True
        if now - self._measured >= self._period:
            self._measured = now
            self._write(elapsed)
        # on a slow machine six seconds are too few for the rows, and for one that tells of a full disk
        is_measured = self._num_rows >= self._seconds / self._period and self._num_told
        if elapsed > self._seconds and (is_measured or elapsed > 20 * self._seconds):
            os.kill(os.getpid(), signal.SIGINT)
        self._last = (time.monotonic(), time.process_time())

    def pause(self) -> None:
        """The step under way failed: its time does not count."""
        self._last = None
        self._num_undisturbed = 0

    def _write(self, elapsed: float) -> None:
        caches = [decoder._running._stored for decoder in self.core._decoders]
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
        )
        row = {
            "pid": os.getpid(),
            "t": round(elapsed, 1),
            "step": self.num_steps,
            "rss_kb": int(status["VmRSS"].split()[0]),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": int(status["Threads"]),
            "tasks": len(asyncio.all_tasks()),
            "objects": len(gc.get_objects()),
            "decoders": len(caches),
            "cache_bytes": sum(cache.num_bytes for cache in caches),
            "cache_nodes": sum(len(cache._nodes) for cache in caches),
            "checkpoints": len(list((self._folder / "run" / "state" / "weights").glob("*"))),
            "full_disks": self._disk.num_hit,
            "resumed": self.num_resumed,
            "failed": dict(sorted(self.failed.items())),
            "steps": self._steps,
        }
        self._steps = []
        self._num_rows, self._num_told = self._num_rows + 1, self._disk.num_hit
        with (self._folder / "soak.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


class SoakedClient:
    """A training client whose snapshots fail now and then."""

    def __init__(self, inner: Any, meter: Meter) -> None:
        self._inner, self._meter = inner, meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def save_weights_and_get_sampling_client(self) -> FailingSampler:
        self._meter.core = self._inner._core
        self._meter.step_begins()
        sampler = FailingSampler(
            await settled(self._inner.save_weights_and_get_sampling_client()),
            share=FAILING_SHARE,
            seed=self._meter.num_steps,
            hang_share=HANG_SHARE,
        )
        sampler.failed = self._meter.failed
        return sampler


class SoakedService:
    """A service client that makes such clients."""

    def __init__(self, inner: Any, meter: Meter) -> None:
        self._inner, self._meter = inner, meter

    def create_lora_training_client(self, *args: Any, **options: Any) -> SoakedClient:
        return SoakedClient(self._inner.create_lora_training_client(*args, **options), self._meter)

    def create_training_client_from_state_with_optimizer(self, path: str, **options: Any) -> SoakedClient:
        made = self._inner.create_training_client_from_state_with_optimizer(path, **options)
        return SoakedClient(made, self._meter)

    async def close(self, status: str) -> None:
        await self._inner.close(status)


def main(folder: Path, seconds: float, period: float) -> int:
    disk = FullDisk()
    os.fsync = disk
    meter = Meter(folder, seconds, period, disk)
    make_service = common.make_service
    common.make_service = lambda *args, **options: SoakedService(make_service(*args, **options), meter)
    model = folder / "model"
    if not model.exists():
        make_model(model, "qwen3")
    options = demo_options("conversation_preference_rl", folder) | OPTIONS | {"model_name": str(model)}
    while True:
        config = parse_options(Config, [f"{name}={value}" for name, value in options.items()])
        hits = disk.num_hit
        try:
            code = asyncio.run(common.exit_code(run_recipe(config)))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            code = 1
        if code != 1 or disk.num_hit == hits:
            return code
        meter.num_resumed += 1
        meter.pause()
        gc.collect()  # the engine before is not a leak, only a cycle


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
