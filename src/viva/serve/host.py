"""The engine in a thread of its own, so that the server answers while it computes."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class EngineThread:
    """An event loop in a thread, in which all work with the engine and its tokenizers is done.

    Neither is made for several threads; a request that is cancelled here is cancelled there.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="viva-serve-engine", daemon=True)
        self._thread.start()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work, for a caller outside every event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work; cancelling the wait cancels the work."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        """Cancel what is left and end the thread."""
        asyncio.run_coroutine_threadsafe(_cancel_rest(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_rest() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def in_loop(function: Callable[[T], None]) -> Callable[[T], None]:
    """A function that other threads may call: it is run in the event loop of this one, in the order of the calls."""
    loop = asyncio.get_running_loop()

    def call(value: T) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(function, value)

    return call
