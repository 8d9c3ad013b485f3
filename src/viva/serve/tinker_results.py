"""Results of requests that are answered later: the SDK sends one, gets its name, and asks for the result by it."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from viva.serve.bodies import RequestError
from viva.serve.transport import told_error

_MOST_FETCHED = 256
"""Results that are kept after they were fetched, for a client that lost the answer and asks again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A result: JSON, or bytes in the SDK's binary form."""

    value: dict[str, Any] | bytes


class Results:
    """Results by the names of their requests; belongs to the engine's thread.

    Args:
        limit: Requests at once that are unfinished, or whose results nobody has fetched.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: dict[str, asyncio.Task[Result]] = {}
        self._fetched: OrderedDict[str, asyncio.Task[Result]] = OrderedDict()

    def knows(self, name: str) -> bool:
        """Whether a request of this name was made before."""
        return name in self._open or name in self._fetched

    def check_room(self) -> None:
        """Refuse a further request if there are too many.

        Raises:
            RequestError: If so (429).
        """
        if len(self._open) >= self._limit:
            raise RequestError(
                f"{len(self._open)} requests are unfinished or not fetched, and no more are taken; try again in a "
                "moment",
                status=429,
            )

    def add(self, name: str, work: Awaitable[Any], write: Callable[[Any], dict[str, Any] | bytes]) -> None:
        """Keep the result of work that has begun.

        Args:
            name: Of the request.
            work: The engine's.
            write: Makes the result of what the work gives.
        """
        self._open[name] = asyncio.ensure_future(_finished(work, write))

    async def fetch(self, name: str, wait_s: float) -> Result | None:
        """A result, or ``None`` if it is not there after a while.

        Raises:
            RequestError: If no such request was made, or its result was fetched long ago (410).
        """
        task = self._open.get(name) or self._fetched.get(name)
        if task is None:
            raise RequestError(f"no request {name[:200]!r} is known; send it again", status=410)
        done, _ = await asyncio.wait({task}, timeout=wait_s)
        if not done:
            return None
        if name in self._open:
            self._fetched[name] = self._open.pop(name)
            while len(self._fetched) > _MOST_FETCHED:
                self._fetched.popitem(last=False)
        return _failed(RequestError("the request was cancelled")) if task.cancelled() else task.result()

    def cancel(self, name: str) -> None:
        """Give up a request; what it was doing is stopped if it can be."""
        if task := self._open.pop(name, None):
            task.cancel()

    def forget(self, prefix: str) -> None:
        """Give up all requests whose names begin so."""
        for name in [name for name in self._open if name.startswith(prefix)]:
            self.cancel(name)
        for name in [name for name in self._fetched if name.startswith(prefix)]:
            del self._fetched[name]


async def _finished(work: Awaitable[Any], write: Callable[[Any], dict[str, Any] | bytes]) -> Result:
    try:
        return Result(value=write(await work))
    except Exception as error:  # noqa: BLE001 - the engine's errors are results of the requests that they are of
        return _failed(told_error(error))


def _failed(error: RequestError) -> Result:
    category = "user" if error.status < 500 else "server"
    return Result(value={"error": str(error), "category": category})


def begun(begin: Callable[[], Awaitable[Any]]) -> Awaitable[Any]:
    """Work, or the engine's refusal to begin it as its result."""
    try:
        return begin()
    except (ValueError, TypeError, RuntimeError) as error:
        return _fail(told_error(error))


async def _fail(error: RequestError) -> None:
    raise error
