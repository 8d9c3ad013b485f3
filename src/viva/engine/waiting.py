"""Whether OpenMP's threads spin for a moment where they wait for one another, or sleep at once.

Between two products of a decode step a sleeping thread takes longer to wake than a small product takes. But a thread
that spins beside another busy process keeps the processor from the thread it waits for: a step then takes four times
as long. So threads spin, a fifth of a millisecond at most, unless others use the processors.

libgomp reads once how long to spin (``GOMP_SPINCOUNT``). With ``OMP_WAIT_POLICY=passive`` it does not spin as long as
the process has more OpenMP threads than processors, though, as GCC's manual says of that variable. So an idle
thread with a team of its own turns spinning off while it lives. Where OpenMP is another one, nothing here changes
anything.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["SPINS", "Waiting"]

SPINS = "20000"
"""Turns of libgomp's loop: some 0.2 ms. More gains little alone, costs more until neighbours are seen (see the log)."""

_WINDOW_S = 0.3
_BUSY, _QUIET = 0.25, 0.1
"""Processors that others use: from the one on threads sleep at once, up to the other they spin again."""
_STAT = Path("/proc/stat")


class Waiting:
    """Looks at what other processes use now and then, and turns spinning off and on."""

    def __init__(
        self,
        *,
        others: Callable[[], float | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Does nothing unless threads have been told to spin.

        Args:
            others: Seconds that other processes have used of our processors so far; ``None`` if nobody can tell.
            clock: In seconds.
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
