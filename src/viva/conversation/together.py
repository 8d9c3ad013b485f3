"""Calls that are in flight together and end together."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

__all__ = ["together"]

_T = TypeVar("_T")


async def together(calls: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Results in the order of the calls.

    If one raises, or the caller is cancelled, the others are cancelled and waited for: nothing is left running.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
