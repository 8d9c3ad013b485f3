"""The future every request returns."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Protocol, TypeVar

from tinker.lib.public_interfaces.api_future import APIFuture

__all__ = ["Driver", "LocalFuture"]

T = TypeVar("T")
U = TypeVar("U")


class Driver(Protocol):
    """What makes requests progress."""

    def drive(self) -> None:
        """Make sure the running event loop works on pending requests."""
        ...

    def run_unit(self) -> bool:
        """Do one unit of work here and now; ``False`` if there was none."""
        ...


class LocalFuture(APIFuture[T]):
    """Result of a request. Await it, or call ``result()``, which does the pending work itself.

    Cancelling a waiting task cancels a sampling request (its rows leave the batch); a training operation, once
    submitted, is always carried out, because later ones build on it.
    """

    def __init__(self, driver: Driver, *, cancellable: bool) -> None:
        self._driver = driver
        self._state: Future[T] = Future()
        if not cancellable:
            self._state.set_running_or_notify_cancel()

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
        """Call one of these when the outcome is there; at once if it is there already."""

        def call(state: Future[T]) -> None:
            if state.cancelled():
                failed(CancelledError())
            elif (error := state.exception()) is not None:
                failed(error)
            else:
                done(state.result())

        self._state.add_done_callback(call)

    def map(self, function: Callable[[T], U]) -> "LocalFuture[U]":
        """A future of what ``function`` makes of the result. Cancelling it cancels this one."""
        mapped: LocalFuture[U] = LocalFuture(self._driver, cancellable=True)
        self.then(lambda value: mapped.resolve(function(value)), mapped.reject)
        mapped._state.add_done_callback(lambda state: self._state.cancel() if state.cancelled() else None)
        return mapped

    async def result_async(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Raises:
            TimeoutError: ``timeout`` seconds have passed.
        """
        if not self._state.done():
            self._driver.drive()
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
            if not self._driver.run_unit() and not self._state.done():
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
            self._driver.drive()
        return self._state

    def _work(self) -> None:
        while not self._state.done() and self._driver.run_unit():
            pass
