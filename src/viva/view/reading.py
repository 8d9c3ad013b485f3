"""Reading what is new in runs' files beside the requests, in slices so short that no request waits for long."""

import threading
import time
from collections.abc import Sequence

from viva.view.run_index import RunIndex

__all__ = ["Reading"]

_SLICE_S = 0.02
_PAUSE_S = 0.001
"""A lock that is taken again at once is hardly ever given to those who wait for it."""
_WAIT_S = 0.1
"""How long a request waits, so that of a small run the first answer is the whole one."""


class Reading:
    """Keeps indexes up to date while somebody asks.

    Args:
        runs: Their indexes.
        lock: Guards them.
    """

    def __init__(self, runs: Sequence[RunIndex], lock: threading.Lock) -> None:
        self._runs = runs
        self._lock = lock
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._unread = list(runs)

    def go_on(self) -> None:
        """Look for what is new, unless that is under way, and wait a moment for it."""
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._unread = list(self._runs)
                self._thread = threading.Thread(target=self._read, daemon=True)
                self._thread.start()
            thread = self._thread
        thread.join(_WAIT_S)

    def is_complete(self, run: RunIndex) -> bool:
        """Whether all of a run was read that was there when it was last looked at."""
        return all(run is not each for each in self._unread)

    def wait_for(self, run: RunIndex, step: int, group: int) -> None:
        """Wait until a conversation was read, or all was: a link to it may be the first thing that is asked for."""
        while (step, group) not in run.entries and not self.is_complete(run):
            self.go_on()

    def _read(self) -> None:
        while self._unread:
            with self._lock:
                if self._unread[0].refresh(_SLICE_S):
                    del self._unread[0]
            time.sleep(_PAUSE_S)
