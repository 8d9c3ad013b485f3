"""The SDK's signs of life to its servers, in this process."""

import asyncio
from typing import Any

from tinker.lib import internal_client_holder


def heartbeats() -> set[Any]:
    """The tasks that send them, one for each open session."""
    loop = internal_client_holder._internal_client_holder_thread_singleton.get_loop()
    return {
        task
        for task in asyncio.all_tasks(loop)
        if task.get_coro().__qualname__.endswith("_session_heartbeat")  # type: ignore[union-attr]
    }
