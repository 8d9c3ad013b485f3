"""The end of sessions with remote engines.

From the first request on, the SDK tells a server every 10 s that its session is alive, in a thread that goes on as long
as the process: in a notebook, long after the run. Whoever opens a service client ends its session, too. That takes
`FAREWELL_S` at the most: by itself, the SDK asks for minutes where nobody answers. A server that does not hear of the
end ends the session some minutes after the last sign of life.
"""

import asyncio
import logging
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import tinker

from viva.run.secrets import without_secrets
from viva.sdk import Ending, ServiceClient
from viva.training.service import EngineConfig, make_service

FAREWELL_S: dict[Ending, float] = {"success": 5.0, "errored": 5.0, "interrupted": 1.0}
"""Seconds that a server may take to hear of a session's end; who interrupts wants to be off."""

_log = logging.getLogger(__name__)


def ending_of(error: BaseException | None) -> Ending:
    """How something ended that raised this."""
    if error is None:
        return "success"
    return "errored" if isinstance(error, Exception) else "interrupted"


async def end_session(service: ServiceClient, ending: Ending) -> None:
    """End a session: tell the server, and stop the signs of life whatever it answers, which changes nothing here."""
    try:
        async with asyncio.timeout(FAREWELL_S[ending]):
            await service.close(ending)
    except (tinker.TinkerError, TimeoutError, RuntimeError) as error:
        _log.info("the server did not take the end of a session: %s", without_secrets(repr(error)))


class Engines:
    """Service clients of a command, one for each engine; their sessions end with the context.

    Args:
        state_dir: Of local engines; without one, they are for sampling, which saves nothing.
    """

    def __init__(self, state_dir: Path | None = None) -> None:
        self._state_dir = state_dir or Path(tempfile.gettempdir())
        self._services: dict[EngineConfig, ServiceClient] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(end_session(each, ending_of(error)) for each in self._services.values()))

    def service(self, config: EngineConfig) -> ServiceClient:
        """The service client of an engine, opened when it is first asked for.

        Raises:
            ValueError: As `make_service`.
        """
        if config not in self._services:
            self._services[config] = make_service(config, state_dir=self._state_dir)
        return self._services[config]
