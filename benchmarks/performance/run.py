"""Measure rows of the table in ``benchmarks/performance/README.md`` and write it anew.

    python benchmarks/performance/run.py [rows=long,balanced,...] [repeats=5] [threads=N] [record=yes]
        [sides=TEXT/...] [model=1m]

Without ``rows``, all of them; with ``rows=`` (none), the page is only written anew. A measured row replaces the one in
the page; ``record=no`` only prints. ``sides`` measures only the sides whose name contains one of the texts; with
``record=yes`` the page names those that were left out, without it nothing is recorded. ``model`` takes another size, to
try things out, and is never recorded. Peers run in ``.venv-peers``,
``.venv-engines`` and ``.venv-skyrl``; ``make bench`` sets them up, and a side that cannot run is reported in the table
with its reason.
"""

import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from machine import describe
from model import save_model
from render import lines_of, newest, render
from rows import ROWS, Row
from work import SIZES
from workers import SideFailedError, Worker, take_turns

from viva.threads import usable_cores

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS, PAGE = HERE / "results.jsonl", HERE / "README.md"
PYTHONS = {
    "viva": Path(sys.executable),
    "peers": ROOT / ".venv-peers" / "bin" / "python",
    "engines": ROOT / ".venv-engines" / "bin" / "python",
    "skyrl": ROOT / ".venv-skyrl" / "bin" / "python",
}
TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line."""

    rows: tuple[str, ...] = tuple(ROWS)
    repeats: int = 5
    threads: int = 0
    sides: tuple[str, ...] = ("",)
    model: str | None = None
    record: bool = True


def parse(argv: Sequence[str]) -> Options:
    """Read the command line.

    Raises:
        SystemExit: With what is allowed.
    """
    readers = {
        "rows": lambda text: tuple(filter(None, text.split(","))),
        "repeats": int,
        "threads": int,
        "sides": lambda text: tuple(text.split("/")),
        "model": {name: name for name in SIZES}.__getitem__,
        "record": lambda text: {"yes": True, "no": False}[text],
    }
    try:
        given = {name: readers[name](text) for name, text in (argument.split("=", 1) for argument in argv)}
    except (KeyError, ValueError):
        raise SystemExit(
            f"options are {', '.join(f'{name}=' for name in readers)}; got {' '.join(argv)}"
        ) from None
    options = Options(**{"record": "sides" not in given} | given)
    if options.model is not None:
        options = replace(options, record=False)
    unknown = sorted(set(options.rows) - set(ROWS))
    if unknown:
        raise SystemExit(f"rows must be of {', '.join(ROWS)}; got {', '.join(unknown)}")
    labels = dict.fromkeys(label for name in options.rows for label in ROWS[name].sides)
    unmatched = [text for text in options.sides if not any(text in label for label in labels)]
    if unmatched and options.rows:
        raise SystemExit(f"sides must be parts of {' / '.join(labels)}; got {' / '.join(unmatched)}")
    return options


def measure(row: Row, options: Options, threads: int) -> dict[str, Any]:
    """All sides of a row, taking turns."""
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
    }
    chosen = {
        label: side for label, side in row.sides.items() if any(text in label for text in options.sides)
    }
    found: dict[str, Any] = {}
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory() as folder:
        size = options.model or row.model
        save_model(Path(folder), size)
        try:
            for label, side in chosen.items():
                settings = {"model": folder, "size": size, **side.settings}
                python = PYTHONS[side.environment]
                try:
                    workers[label] = Worker(
                        side.script, python, settings, environment=environment, timeout_s=TIMEOUT_S
                    )
                except SideFailedError as error:
                    found[label] = {"error": str(error)}
            found |= take_turns(workers, options.repeats, say)
        finally:
            for worker in workers.values():
                worker.close()
    return {label: found.get(label, {"error": "left out"}) for label in row.sides}


def say(text: str) -> None:
    print(f"  {text}", flush=True)


def write_page() -> None:
    PAGE.write_text(render(newest(RESULTS.read_text())))


def main(argv: Sequence[str]) -> None:
    options = parse(argv)
    # make sets it for the tests; here every side waits as it does by itself
    os.environ.pop("OMP_WAIT_POLICY", None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the sides, too
    threads = options.threads or usable_cores()
    machine = describe(threads)
    machine_id = hashlib.sha256(json.dumps(machine).encode()).hexdigest()[:6]
    for name in options.rows:
        row, started = ROWS[name], time.monotonic()
        print(f"== {name}: {row.work}", flush=True)
        record = {"row": name, "repeats": options.repeats, "machine_id": machine_id, "machine": machine}
        record |= {"sides": measure(row, options, threads)}
        for line in lines_of(row, record):
            print("  |", " | ".join(line), flush=True)
        print(f"  {(time.monotonic() - started) / 60:.1f} minutes", flush=True)
        if options.record:
            with RESULTS.open("a") as file:
                file.write(json.dumps(record) + "\n")
            write_page()
    if not options.rows:
        write_page()


if __name__ == "__main__":
    main(sys.argv[1:])
