"""State that a server keeps for clients of Tinker's protocol: sessions, results, and the weights that they may name.

All of it belongs to the engine's thread.
"""

import asyncio
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from viva.engine import LocalSamplingClient, LocalServiceClient
from viva.engine.checkpoint import read_state
from viva.serve.bodies import JsonObject, RequestError
from viva.serve.transport import told_error

_MOST_SESSIONS = 64
_SILENCE_S = 300.0
"""A session that says nothing for so long is over; the SDK says something every 10 s."""


class Sessions:
    """Sessions by name. What belongs to one has a name that begins with the session's and a colon.

    Args:
        forget: Called at the end of every session, with what the names of its belongings begin with.
    """

    def __init__(self, forget: Callable[[str], None]) -> None:
        self._forget = forget
        self._last_seen: dict[str, float] = {}

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
        """End a session with all that belongs to it; where there is none, it is over already."""
        if self._last_seen.pop(name, None) is not None:
            self._forget(f"{name}:")


_MOST_FETCHED = 256
"""Results that are kept after they were fetched, for a client that lost the answer and asks again."""

Result = JsonObject | bytes
"""JSON, or bytes in the SDK's binary form."""


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

    def add(self, name: str, begin: Callable[[], Awaitable[Result]]) -> None:
        """Begin the work of a request, and keep its result; errors of the work are results, too.

        Raises:
            RequestError: If there are too many requests (429).
        """
        if len(self._open) >= self._limit:
            raise RequestError(
                f"{len(self._open)} requests are unfinished or not fetched, and no more are taken; try again in a "
                "moment",
                status=429,
            )
        self._open[name] = asyncio.ensure_future(_finished(begin))

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


async def _finished(begin: Callable[[], Awaitable[Result]]) -> Result:
    try:
        return await begin()
    except Exception as error:  # noqa: BLE001 - the engine's errors are results of the requests that they are of
        return _failed(told_error(error))


def _failed(error: RequestError) -> Result:
    category = "user" if error.status < 500 else "server"
    return {"error": str(error), "category": category}


_PATH = re.compile(r"tinker://(client-[0-9]{6,12})/(weights|sampler_weights)/([A-Za-z0-9_.-]{1,200})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWeights:
    """The only base model of a server, and what was saved in the folder of its service."""

    service: LocalServiceClient
    """Saves there."""
    model: str
    """The base model, as the engine knows it."""
    names: tuple[str, ...]
    """Further names of it."""
    state_dir: Path
    """The folder."""

    def check_base(self, name: str) -> None:
        """Refuse another base model.

        Raises:
            RequestError: If it is one (404).
        """
        known = (self.model, *self.names)
        if name not in known and Path(name).resolve() != Path(self.model).resolve():
            raise RequestError(
                f"model {name[:200]!r} is not served here; served: {', '.join(dict.fromkeys(known))}",
                status=404,
            )

    def folder(self, address: str) -> Path:
        """The folder of saved weights.

        Raises:
            RequestError: If the address is none, or nothing lies there.
        """
        match = _PATH.fullmatch(address)
        if match is None or set(match[3]) == {"."}:
            raise RequestError(
                "the path must be tinker://CLIENT/weights/NAME or tinker://CLIENT/sampler_weights/NAME, as saving "
                f"returned it; got {address[:200]!r}"
            )
        folder = self.state_dir.joinpath(*match.groups())
        if not folder.is_dir():
            raise RequestError(f"there are no saved weights at {address}", status=404)
        return folder

    def sampler(self, address: str | None) -> LocalSamplingClient:
        """A sampler of saved weights, or of the base model as it is."""
        path = None if address is None else str(self.folder(address))
        return self.service.create_sampling_client(model_path=path, base_model=self.model)

    def info(self, body: JsonObject) -> JsonObject:
        """Base model and adapter of saved weights."""
        state = read_state(str(self.folder(str(body.get("tinker_path")))))
        rank = state.settings.rank
        return {"base_model": state.base_model, "is_lora": rank > 0, "lora_rank": rank or None}

    async def delete(self, run: str, checkpoint: str) -> JsonObject:
        """Delete saved weights."""
        folder = self.folder(f"tinker://{run}/{checkpoint}")
        await self.service.create_rest_client().delete_checkpoint_from_tinker_path(str(folder))
        return {}


def address_of(folder: str) -> str:
    """The address of saved weights, for clients that do not see this disk."""
    return "tinker://" + "/".join(Path(folder).parts[-3:])
