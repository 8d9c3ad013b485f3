"""One pump executes everything, one unit at a time.

Nothing runs in the background of an event loop. A unit is one decode step for all running rows, one prefill
batch, or one training micro-batch. Before it starts, the pump lets the program run until it has submitted all it
is going to submit ("quiescence"), so what is computed together depends on the program alone, never on timing:
two runs of one program give the same bits.
"""

import asyncio
import threading
from typing import Protocol

from viva.engine.waiting import Waiting

__all__ = ["Pump", "Worker"]

QUIET_YIELDS = 24
"""Turns of the event loop without a new request after which the program counts as waiting for us.

A result passes through about five turns before the program's code runs (thread-safe callback, future, task), and a
reply that wakes another agent through a few more. A turn costs microseconds, a unit milliseconds."""


class Worker(Protocol):
    """A source of work: the training queue, or the decoder of one snapshot."""

    priority: int
    """Workers of lower number go first; equal ones take turns."""

    def has_work(self) -> bool:
        """Whether a unit is waiting."""
        ...

    def run_unit(self) -> bool:
        """Do one unit; return whether it completed a request."""
        ...

    def fail(self, error: BaseException) -> None:
        """The unit at work raised ``error``: fail the requests that were part of it, and only those."""
        ...


class Pump:
    """Executes the units of all workers of one engine."""

    def __init__(self) -> None:
        self._execution = threading.RLock()
        self._bookkeeping = threading.Lock()
        self._executing = False
        self._active: list[Worker] = []
        self._submissions = 0
        self._tasks: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}
        self._waiting = Waiting()

    def submit(self, worker: Worker) -> None:
        """Announce a new request, already queued in ``worker``."""
        with self._bookkeeping:
            self._submissions += 1
            if not any(active is worker for active in self._active):
                self._active.append(worker)
        self.drive()

    def drive(self) -> None:
        """Start the pump's task in the running event loop, if there is a loop and no task yet."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        task = self._tasks.get(loop)
        if task is None or task.done():
            self._tasks = {other: running for other, running in self._tasks.items() if not other.is_closed()}
            self._tasks[loop] = loop.create_task(self._run(), name="viva-engine")

    def run_unit(self) -> bool:
        """Do one unit here and now; ``False`` if there was none."""
        return self._execute() is not None

    async def _run(self) -> None:
        await self._settle()
        while True:
            seen = self._submissions
            completed = self._execute()
            if completed is None:
                return
            await asyncio.sleep(0)
            if completed or seen != self._submissions:
                await self._settle()

    async def _settle(self) -> None:
        """Yield to the program until it submits nothing more."""
        quiet = 0
        while quiet < QUIET_YIELDS:
            seen = self._submissions
            await asyncio.sleep(0)
            quiet = quiet + 1 if seen == self._submissions else 0

    def _execute(self) -> bool | None:
        """Do one unit. Returns whether it completed a request, or ``None`` if there was no work."""
        with self._execution:
            if self._executing:
                raise RuntimeError(
                    "A result was asked for from inside the engine (a custom loss function?). "
                    "Ask for it outside, or await it."
                )
            worker = self._next()
            if worker is None:
                return None
            self._waiting.look()
            self._executing = True
            try:
                return worker.run_unit()
            except (
                BaseException
            ) as error:  # the one place where errors of a unit become errors of its requests
                worker.fail(error)
                if not isinstance(error, Exception):
                    raise
                return True
            finally:
                self._executing = False
                self._waiting.pause()

    def _next(self) -> Worker | None:
        """The next worker in turn; it goes to the end of the line."""
        with self._bookkeeping:
            self._active = [worker for worker in self._active if worker.has_work()]
            if not self._active:
                return None
            worker = min(self._active, key=lambda each: each.priority)
            self._active.remove(worker)
            self._active.append(worker)
            return worker
