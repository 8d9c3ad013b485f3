"""What Python reports of itself while hostile names and files are handled: places that are touched, code that is run.

The hook stays for the life of the process, as audit hooks do; outside of `watching` it does nothing.
"""

import contextlib
import ctypes
import os
import struct
import sys
from dataclasses import dataclass, field

MARK = "viva_canary"
"""Stands in all code that hostile files hold."""

_TOUCHING = (
    *("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"),
    *("os.chmod", "os.link", "os.symlink", "os.utime", "os.chdir", "shutil.copyfile", "shutil.copytree"),
    *("shutil.move", "shutil.rmtree", "shutil.unpack_archive", "shutil.chown", "glob.glob"),
)
_OF_TWO = ("os.rename", "os.link", "os.symlink", "shutil.move", "shutil.copyfile")
_RUNNING = (
    *("pickle.find_class", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"),
    *("os.startfile", "subprocess.Popen", "pty.spawn"),
)
_CONNECTING = (
    "socket.connect",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "socket.sendto",
    "urllib.Request",
)


@dataclass
class Seen:
    """What was reported."""

    places: set[str] = field(default_factory=set)
    """Paths that were touched, all links followed."""
    runs: list[str] = field(default_factory=list)
    """Code that was run, processes and connections."""
    folder: str = ""
    """Where the hostile files lie: code from there is foreign."""


_now: Seen | None = None


def _hook(event, args):
    global _now
    seen = _now
    if seen is None:
        return
    _now = None  # what the hook itself does is not reported
    try:
        if event in _TOUCHING:
            for argument in args[:2] if event in _OF_TWO else args[:1]:
                if isinstance(argument, str | bytes | os.PathLike):
                    seen.places.add(
                        os.path.realpath(os.path.join(_parent(event, args), os.fsdecode(argument)))
                    )
        elif event in _RUNNING or event in _CONNECTING or _runs_foreign_code(seen, event, args):
            seen.runs.append(f"{event} {args!r:.300}")
    finally:
        _now = seen


def _parent(event, args):
    """Where a relative path starts: some are relative to an open folder."""
    descriptor = args[-1] if event in ("os.remove", "os.rmdir", "os.mkdir") else -1
    return os.readlink(f"/proc/self/fd/{descriptor}") if descriptor not in (None, -1) else os.getcwd()


def _runs_foreign_code(seen, event, args):
    """Whether code from the folder, or with the mark, is compiled, run, imported or loaded."""
    if event == "compile":
        return (MARK in str(args[0]) and args[1] not in _SANDBOXED) or _is_foreign(seen, args[1])
    if event == "exec":
        code = args[0]
        is_marked = MARK in repr(code.co_consts) and code.co_filename not in _SANDBOXED
        return is_marked or _is_foreign(seen, code.co_filename)
    if event == "import":
        return _is_foreign(seen, args[1])
    return event == "ctypes.dlopen" and _is_foreign(seen, args[0])


def _is_foreign(seen, name):
    text = os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) else ""
    if not os.path.isabs(text):  # also "<template>": what the sandbox of templates compiles
        return False
    return "transformers_modules" in text or bool(
        seen.folder and os.path.realpath(text).startswith(seen.folder)
    )


_SANDBOXED = ("<template>", "<unknown>")
"""What Jinja compiles; in a sandbox, texts of templates are texts in it."""

_installed = False


@contextlib.contextmanager
def watching(folder=""):
    """Report what happens inside."""
    global _installed, _now
    if not _installed:
        sys.addaudithook(_hook)
        _installed = True
    seen = Seen(folder=os.path.realpath(folder) if folder else "")
    _now = seen
    try:
        yield seen
    finally:
        _now = None


@contextlib.contextmanager
def unwatched():
    """What a test does for itself is not reported."""
    global _now
    seen, _now = _now, None
    try:
        yield
    finally:
        _now = seen


class KernelWatch:
    """What the system reports of a folder and those in it: also what compiled code opens.

    Linux only, as the tests of files are.
    """

    _OPEN, _NONBLOCK = 0x20, os.O_NONBLOCK
    _EVENT = struct.Struct("iIII")

    def __init__(self, folder):
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(self._NONBLOCK)
        assert self._descriptor >= 0, os.strerror(ctypes.get_errno())
        self._folders = {}
        for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            number = libc.inotify_add_watch(self._descriptor, os.fsencode(place), self._OPEN)
            assert number >= 0, os.strerror(ctypes.get_errno())
            self._folders[number] = place

    def opened(self):
        """What was opened since the last call."""
        found = []
        while True:
            try:
                data = os.read(self._descriptor, 1 << 16)
            except BlockingIOError:
                return found
            while data:
                number, _, _, length = self._EVENT.unpack_from(data)
                name = data[self._EVENT.size : self._EVENT.size + length].rstrip(b"\0")
                found.append(os.path.join(self._folders[number], os.fsdecode(name)))
                data = data[self._EVENT.size + length :]

    def close(self):
        os.close(self._descriptor)
