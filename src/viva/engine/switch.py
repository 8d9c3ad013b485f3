"""One line that makes ``tinker.ServiceClient`` the local one, for programs that make their clients themselves."""

from types import TracebackType
from typing import Any, Self, cast

import tinker

from viva.engine.service import LocalServiceClient

__all__ = ["Switch", "install"]


class Switch:
    """``tinker.ServiceClient`` is the local engine until `undo`, or until the end of a ``with`` block.

    Attributes:
        service: The engine; all clients that are made meanwhile share it.
    """

    def __init__(self, service: LocalServiceClient) -> None:
        self.service = service
        self._before: Any = tinker.ServiceClient
        self._class = _local_class(service)
        cast(Any, tinker).ServiceClient = self._class

    def undo(self) -> None:
        """Put back what was there before; a second time it does nothing.

        Raises:
            RuntimeError: If something else was put in its place meanwhile.
        """
        if self._before is None:
            return
        if cast(Any, tinker).ServiceClient is not self._class:
            raise RuntimeError(
                "tinker.ServiceClient was replaced again after this install(); undo the later one first"
            )
        cast(Any, tinker).ServiceClient, self._before = self._before, None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def install(service: LocalServiceClient | None = None, **options: Any) -> Switch:
    """Make ``tinker.ServiceClient`` the local engine, so that other programs' training loops run on it unchanged.

    Modules that took the class itself before (``from tinker import ServiceClient``) keep what they took.

    Args:
        service: The engine; by default a new one.
        **options: Of the new one, as `LocalServiceClient` takes them: ``state_dir`` for checkpoints, ``device``, ...

    Returns:
        What undoes it; also a context manager.

    Raises:
        ValueError: If both are given, or an option makes no sense.
    """
    if service is not None and options:
        raise ValueError(
            f"install() takes a service or options for a new one, not both; got {sorted(options)}"
        )
    return Switch(service or LocalServiceClient(**options))


def _local_class(service: LocalServiceClient) -> type[LocalServiceClient]:
    class InstalledServiceClient(LocalServiceClient):
        """`LocalServiceClient` with the arguments of ``tinker.ServiceClient``; all of them share one engine."""

        def __init__(self, *args: Any, base_url: str | None = None, **kwargs: Any) -> None:
            # the other arguments (metadata, names, keys) say who asks a server
            if base_url is not None:
                raise ValueError(
                    # not the address itself: it may hold a password
                    "base_url names a server, but viva.engine.install() put the local engine in its place. "
                    "Leave base_url out, or undo the install."
                )
            self._core = service._core

    return InstalledServiceClient
