"""What the tests of failing disks and torn files share: the server of runs, and what has to hold after each."""

import atexit
import functools
import hashlib
import json
import subprocess
import sys
from pathlib import Path

from viva.engine.checkpoint import read_checkpoint
from viva.run.checkpoints import Checkpoints
from viva.run.files import LOCK

SCRIPT = Path(__file__).with_name("disk_run.py")


@functools.cache
def server():
    """Does a run for every dictionary of arguments of `disk_run.job`, each in a process of its own.

    There is one server for all tests, since it takes seconds to start.
    """
    process = subprocess.Popen([sys.executable, str(SCRIPT)], stdin=-1, stdout=-1, text=True)

    def stop():
        process.stdin.close()
        process.wait()
        process.stdout.close()

    def run(folder, **options):
        process.stdin.write(json.dumps({"folder": str(folder), **options}) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, "the server of runs died"
        return json.loads(answer)

    atexit.register(stop)
    return run


def outcome(folder: Path):
    """All that a run leaves, but for what depends on the clock; and the names of all files."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]
    texts = [(folder / name).read_text() for name in ("transcripts.jsonl", "tokens.jsonl", "config.json")]
    index = [json.loads(line) for line in (folder / "checkpoints.jsonl").read_text().splitlines()]
    checkpoints = [
        (row["name"], row["next_step"], row["state_path"], row["final"], row["best"]) for row in index
    ]
    return metrics, texts, checkpoints, tree(folder / "state"), sorted(files(folder))


def files(folder: Path):
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*")]


def tree(folder: Path):
    """Digest of every file but the lock, which means nothing by itself."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != LOCK
    }


def last_good(folder: Path) -> int:
    """Steps of the newest checkpoint; it is read, and its files compared with their digests."""
    latest = Checkpoints(folder).latest()
    if latest is None:
        return 0
    read_checkpoint(Path(Checkpoints(folder).resolve(latest)))
    Checkpoints(folder).check_logs(latest)
    return latest.next_step
