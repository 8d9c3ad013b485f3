"""Threads, waiting policy, kernel caches and memory, set before torch is imported, which reads most of it once.

OpenMP's threads spin while they wait, for milliseconds. Beside another busy process that turns a 7 ms forward pass
into 100 to 250 ms. Passive waiting removes it; a short spin while nobody else is busy is faster still
(`viva.engine.waiting`).

oneDNN makes a kernel for every shape of a product, half a megabyte in a millisecond, and two caches (its own and that
of torch's binding) keep a thousand each: a run whose prompts have all lengths would grow by a gigabyte.

glibc gives large blocks, and the top of the heap, back to the system as soon as they are free. An update asks for the
same gigabyte at every step, and clearing its pages again took up to an eighth of its processor time.
"""

import ctypes
import math
import os
import platform
import sys
from pathlib import Path

from viva.engine.waiting import SPINS

__all__ = ["prepare_threads", "usable_cores"]

_KERNELS = "256"
"""Kernels that each of the two caches keeps. A step of decoding needs one for every shape of a weight, some dozen."""
_FROM_HEAP, _KEPT = 1_000_000_000, 2_000_000_000
"""Bytes: smaller blocks come from the heap, and as much of its free top stays with the process. Both are C ints."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # as <malloc.h> numbers them
_CGROUP_V2 = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_V1 = Path("/sys/fs/cgroup/cpu")


def prepare_threads() -> int:
    """Set threads and passive waiting for OpenMP and MKL, and what kernels and memory are kept, unless the user has.

    Call it before torch is imported; afterwards it changes nothing.

    Returns:
        The number of threads torch will use by these settings.
    """
    threads = str(usable_cores())
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        os.environ.setdefault("OMP_NUM_THREADS", threads)
        os.environ.setdefault("MKL_NUM_THREADS", os.environ["OMP_NUM_THREADS"])
        # a quota would be used up by spinning
        has_all_cores = os.environ["OMP_NUM_THREADS"] == threads == str(_cores())
        if has_all_cores and os.environ["OMP_WAIT_POLICY"].lower() == "passive":
            os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _KERNELS)
        os.environ.setdefault("LRU_CACHE_CAPACITY", _KERNELS)
        _keep_memory()
    chosen = os.environ.get("OMP_NUM_THREADS", threads)
    return int(chosen) if chosen.isdecimal() and int(chosen) > 0 else int(threads)


def _keep_memory() -> None:
    """Let freed memory stay with this process, where the C library is glibc and the user has not tuned it."""
    tuned = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys()
    if platform.libc_ver()[0] == "glibc" and not tuned:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _FROM_HEAP)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)


def usable_cores() -> int:
    """Cores this process may use: its affinity mask, capped by the container's CPU quota. At least 1."""
    cores, quota = _cores(), _cgroup_quota()
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def _cores() -> int:
    # macOS and Windows have no affinity call
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _cgroup_quota() -> float | None:
    """CPU quota in cores, or ``None`` where there is none."""
    try:
        quota, period = _CGROUP_V2.read_text().split()
    except (OSError, ValueError):
        try:
            quota = (_CGROUP_V1 / "cpu.cfs_quota_us").read_text()
            period = (_CGROUP_V1 / "cpu.cfs_period_us").read_text()
        except OSError:
            return None
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max": no quota
        return None
    return cores if cores > 0 else None
