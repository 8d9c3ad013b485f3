"""A proxy before a server that does what networks and gateways do: it delays, loses, cuts and repeats.

What happens to the n-th request of a kind is fixed before: by a seed, or by naming the faults.
"""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

import httpx

PAUSE_S = 0.3


class Fault(StrEnum):
    HELD = "held"
    """Passed on after a pause."""
    LATE = "late"
    """Answered after a pause."""
    LOST_REQUEST = "lost request"
    """The connection is closed, and the server hears of nothing."""
    UNAVAILABLE = "unavailable"
    """Answered with 503, and the server hears of nothing."""
    LOST_ANSWER = "lost answer"
    """The server has done it, and the connection is closed."""
    CUT_ANSWER = "cut answer"
    """The server has done it, and the connection is closed in the middle of its answer."""
    BAD_GATEWAY = "bad gateway"
    """The server has done it, and the answer is 502."""
    REPEATED = "repeated"
    """The server is asked twice, as a gateway does that lost the first answer; the second one is passed on."""


UNHEARD = (Fault.HELD, Fault.LATE, Fault.LOST_REQUEST, Fault.UNAVAILABLE)
"""After these the server does it once."""
Choose = Callable[[str], Fault | None]


def named(faults: Mapping[str, Sequence[Fault | None]]) -> Choose:
    """The faults of the first requests of each kind; the later ones have none."""
    left = {verb: iter(of_verb) for verb, of_verb in faults.items()}
    return lambda verb: next(left.get(verb, iter(())), None)


def drawn(seed: int, *, rate: float, faults: Mapping[str, Sequence[Fault]]) -> Choose:
    """For each kind of request a stream of its own, since requests of several kinds arrive in any order."""
    streams = {verb: random.Random(f"{seed} {verb}") for verb in faults}

    def choose(verb: str) -> Fault | None:
        stream = streams.get(verb)
        if stream is None or stream.random() >= rate:
            return None
        return stream.choice(faults[verb])

    return choose


class Proxy:
    """Passes requests on, with what `choose` says of each.

    Attributes:
        seen: How often the server was asked, by kind (the last part of the path).
        done: The faults, by kind of request and of fault.
        sent: Bytes of requests, by kind, without headers.
        received: Bytes of answers, likewise.
    """

    def __init__(self, address: str, choose: Choose):
        self.address, self.choose = address, choose
        self.seen: Counter[str] = Counter()
        self.done: Counter[tuple[str, Fault]] = Counter()
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.own_address = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._connection, "127.0.0.1", 0))
        self.own_address = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_):
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _end(self):
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader, writer):
        try:
            async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as server:
                while await self._exchange(reader, writer, server):
                    pass
        except (asyncio.IncompleteReadError, ConnectionError, httpx.TransportError, asyncio.CancelledError):
            pass  # either side has gone, and the other one sees a closed connection; or this proxy is done
        finally:
            writer.close()

    async def _exchange(self, reader, writer, server: httpx.AsyncClient) -> bool:
        """One request; whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = httpx.Headers([line.split(": ", 1) for line in head[1:] if line])
        body = await reader.readexactly(int(headers.get("Content-Length", 0)))
        for name in ("Host", "Connection", "Content-Length", "Accept-Encoding", "Transfer-Encoding"):
            headers.pop(name, None)
        verb = path.partition("?")[0].rpartition("/")[2]
        fault = self.choose(verb)
        if fault is not None:
            self.done[verb, fault] += 1
        if fault is Fault.HELD:
            await asyncio.sleep(PAUSE_S)
        if fault is Fault.LOST_REQUEST:
            return False
        if fault is Fault.UNAVAILABLE:
            return await _answer(writer, 503, b"{}")
        for _ in range(2 if fault is Fault.REPEATED else 1):
            self.seen[verb] += 1
            answer = await server.request(method, self.address + path, headers=headers, content=body)
            self.sent[verb] += len(body)
            self.received[verb] += len(answer.content)
        if fault is Fault.LATE:
            await asyncio.sleep(PAUSE_S)
        if fault is Fault.LOST_ANSWER:
            return False
        if fault is Fault.BAD_GATEWAY:
            return await _answer(writer, 502, b"{}")
        return await _answer(
            writer, answer.status_code, answer.content, answer.headers, is_cut=fault is Fault.CUT_ANSWER
        )


async def _answer(writer, status, content, headers=None, *, is_cut=False) -> bool:
    kept = {
        name: value
        for name, value in (headers or {"content-type": "application/json"}).items()
        if name in ("content-type", "location", "expires")
    }
    lines = [f"HTTP/1.1 {status} -", *(f"{name}: {value}" for name, value in kept.items())]
    whole = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode("latin-1") + content
    writer.write(whole[: len(whole) - (len(content) + 1) // 2] if is_cut else whole)
    await writer.drain()
    return not is_cut
