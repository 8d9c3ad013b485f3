"""Requests, their futures, and the one pump that executes everything, one unit at a time.

Nothing runs in the background of an event loop. A unit is one decode step for all running sequences, one prefill
batch, or one training micro-batch. Before it starts, the pump lets the program run until it has submitted all it
is going to submit ("quiescence"), so what is computed together depends on the program alone, never on timing:
two runs of one program give the same bits.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

from tinker.lib.public_interfaces.api_future import APIFuture

from viva.threads import Waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Upper bounds that trade memory for speed. They do not change results beyond rounding."""

    decode_rows: int = 256
    """Sequences decoded together by one sampling snapshot, or by all adapters that share a batch."""
    prefill_tokens: int = 4096
    """Padded prompt tokens in one prefill batch (a longer prompt is a batch of its own)."""
    training_tokens: int = 4096
    """Tokens in one training micro-batch, padding included (a longer sequence is a micro-batch of its own)."""
    logits: int = 2**25
    """Logits held at once while training, prompt scoring or sampling."""
    prefix_cache_bytes: int = 2**30
    """Keys and values of finished sequences kept for prompts that continue them, per snapshot (or base model, where
    adapters share a batch)."""
    merged_models: int = 2
    """Decode copies of the weights that are kept in memory: one of each merged snapshot, or of a shared base."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "prefix_cache_bytes" else 1
            if value < least:
                raise ValueError(f"{field.name} must be at least {least}, not {value}.")


T = TypeVar("T")
U = TypeVar("U")


Operation = Generator[None, None, T]
"""Work in pieces: yields after each unit, returns its result."""

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


class LocalFuture(APIFuture[T]):
    """Result of a request. Await it, or call ``result()``, which does the pending work itself.

    Cancelling a waiting task cancels a sampling request (its rows leave the batch); a training operation, once
    submitted, is always carried out, because later ones build on it.
    """

    def __init__(self, pump: Pump, *, cancellable: bool) -> None:
        self._pump = pump
        self._state: Future[T] = Future()
        if not cancellable:
            self._state.set_running_or_notify_cancel()

    @classmethod
    def resolved(cls, pump: Pump, value: T) -> "LocalFuture[T]":
        """A future that has its result."""
        future = cls(pump, cancellable=False)
        future.resolve(value)
        return future

    def done(self) -> bool:
        """Whether a result, an error or a cancellation is there."""
        return self._state.done()

    def cancelled(self) -> bool:
        """Whether the request was cancelled."""
        return self._state.cancelled()

    def resolve(self, value: T) -> None:
        """Set the result, unless the request was cancelled meanwhile."""
        if not self._state.done():
            self._state.set_result(value)

    def reject(self, error: BaseException) -> None:
        """Set the error, unless the request was cancelled meanwhile."""
        if not self._state.done():
            self._state.set_exception(error)

    def then(self, done: Callable[[T], None], failed: Callable[[BaseException], None]) -> None:
        """Call one of these when the outcome is there, at once if it is there already; it is not kept after that."""
        waiting = [(done, failed)]

        def call(state: Future[T]) -> None:
            done, failed = waiting.pop()  # the state keeps this function as long as it lives itself
            if state.cancelled():
                failed(CancelledError())
            elif (error := state.exception()) is not None:
                failed(error)
            else:
                done(state.result())

        self._state.add_done_callback(call)

    def map(self, function: Callable[[T], U]) -> "LocalFuture[U]":
        """A future of what ``function`` makes of the result. Cancelling it cancels this one."""
        mapped: LocalFuture[U] = LocalFuture(self._pump, cancellable=True)
        self.then(lambda value: mapped.resolve(function(value)), mapped.reject)
        mapped._state.add_done_callback(lambda state: self._state.cancel() if state.cancelled() else None)
        return mapped

    async def result_async(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Raises:
            TimeoutError: ``timeout`` seconds have passed.
        """
        if not self._state.done():
            self._pump.drive()
            async with asyncio.timeout(timeout):
                return await asyncio.wrap_future(self._state)
        return self._state.result()

    def result(self, timeout: float | None = None) -> T:
        """Do pending work until the result is there.

        Raises:
            TimeoutError: ``timeout`` seconds have passed.
            RuntimeError: No work is left and yet there is no result.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._state.done():
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"No result after {timeout} seconds.")
            if not self._pump.run_unit() and not self._state.done():
                raise RuntimeError(
                    "This request has no result and no work is left; it was lost. Please report it."
                )
        return self._state.result()

    def future(self) -> Future[T]:
        """This result as a ``concurrent.futures.Future``.

        Outside an event loop a helper thread does the work, so that ``concurrent.futures.wait`` comes to an end.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            if not self._state.done():
                threading.Thread(target=self._work, name="viva-engine", daemon=True).start()
        else:
            self._pump.drive()
        return self._state

    def _work(self) -> None:
        while not self._state.done() and self._pump.run_unit():
            pass


class OperationQueue:
    """Training operations of all clients, done strictly in the order of their submission.

    `before_unit` is called before every unit.
    """

    priority = 0

    def __init__(self, pump: Pump, before_unit: Callable[[], None]) -> None:
        self._pump = pump
        self._before_unit = before_unit
        self._queue: deque[tuple[Operation[Any], LocalFuture[Any]]] = deque()

    def submit(self, operation: Operation[T]) -> LocalFuture[T]:
        """Queue an operation; the future gets what it returns."""
        future: LocalFuture[T] = LocalFuture(self._pump, cancellable=False)
        self._queue.append((operation, future))
        self._pump.submit(self)
        return future

    def call(self, function: Callable[[], T]) -> LocalFuture[T]:
        """Queue an operation of one piece; the future gets what the function returns."""

        def operation() -> Operation[T]:
            yield
            return function()

        return self.submit(operation())

    def has_work(self) -> bool:
        """Whether an operation is unfinished."""
        return bool(self._queue)

    def run_unit(self) -> bool:
        """The next unit of the first operation."""
        operation, future = self._queue[0]
        self._before_unit()
        try:
            next(operation)
        except StopIteration as end:
            self._queue.popleft()
            future.resolve(end.value)
            return True
        return False

    def fail(self, error: BaseException) -> None:
        """The first operation raised; the later ones go on."""
        _, future = self._queue.popleft()
        future.reject(error)
