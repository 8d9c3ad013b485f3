"""A disk that fails at a chosen operation: what Python asks of files below a folder goes through here.

Operations are counted from 1: opening, reading, writing, forcing to disk, renaming, removing, making and cutting, with
their arguments resolved to paths, also where they came as descriptors. Tensors are written by compiled code, so that
counts as one operation. What lies outside of the folder is left alone.
"""

import builtins
import errno
import io
import os
from pathlib import Path

FAULTS = {
    "ENOSPC": errno.ENOSPC,
    "EIO": errno.EIO,
    "EINTR": errno.EINTR,
    "full": errno.ENOSPC,
    "short": None,
    "killed": None,
}
"""``full``: from then on, nothing more can be written. ``short``: a write takes half of what it is given.
``killed``: the process ends there, the operation undone."""

_PATHS = ("open", "rename", "replace", "unlink", "remove", "mkdir", "rmdir", "truncate", "scandir", "listdir")
_DESCRIPTORS = ("fsync", "fdatasync", "ftruncate", "fchmod", "write")
_FILLING = ("write", "mkdir", "fsync")
KILLED = 99


def place_of(target, dir_fd=None) -> str:
    """Where a path or a descriptor leads; what a path ends with is not followed."""
    if isinstance(target, int):
        return os.readlink(f"/proc/self/fd/{target}")
    parent = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
    path = os.path.join(parent, os.fsdecode(target))
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


class FaultyDisk:
    """Fails the k-th operation below a folder, once; ``k=0`` only counts."""

    def __init__(self, folder: Path, *, k: int = 0, fault: str = "ENOSPC") -> None:
        self.folder = os.path.realpath(folder)
        self.k, self.fault = k, fault
        self.operations: list[str] = []
        self.struck: str | None = None

    def install(self) -> None:
        for name in (*_PATHS, *_DESCRIPTORS):
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        io.open = builtins.open = self._open
        import safetensors.torch

        safetensors.torch.save_file = self._saving(safetensors.torch.save_file)

    def _is_inside(self, path: str) -> bool:
        return (path + "/").startswith(self.folder + "/")

    def _passes(self, name: str, path: str) -> bool:
        """Count an operation; False if it is to be done by half, an error if it is to fail."""
        if not self._is_inside(path):
            return True
        if self.fault == "short" and name != "write":
            return True
        if self.fault == "full" and name not in _FILLING:
            return True
        self.operations.append(f"{name} {path[len(self.folder) + 1 :]}")
        if len(self.operations) != self.k and not (self.fault == "full" and self.struck):
            return True
        self.struck = self.struck or self.operations[-1]
        if self.fault == "killed":
            os._exit(KILLED)
        if self.fault == "short":
            return False
        number = FAULTS[self.fault]
        # as the system has it: an operation on a descriptor does not know the name
        raise OSError(number, os.strerror(number), *([path] if name in _PATHS else []))

    def _wrapped(self, name, original):
        def call(*args, **options):
            path = place_of(args[0] if args else options["path"], options.get("dir_fd"))
            if not self._passes(name, path):
                return original(args[0], args[1][: len(args[1]) // 2])
            return original(*args, **options)

        return call

    def _saving(self, original):
        def save_file(tensors, filename, metadata=None):
            from safetensors import SafetensorError

            try:
                whole = self._passes("write", place_of(filename))
            except OSError as error:
                Path(filename).write_bytes(b"torn")
                told = f"Error while serializing: I/O error: {error.strerror} (os error {error.errno})"
                raise SafetensorError(told) from None
            del whole  # the compiled code goes on writing where a write was short
            original(tensors, filename, metadata)

        return save_file

    def _open(
        self,
        file,
        mode="r",
        buffering=-1,
        encoding=None,
        errors=None,
        newline=None,
        closefd=True,
        opener=None,
    ):
        """`open`, with a raw file of ours below the usual layers."""
        path = place_of(file)
        if not self._is_inside(path):
            return _real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if not isinstance(file, int):
            self._passes("open", path)
        raw = _Raw(self, path, file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        if "+" in mode:
            buffered = io.BufferedRandom(raw)
        else:
            buffered = io.BufferedReader(raw) if "r" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)


class _Raw(io.FileIO):
    def __init__(self, disk, path, file, mode, closefd, opener):
        super().__init__(file, mode, closefd, opener)
        self._disk, self._path = disk, path

    def write(self, data):
        if not self._disk._passes("write", self._path):
            return super().write(bytes(data)[: max(1, len(data) // 2)])
        return super().write(data)

    def readinto(self, buffer):
        self._disk._passes("read", self._path)
        return super().readinto(buffer)

    def readall(self):
        self._disk._passes("read", self._path)
        return super().readall()

    def truncate(self, size=None):
        self._disk._passes("ftruncate", self._path)
        return super().truncate(size)


_real_open = io.open
