"""One side of a comparison as a process: it gets ready, then does a step whenever it is told to.

A side is started with its settings as JSON. It says ``{"ready": versions}``, then answers each number on its standard
input with the figures of one step, as a line of JSON. What libraries print goes to the error stream. Only the standard
library, for all environments.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


class Channel:
    """The way to the process that measures."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = json.loads(sys.argv[1])
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def ready(self, *packages: str) -> None:
        """Say that steps can be asked for, and which versions do them."""
        self.send({"ready": {name: _version(name) for name in packages}})

    def send(self, message: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")

    def steps(self) -> Iterator[int]:
        """The numbers of the steps asked for, until there are no more."""
        for line in sys.stdin:
            yield int(line)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "?"


def serve(
    make: Callable[[Mapping[str, Any]], Callable[[int], Mapping[str, float]]], packages: tuple[str, ...]
) -> None:
    """Be a side.

    Args:
        make: From the settings to a function that does the step of a number and returns its figures; ``cost`` is the
            one that sides are compared by.
        packages: Whose versions to report.
    """
    channel = Channel()
    step = make(channel.settings)
    channel.ready(*packages)
    for number in channel.steps():
        channel.send({**step(number), "peak_gb": peak_gb()})


def peak_gb() -> float:
    """Most memory so far of this process and of all that it started (a worker's processes are one group), in GiB."""
    group, found = os.getpgid(0), 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if os.getpgid(int(status.parent.name)) == group:
                lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
                found += int(lines.get("VmHWM", "0 kB").split()[0])
        except (ProcessLookupError, FileNotFoundError):
            continue
    return found / 2**20
