"""Runs of the recipes that are killed, at a moment or at a durability point.

As a program it reads jobs from standard input, one JSON object per line, does each in a fork of itself, so that the
imports are paid once, and answers with a JSON object. A job has the ``recipe``, its ``options``, and how it ends:
``after_s`` seconds, at ``point`` number n, or not at all; ``signal`` says by which signal (default SIGKILL). ``slow``
names a part of the engine that computes for a minute when it is called for the n-th time, ``sabotage`` something that
is broken on purpose.

A durability point is the moment before or after any call by which Python changes files: they are found by wrapping the
functions of ``os`` and what ``open`` returns, so that new ones are found by themselves. Only those in the run's folder
count.
"""

import builtins
import importlib
import io
import json
import os
import signal
import sys
import time
import traceback
from functools import cache
from pathlib import Path

from faulty_disk import place_of

FIRST_IMPORTS = (
    "viva.recipes.conversation_preference_rl",
    "viva.recipes.critique_self_play",
    "viva.recipes.math_efficiency",
    "viva.recipes.loop",
    "viva.recipes.strategies",
    "viva.view.report",
    "viva.run.export",
    "viva.engine",
    "peft",
    "torch.utils.flop_counter",
    "transformers.models.qwen3.modeling_qwen3",
)
FUNCTIONS = ("mkdir", "remove", "rename", "replace", "rmdir", "truncate", "unlink")
FUNCTIONS += ("fchmod", "fdatasync", "fsync", "ftruncate", "write")
"""Of `os`, with a path or a descriptor as their first argument."""
METHODS = ("close", "flush", "truncate", "write", "writelines")


class Points:
    """Counts durability points and strikes at one of them."""

    def __init__(self, folder: Path, target: int | None, number: int) -> None:
        self.folder = os.path.realpath(folder)
        self.target = target
        self.number = number
        self.names: list[str] = []

    def pass_by(self, name: str, place: str) -> None:
        """One point."""
        self.names.append(f"{name} {os.path.relpath(place, self.folder)}")
        if len(self.names) - 1 == self.target:
            os.kill(os.getpid(), self.number)

    def is_inside(self, place: str) -> bool:
        return place == self.folder or place.startswith(self.folder + os.sep)

    def around(self, name, place, function, args, options):
        """Call a function between two points."""
        if not self.is_inside(place):
            return function(*args, **options)
        self.pass_by(f"before {name}", place)
        result = function(*args, **options)
        self.pass_by(f"after {name}", place)
        return result

    def install(self) -> None:
        """Wrap everything for the rest of the process."""
        for name in FUNCTIONS:
            self._wrap(name)
        plain_open = io.open

        def watched_open(file, mode="r", *args, **options):
            place = place_of(file)
            if not set(mode) & set("wax+") or not self.is_inside(place):
                return plain_open(file, mode, *args, **options)
            return Watched(self.around("open", place, plain_open, (file, mode, *args), options), place, self)

        io.open = builtins.open = watched_open

    def _wrap(self, name):
        function = getattr(os, name)

        def watched(*args, **options):
            place = place_of(args[0], options.get("dir_fd"))
            return self.around(name, place, function, args, options)

        setattr(os, name, watched)


class Watched:
    """A file whose changes are durability points."""

    def __init__(self, stream, place: str, points: Points) -> None:
        self.__dict__.update(_stream=stream, _place=place, _points=points)

    def __getattr__(self, name):
        attribute = getattr(self._stream, name)
        if name not in METHODS:
            return attribute
        return lambda *args: self._points.around(name, self._place, attribute, args, {})

    def __setattr__(self, name, value):
        setattr(self._stream, name, value)

    def __iter__(self):
        return iter(self._stream)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


SLOW = {
    "sampling": ("viva.engine.decoder", "Decoder", "run_unit"),
    "update": ("viva.engine.policy", "Policy", "_run_batch"),
}


def make_slow(part: str, at_call: int) -> None:
    """Let a unit of the engine take a minute; nothing else has its turn meanwhile."""
    module, owner, method = SLOW[part]
    owner = getattr(importlib.import_module(module), owner)
    original = getattr(owner, method)
    calls = 0

    def slow(*args, **options):
        nonlocal calls
        calls += 1
        if calls == at_call:
            sys.stdout.write("computing\n")
            sys.stdout.flush()
            time.sleep(60)
        return original(*args, **options)

    setattr(owner, method, slow)


def sabotage(what: str) -> None:
    """Break what a resumed run relies on."""
    if what == "logs are not cut back":
        from viva.run.log import RunLog

        RunLog.cut_back = lambda self, sizes: None
    if what == "a bit of the journal is wrong":
        from viva.run import journal

        original = journal.decode_answer

        def decode(stored):
            response = original(stored)
            for sequence in response.sequences:
                sequence.logprobs_np[:] *= 1 + 2**-22
            return response

        journal.decode_answer = decode


def keep_base_models() -> None:
    """Load every base model once, before the forks; each has its own copy all the same."""
    from viva.engine import core

    core.load_base_model = cache(core.load_base_model)


def child(job, report) -> int:
    """The run itself."""
    if job.get("slow"):
        make_slow(*job["slow"])
    sabotage(job.get("sabotage", ""))
    points = None
    if job.get("counts") or job.get("point") is not None:
        folder = Path(job["options"]["log_path"])
        points = Points(folder, job.get("point"), getattr(signal, job.get("signal", "SIGKILL")))
        points.install()
    arguments = [f"{name}={value}" for name, value in job["options"].items()]
    from viva.recipes.programs import train_recipe

    code = train_recipe(job["recipe"], arguments)
    if points is not None:
        with os.fdopen(report, "w") as pipe:
            pipe.write(json.dumps(points.names))
    return code


def do(job):
    """Do a job in a fork; its exit code, seconds, seconds from the signal to the end, output, and durability points."""
    output, input_ = os.pipe()
    log = Path(job["log"])
    began = time.monotonic()
    process = os.fork()
    if process == 0:
        code = 1  # a traceback was written
        try:
            os.close(output)
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            code = child(job, input_)
        except KeyboardInterrupt:  # ends as the interpreter itself would
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(input_)
    struck = None
    if job.get("after_s") is not None:
        while job.get("slow") and "computing\n" not in log.read_text():
            time.sleep(0.02)
        time.sleep(job["after_s"])
        struck = time.monotonic()
        os.kill(process, getattr(signal, job.get("signal", "SIGKILL")))
    with os.fdopen(output) as pipe:
        names = pipe.read()
    _, status, usage = os.wait4(process, 0)
    ended = time.monotonic()
    return {
        "code": os.waitstatus_to_exitcode(status),
        "seconds": ended - began,
        "processor_s": usage.ru_utime + usage.ru_stime,
        "after_signal_s": None if struck is None else ended - struck,
        "points": json.loads(names) if names else None,
    }


def serve() -> None:
    """Do jobs until there are no more."""
    for name in FIRST_IMPORTS:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    keep_base_models()
    from viva.engine import core
    from viva.recipes.common import resolve_model

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        model = resolve_model(json.loads(line)["options"]["model_name"])
        core.load_base_model(model, torch.device("cpu"), torch.float32)
        answers.write(json.dumps(do(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
