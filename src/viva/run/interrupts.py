"""Ctrl-C and SIGTERM: stop within seconds, in a state that can be resumed.

A signal cancels the running step; inside `Interrupts.protected` (an update, a checkpoint) the step has `GRACE_S` to
end first. A thread of its own hears signals while the engine computes; it ends the process at the second one, or after
`LIMIT_S`. Whatever the moment, the run can be resumed from the last checkpoint and the journal.
"""

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

GRACE_S = 1.0
"""Seconds that a protected part may go on."""
LIMIT_S = 3.5
"""Seconds after the signal at which the process ends at the latest if it still listens: an interpreter with torch may
need another second to end by itself."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LIMIT_REACHED = 0
"""Stands for a signal when the limit is reached; no signal has this number."""
_SHOW_CURSOR = b"\x1b[?25h"


class Interrupts:
    """Turns the first signal into a request to stop; the second one ends the process at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.cut_short = False
        """Whether a protected part was left unfinished."""
        self._protected = False
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def listening(self) -> Generator[None]:
        """Listen on behalf of the current task. Without effect outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._task = asyncio.current_task()
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        listener = threading.Thread(
            target=self._listen,
            args=(reader, asyncio.get_running_loop()),
            name="viva-interrupts",
            daemon=True,
        )
        listener.start()
        # the interpreter itself writes to the socket, at once; handlers run only between its instructions
        handlers = {number: signal.signal(number, _do_nothing) for number in _SIGNALS}
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            writer.close()
            listener.join()
            self._task = None  # a signal that was heard a moment ago ends nothing that comes after

    @contextmanager
    def protected(self) -> Generator[None]:
        """A part that should not be left half done."""
        self._protected = True
        try:
            yield
        finally:
            self._protected = False
            if self._timer is not None:
                self._timer.cancel()

    def _listen(self, reader: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for signals, then for the limit; ends when the other end of the socket is closed."""
        first: signal.Signals | None = None
        deadline = 0.0
        with reader:
            while True:
                reader.settimeout(None if first is None else max(0.001, deadline - time.monotonic()))
                try:
                    heard = reader.recv(1)
                except TimeoutError:
                    heard = bytes([_LIMIT_REACHED])
                if not heard:
                    return
                if first is not None and heard[0] in (*_SIGNALS, _LIMIT_REACHED):
                    _leave(first)
                if first is None and heard[0] in _SIGNALS:
                    first = signal.Signals(heard[0])
                    deadline = time.monotonic() + LIMIT_S
                    loop.call_soon_threadsafe(self._stop, first)

    def _stop(self, number: signal.Signals) -> None:
        self.received = number
        if self._protected:
            self._timer = asyncio.get_running_loop().call_later(GRACE_S, self._cut)
        elif self._task is not None:
            self._task.cancel()

    def _cut(self) -> None:
        self.cut_short = True
        if self._task is not None:
            self._task.cancel()


def _leave(number: signal.Signals) -> None:
    """End the process as if it were killed."""
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), _SHOW_CURSOR)
    os.write(sys.stderr.fileno(), f"\nended at once by {number.name}; the run can be resumed\n".encode())
    os._exit(128 + number)


def _do_nothing(number: int, frame: object) -> None:
    del number, frame
