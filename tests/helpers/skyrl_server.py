"""A SkyRL Tinker server on this machine.

The server is started as its environment starts it (`scripts/make_skyrl_env.sh`): `uv run -m skyrl.tinker.api`. It has a
process group of its own, so that nothing of it is left, and keeps what it compiled for the next one.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

BACKEND = {
    "max_lora_adapters": 16,  # a run keeps its place for minutes after its end
    "max_lora_rank": 4,
    "sample_max_num_sequences": 8,  # batches of one size: every size is compiled
    "train_micro_batch_size": 8,
}
START_S = 600


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class SkyrlServer:
    """One server with its data base and checkpoints; can be killed and started again on the same port.

    With several workers, each is a process with a device of its own, which holds a share of weights and batches.
    """

    def __init__(self, environment: Path, model: Path, folder: Path, *, workers: int = 1):
        self.environment, self.model, self.folder = environment, model, folder
        self.workers = workers
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.process, self.others = None, []

    def start(self):
        bin_folder = self.environment / "bin"
        backend, joined = BACKEND, {}
        if self.workers > 1:
            joined = {"coordinator_address": f"127.0.0.1:{free_port()}", "num_processes": self.workers}
            backend = BACKEND | joined | {"fully_sharded_data_parallel_size": self.workers}
        command = [
            bin_folder / "uv",
            *("run", "-m", "skyrl.tinker.api", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--base-model", str(self.model), "--backend", "jax", "--backend-config", json.dumps(backend)),
            *("--checkpoints-base", str(self.folder / "checkpoints")),
            *("--database-url", f"sqlite:///{self.folder / 'tinker.db'}"),
        ]
        variables = os.environ | {
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.environment / "jax-cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "HF_HUB_OFFLINE": "1",
        }
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            given = [f"--{name.replace('_', '-')}={value}" for name, value in joined.items()]
            self.others = [
                subprocess.Popen(
                    [bin_folder / "python", "-m", "skyrl.backends.jax", *given, f"--process-id={place}"],
                    env=variables,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for place in range(1, self.workers)
            ]
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert self.process.poll() is None, self.log()[-3000:]
            assert time.monotonic() < deadline, self.log()[-3000:]
            time.sleep(0.5)

    def kill(self):
        """End it and all it started, at once."""
        for process in filter(None, [self.process, *self.others]):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.process, self.others = None, []

    def log(self):
        return (self.folder / "server.log").read_text(errors="replace")

    def _answers(self):
        try:
            with urllib.request.urlopen(f"{self.address}/api/v1/healthz", timeout=5):
                return True
        except OSError:
            return False
