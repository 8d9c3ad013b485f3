"""Sessions of clients that speak Tinker's protocol; they belong to the engine's thread."""

import time
import uuid
from collections.abc import Callable

from viva.serve.bodies import RequestError

_MOST_SESSIONS = 64
_SILENCE_S = 300.0
"""A session that says nothing for so long is over; the SDK says something every 10 s."""


class Sessions:
    """Sessions by name. What belongs to one has a name that begins with the session's and a colon."""

    def __init__(self) -> None:
        self._last_seen: dict[str, float] = {}
        self._forgetters: list[Callable[[str], None]] = []

    def at_end(self, forget: Callable[[str], None]) -> None:
        """Have a function called at the end of every session, with what the names of its belongings begin with."""
        self._forgetters.append(forget)

    def begin(self) -> str:
        """The name of a new session.

        Raises:
            RequestError: If there are too many.
        """
        for name, last_seen in list(self._last_seen.items()):
            if time.monotonic() - last_seen > _SILENCE_S:
                self.end(name)
        if len(self._last_seen) >= _MOST_SESSIONS:
            raise RequestError(f"{_MOST_SESSIONS} sessions are open; close one first (ServiceClient.close)")
        name = uuid.uuid4().hex
        self._last_seen[name] = time.monotonic()
        return name

    def see(self, name: str) -> str:
        """Note a sign of life; returns the name.

        Raises:
            RequestError: If there is no such session (410).
        """
        if name not in self._last_seen:
            raise RequestError(f"there is no session {name[:200]!r}; make a new ServiceClient", status=410)
        self._last_seen[name] = time.monotonic()
        return name

    def see_owner(self, belonging: str) -> None:
        """Note a sign of life of the session that something belongs to."""
        self.see(belonging.partition(":")[0])

    def end(self, name: str) -> None:
        """End a session with all that belongs to it."""
        self._last_seen.pop(name, None)
        for forget in self._forgetters:
            forget(f"{name}:")
