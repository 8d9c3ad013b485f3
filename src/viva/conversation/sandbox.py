"""A Python function in a child process, with limits of time, memory and output.

The child runs this file as a script, which therefore imports nothing of Viva. It loads the function once and forks for
each call: a call takes milliseconds, sees nothing that another one left, and can be ended. Lines go in (the function,
then the arguments of each call, pickled) and come out (JSON). The limits are no wall against code that means harm.
Variables of the environment whose names speak of keys, tokens or passwords are not handed on.
"""

import atexit
import base64
import contextlib
import json
import math
import os
import pickle
import random
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable

_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.I)
_FILE_BYTES = 64 << 20
"""Longest file that a call may write."""
_VALUE, _RAISED, _MEMORY = b"v", b"r", b"m"
_FAILURES = {_RAISED: "raised", _MEMORY: "memory"}


def start_child(script: str | Path, env: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    """A child process that runs a file and is asked line by line."""
    return subprocess.Popen(
        [sys.executable, "-P", str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        process_group=0,  # an interrupt from the terminal is for the run, which then ends in order
    )


def ask(child: "subprocess.Popen[str]", line: str) -> str:
    """One line of answer, empty if the child has ended."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(line)
        child.stdin.flush()
    except BrokenPipeError:
        return ""
    return child.stdout.readline()


def limit(which: int, value: int) -> None:
    """Lower a limit of this process, as far as the system has it."""
    most = resource.getrlimit(which)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(which, (value if most == resource.RLIM_INFINITY else min(value, most), most))


class LimitedFunction(NamedTuple):
    """A function with the limits of each call of it."""

    function: Callable[..., object]
    timeout_s: float
    memory_mb: int
    max_chars: int


_idle: dict[LimitedFunction, list["subprocess.Popen[str]"]] = {}
_lock = threading.Lock()


def run(job: LimitedFunction, arguments: Mapping[str, object]) -> tuple[str, str | None]:
    """Call a function in a child that is idle, or in a new one; may be called by several threads at once.

    Returns:
        The value as text and ``None``, or the error and why there is no value, see
        `viva.conversation.records.CallFailure`.

    Raises:
        ValueError: If the function cannot be loaded in a child.
    """
    child = _taken(job)
    line = ask(child, _line(_pickled(dict(arguments), job.function)))
    if not line:
        child.communicate()
        return f"the tool's process ended with status {child.returncode}", "crashed"
    with _lock:
        _idle.setdefault(job, []).append(child)
    text, failure = json.loads(line)
    return text, failure


def warm(job: LimitedFunction) -> None:
    """Start a child for a function; ValueError if it cannot be loaded there."""
    child = _taken(job)
    with _lock:
        _idle.setdefault(job, []).append(child)


def _taken(job: LimitedFunction) -> "subprocess.Popen[str]":
    with _lock:
        waiting = _idle.get(job)
        if waiting:
            return waiting.pop()
    name = job.function.__name__
    env = {key: value for key, value in os.environ.items() if not _SECRET.search(key)}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "0"}
    line = _line(pickle.dumps((_pickled(job.function, job.function), *job[1:])))
    child = start_child(__file__, env)
    said = ask(child, line)
    if said.strip() != "true":
        child.kill()
        child.communicate()
        raise ValueError(
            f"the tool {name!r} cannot be loaded in a process of its own: {said.strip() or 'the process ended'}. It "
            "may use modules that can be imported, and plain values and functions of its file"
        )
    return child


def _pickled(value: object, function: Callable[..., object]) -> bytes:
    """A function or its arguments as bytes: by name where the child can import its module, else with all they use."""
    cloudpickle: Any = import_module("cloudpickle")
    module = sys.modules.get(function.__module__)
    is_file = module is not None and PathFinder.find_spec(module.__name__.partition(".")[0]) is None
    by_value = is_file and function.__module__ != "__main__"
    with _lock:  # what is registered is so for all threads
        try:
            if by_value:
                cloudpickle.register_pickle_by_value(module)
            return cloudpickle.dumps(value)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise ValueError(
                f"the tool {function.__name__!r} cannot be sent to a process of its own: {error}. Let it use modules, "
                "and plain values and functions of its file"
            ) from error
        finally:
            if by_value:
                cloudpickle.unregister_pickle_by_value(module)


def _line(pickled: bytes) -> str:
    return base64.b64encode(pickled).decode() + "\n"


def _close() -> None:
    """Let the children end, which they do when nobody can write to them."""
    for child in [child for waiting in _idle.values() for child in waiting]:
        child.communicate()
    _idle.clear()


atexit.register(_close)
os.register_at_fork(after_in_child=_idle.clear)  # they are the parent's


# the child process


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)  # what the function prints is no answer
    os.dup2(nothing, 2)
    function, *limits = pickle.loads(base64.b64decode(sys.stdin.readline()))
    try:
        job = LimitedFunction(pickle.loads(function), *limits)
    except Exception as error:  # noqa: BLE001 - whatever the user's modules raise is told
        answers.write(json.dumps(f"{type(error).__name__}: {error}") + "\n")
        answers.close()
        return
    said = "true"
    while True:
        answers.write(said + "\n")
        answers.flush()
        line = sys.stdin.readline()
        if not line:
            return
        said = json.dumps(_called(job, pickle.loads(base64.b64decode(line))))


def _called(job: LimitedFunction, arguments: dict[str, object]) -> tuple[str, str | None]:
    """Fork, wait no longer than allowed, and end whatever is left."""
    read, write = os.pipe()
    process = os.fork()
    if not process:
        os.close(read)
        _work(job, arguments, write)
    os.close(write)
    with contextlib.suppress(OSError):  # whoever of the two is first
        os.setpgid(process, process)
    found, is_late = _read(read, time.monotonic() + job.timeout_s, 4 * job.max_chars + 256)
    os.close(read)
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if is_late or status == -signal.SIGXCPU:
        return f"it took longer than {job.timeout_s:g} s", "timeout"
    if not found:
        return f"its process ended with status {status}", "crashed"
    return found[1:].decode(errors="replace"), _FAILURES.get(found[:1])


def _read(source: int, deadline: float, most: int) -> tuple[bytes, bool]:
    """Bytes until the end of a pipe, and whether it came too late."""
    found = b""
    while len(found) < most:
        ready = select.select([source], [], [], max(0.0, deadline - time.monotonic()))[0]
        if not ready:
            return found, True
        part = os.read(source, most)
        if not part:
            break
        found += part
    return found, False


def _work(job: LimitedFunction, arguments: dict[str, object], write: int) -> NoReturn:
    """Call the function in this process, which ends with it."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    os.dup2(1, 0)  # the next requests are not for it
    os.closerange(3, write)
    os.closerange(write + 1, write + 64)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, _FILE_BYTES)
    limit(resource.RLIMIT_CPU, math.ceil(job.timeout_s))
    limit(resource.RLIMIT_AS, _used_bytes() + (job.memory_mb << 20))
    random.seed(0)
    kind, text = _VALUE, ""
    try:
        value = job.function(**arguments)
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)
    except MemoryError:
        kind, text = _MEMORY, f"it needs more than {job.memory_mb} MB"
    except BaseException as error:  # noqa: BLE001 - whatever the function raises is for the agent to read
        kind, text = _RAISED, f"{type(error).__name__}: {error}"
    if len(text) > job.max_chars:
        text = f"{text[: job.max_chars]}\n[cut: {len(text):,} characters]"
    os.write(write, kind + text.encode(errors="replace"))
    os._exit(0)


@runtime_checkable
class _Numbers(Protocol):
    def tolist(self) -> object: ...


def _plain(value: object) -> object:
    """Numbers and arrays of numpy and torch as Python's own; anything else as it shows itself."""
    found = value.tolist() if isinstance(value, _Numbers) else value
    return repr(value) if type(found) is type(value) else found


def _used_bytes() -> int:
    """Address space of this process; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return 0


if __name__ == "__main__":
    _serve()
