"""Threads, how they wait, kernel caches and memory, set before torch is imported, which reads most of it once.

OpenMP's threads spin while they wait, for milliseconds. Beside another busy process that turns a 7 ms forward pass
into 100 to 250 ms. Passive waiting removes it; a short spin while nobody else is busy is faster still: between two
products of a decode step a sleeping thread takes longer to wake than a small product takes. So threads spin, a fifth of
a millisecond at most, unless others use the processors.

libgomp reads once how long to spin (``GOMP_SPINCOUNT``). With ``OMP_WAIT_POLICY=passive`` it does not spin as long as
the process has more OpenMP threads than processors, though, as GCC's manual says of that variable. So an idle
thread with a team of its own turns spinning off while it lives. Where OpenMP is another one, nothing here changes
anything.

oneDNN makes a kernel for every shape of a product, half a megabyte in a millisecond, and two caches (its own and that
of torch's binding) keep a thousand each: a run whose prompts have all lengths would grow by a gigabyte.

glibc gives large blocks, and the top of the heap, back to the system as soon as they are free. An update asks for the
same gigabyte at every step, and clearing its pages again took up to an eighth of its processor time.

Python's garbage collector would go through a step's conversations again and again, see `frozen_gc`.
"""

import ctypes
import gc
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

_KERNELS = "256"
"""Kernels that each of the two caches keeps. A step of decoding needs one for every shape of a weight, some dozen."""
_FROM_HEAP, _KEPT = 1_000_000_000, 2_000_000_000
"""Bytes: smaller blocks come from the heap, and as much of its free top stays with the process. Both are C ints."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # as <malloc.h> numbers them
_ARCH_PRCTL, _PERMIT, _TILES = 158, 0x1023, 18
"""System call, ARCH_REQ_XCOMP_PERM, and the component that is asked for, see arch_prctl(2)."""
_CGROUP_V2 = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_V1 = Path("/sys/fs/cgroup/cpu")


def prepare_threads() -> int:
    """Set threads and passive waiting for OpenMP and MKL, and what kernels and memory are kept, unless the user has.

    Call it before torch is imported. Afterwards it bounds the kernels that are kept, if no product was computed yet,
    and changes nothing else.

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
        _keep_memory()
    # read at the first product, so that they hold for a torch that is imported already, too
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _KERNELS)
    os.environ.setdefault("LRU_CACHE_CAPACITY", _KERNELS)
    chosen = os.environ.get("OMP_NUM_THREADS", threads)
    return int(chosen) if chosen.isdecimal() and int(chosen) > 0 else int(threads)


def _keep_memory() -> None:
    """Let freed memory stay with this process, where the C library is glibc and the user has not tuned it."""
    tuned = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"} & os.environ.keys()
    if platform.libc_ver()[0] == "glibc" and not tuned:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _FROM_HEAP)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)


def may_use_amx() -> bool:
    """Whether Linux lets this process use the matrices of AMX, which a processor must have; it wants to be asked."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return not ctypes.CDLL(None).syscall(_ARCH_PRCTL, _PERMIT, _TILES)


def usable_cores() -> int:
    """Cores this process may use: its affinity mask, capped by the container's CPU quota. At least 1."""
    cores, quota = _cores(), _cgroup_quota()
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def _cores() -> int:
    # macOS and Windows have no affinity call
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


SPINS = "20000"
"""Turns of libgomp's loop: some 0.2 ms. More gains little alone, costs more until neighbours are seen (see the log)."""

_WINDOW_S = 0.3
_BUSY, _QUIET = 0.25, 0.1
"""Processors that others use: from the one on threads sleep at once, up to the other they spin again."""
_STAT = Path("/proc/stat")


class Waiting:
    """Looks at what other processes use now and then, and turns spinning off and on."""

    def __init__(
        self, *, others: Callable[[], float | None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Without an effect unless threads spin.

        `others` gives the seconds that other processes have used of our processors so far; ``None`` if nobody can tell.
        """
        self._others = others or _used_by_others
        self._clock = clock
        self._seen: tuple[float, float] | None = None
        self._end: threading.Event | None = None  # of the thread that turns spinning off
        self._due = clock() if _spins() else float("inf")
        self._paused = float("-inf")

    def __del__(self) -> None:
        if self._end is not None:
            self._end.set()

    def pause(self) -> None:
        """Work ends here, for a moment or for long. What others do until it goes on is nothing to us."""
        self._paused = self._clock()

    def look(self) -> None:
        """Before work: see whether others are busy, if that was not looked at for a while."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + _WINDOW_S
        used = self._others()
        before, self._seen = self._seen, None if used is None else (now, used)
        if before is None or used is None or now - self._paused > _WINDOW_S:
            return
        busy = (used - before[1]) / (now - before[0])
        if self._end is None and busy > _BUSY:
            self._end = threading.Event()
            threading.Thread(target=_keep_a_team, args=(self._end,), name="viva-waiting", daemon=True).start()
        elif self._end is not None and busy < _QUIET:
            self._end.set()
            self._end = None


def _spins() -> bool:
    spins, threads = (os.environ.get(name, "0") for name in ("GOMP_SPINCOUNT", "OMP_NUM_THREADS"))
    return spins != "0" and threads not in ("0", "1") and _STAT.exists()


def _keep_a_team(end: threading.Event) -> None:
    import torch

    torch.ones(2**18).sum()  # large enough for all threads; the team stays as long as this thread
    end.wait()


def _used_by_others() -> float | None:
    """Seconds that our processors have worked for other processes, or waited for the host."""
    ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    try:
        for name, *columns in map(str.split, _STAT.read_text().splitlines()):
            if name in ours:
                user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, columns[:8])
                ticks += user + nice + system + irq + softirq + steal
    except (OSError, ValueError):  # some containers hide it, or fill it in their own way
        return None
    own = os.times()
    return ticks / os.sysconf("SC_CLK_TCK") - own.user - own.system


_YOUNG, _OLD = 10_000, 100
"""New objects after which the collector looks at them, and how many of its longer looks there are for one at all
objects. A thousand conversations have half a million."""


@contextmanager
def frozen_gc() -> Generator[None]:
    """Freeze the objects that exist now, and raise the garbage collector's thresholds for new ones.

    It would go through the libraries' half a million objects, and through all conversations of a step, again and
    again while these grow. Who uses this calls ``gc.collect()`` where work ends, after every step.
    """
    young, middle, old = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(max(young, _YOUNG) if young else 0, middle, max(old, _OLD))  # 0: it is turned off
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
        gc.unfreeze()
