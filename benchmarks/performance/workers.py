"""Starts the sides of a comparison and lets them take turns."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class SideFailedError(RuntimeError):
    """A side that could not be started or did not finish a step."""


class Worker:
    """One side in its own process.

    Args:
        script: File beside this one.
        python: Interpreter of the side's environment.
        settings: Given to it as JSON.
        environment: Variables on top of this process's.
        timeout_s: Longest time to get ready, and for one step.
    """

    def __init__(
        self,
        script: str,
        python: Path,
        settings: Mapping[str, Any],
        *,
        environment: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        if not python.exists():
            raise SideFailedError(f"its environment is not set up: no {python.parent.parent.name}")
        self._timeout_s = timeout_s
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the worker
        self._process = subprocess.Popen(
            [str(python), str(HERE / script), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,  # a group of its own, so that what it starts can be ended with it
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def versions(self) -> dict[str, str]:
        """Of the packages that do the work, when the side is ready."""
        return self._answer()["ready"]

    def step(self, number: int) -> dict[str, float]:
        """Do a step; its figures.

        Raises:
            SideFailedError: With the last line of what it said.
        """
        try:
            self._process.stdin.write(f"{number}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SideFailedError(self._last_words()) from None
        return self._answer()

    def close(self) -> None:
        """End the process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._listener.join()
        with contextlib.suppress(BrokenPipeError):  # a number that it never read
            self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()

    def _listen(self) -> None:
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=self._timeout_s)
        except queue.Empty:
            raise SideFailedError(f"no answer for {self._timeout_s:.0f} s") from None
        if line is None:
            raise SideFailedError(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()
        sys.stderr.write(said[-4000:])
        if code < 0:
            return f"ended by {signal.Signals(-code).name}; the kernel sends SIGKILL where memory is short"
        lines = [line for line in said.splitlines() if line.strip()]
        return lines[-1].strip()[:200] if lines else f"ended with {code}"


def take_turns(workers: Mapping[str, Worker], repeats: int, say: Any) -> dict[str, Any]:
    """One step of each side to warm up, then ``repeats`` rounds; who begins a round changes.

    Returns:
        By side: versions and ``values``, the figures of each repeat, or ``error``, why there are none.
    """
    found: dict[str, Any] = {}

    def attempt(label: str, act: Any) -> Any:
        if "error" in found.setdefault(label, {"values": []}):
            return None
        try:
            return act()
        except SideFailedError as error:
            found[label] = {"error": str(error)}
            say(f"{label}: {error}")
            return None

    for label, worker in workers.items():
        versions = attempt(label, worker.versions)
        if versions is not None:
            found[label]["versions"] = versions
            attempt(label, lambda worker=worker: worker.step(0))
    for number in range(1, repeats + 1):
        for label in rotated(list(workers), number):
            values = attempt(label, lambda label=label, number=number: workers[label].step(number))
            if values is not None:
                found[label]["values"].append(values)
                say(f"{number}/{repeats} {label}: " + ", ".join(f"{k} {v:.4g}" for k, v in values.items()))
    return found


def rotated(labels: Sequence[str], by: int) -> list[str]:
    """The labels, beginning with another one each time."""
    start = by % max(len(labels), 1)
    return [*labels[start:], *labels[:start]]
