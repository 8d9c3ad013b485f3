"""A SkyRL Tinker server on this machine, and a proxy before it that is slow or loses answers.

The server is started as its environment starts it (`scripts/make_skyrl_env.sh`): `uv run -m skyrl.tinker.api`. It has a
process group of its own, so that nothing of it is left, and keeps what it compiled for the next one.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    """One server with its data base and checkpoints; can be killed and started again on the same port."""

    def __init__(self, environment: Path, model: Path, folder: Path):
        self.environment, self.model, self.folder = environment, model, folder
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self):
        bin_folder = self.environment / "bin"
        command = [
            bin_folder / "uv",
            *("run", "-m", "skyrl.tinker.api", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--base-model", str(self.model), "--backend", "jax", "--backend-config", json.dumps(BACKEND)),
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
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert self.process.poll() is None, self.log()[-3000:]
            assert time.monotonic() < deadline, self.log()[-3000:]
            time.sleep(0.5)

    def kill(self):
        """End it and all it started, at once."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def log(self):
        return (self.folder / "server.log").read_text(errors="replace")

    def _answers(self):
        try:
            with urllib.request.urlopen(f"{self.address}/api/v1/healthz", timeout=5):
                return True
        except OSError:
            return False


class Proxy:
    """Passes requests on, `delay_s` later, and closes the connection instead of answering those in `lost`.

    `lost` maps the end of a path to how many answers are lost; the server has done what was asked then.
    """

    def __init__(self, address, *, delay_s=0.0, lost=None):
        self.address, self.delay_s, self.lost = address, delay_s, Counter(lost or {})
        self.seen = Counter()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.own_address = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def _handler(self):
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def pass_on(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {
                    name: value
                    for name, value in self.headers.items()
                    if name.lower() not in ("host", "connection", "content-length", "accept-encoding")
                }
                request = urllib.request.Request(
                    proxy.address + self.path, body if self.command == "POST" else None, headers
                )
                request.method = self.command
                time.sleep(proxy.delay_s)
                try:
                    with urllib.request.urlopen(request, timeout=600) as answer:
                        status, kind, content = answer.status, answer.headers["Content-Type"], answer.read()
                except urllib.error.HTTPError as error:
                    status, kind, content = error.code, error.headers["Content-Type"], error.read()
                verb = self.path.rpartition("/")[2]
                proxy.seen[verb] += 1
                if proxy.lost[verb] > 0:
                    proxy.lost[verb] -= 1
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Type", kind or "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_DELETE = pass_on

            def log_message(self, *_):
                pass

        return Handler
