"""Ctrl-C and SIGTERM: stop at the next safe point, so that a resumable state can be saved."""

import asyncio
import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["Interrupts"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Turns the first signal into a request to stop; the second one ends the process as it always does.

    A request cancels the running step, except inside `protected`: there the step ends first.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._protected = False
        self._task: asyncio.Task[object] | None = None

    @contextmanager
    def listening(self) -> Generator[None]:
        """Listen on behalf of the current task. Without effect outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.request, number)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def request(self, number: signal.Signals) -> None:
        """What the signal handler does."""
        if self.received is not None:
            asyncio.get_running_loop().remove_signal_handler(number)
            os.kill(os.getpid(), number)
            return
        self.received = number
        if not self._protected and self._task is not None:
            self._task.cancel()

    @contextmanager
    def protected(self) -> Generator[None]:
        """A part that must not be left half done."""
        self._protected = True
        try:
            yield
        finally:
            self._protected = False
