"""A server of chat completions on this machine that does as it is told: answers, rate limits, failures, rubbish."""

import json
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from web_servers import QuietHandler, serving


@dataclass
class Said:
    """One response."""

    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)


def completion(text: str, tokens: list[tuple[str, dict[str, float]]] | None = None, **usage: int) -> Said:
    """A whole answer, with the log-probabilities of what could stand in the place of each of its tokens."""
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": text},
    }
    if tokens is not None:
        rows = [
            {
                "token": token,
                "logprob": alternatives.get(token, -9.0),
                "top_logprobs": [{"token": other, "logprob": value} for other, value in alternatives.items()],
            }
            for token, alternatives in tokens
        ]
        choice["logprobs"] = {"content": rows}
    counted = {"prompt_tokens": 100, "completion_tokens": 10} | usage
    return Said(body=json.dumps({"model": "m", "choices": [choice], "usage": counted}).encode())


@dataclass
class ChatServer:
    """What it was asked, and how many requests were under way at once."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    most_at_once: int = 0


@contextmanager
def chat_server(
    say: Callable[[dict[str, Any], int], Said], *, gate: threading.Barrier | None = None
) -> Generator[ChatServer]:
    """A server that says what a function of the request and its number (from 0) gives.

    Args:
        say: The function.
        gate: Every request waits there for others, up to the barrier's own time-out.
    """
    server, lock, under_way = ChatServer(), threading.Lock(), [0]

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(server.requests)
                server.requests.append({"path": self.path, **request})
                server.keys.append(self.headers.get("Authorization"))
                under_way[0] += 1
                server.most_at_once = max(server.most_at_once, under_way[0])
            try:
                if gate is not None:
                    gate.wait()
            except threading.BrokenBarrierError:
                pass
            said = say(request, number)
            with lock:
                under_way[0] -= 1
            with suppress(ConnectionError):  # it did not wait
                self.answer(said.status, said.body, **{"Content_Type": "application/json", **said.headers})

    with serving(Handler) as port:
        server.url = f"http://127.0.0.1:{port}/v1"
        yield server


def in_turn(*said: Said) -> Callable[[dict[str, Any], int], Said]:
    """One after another, the last for ever."""
    rest: Iterator[Said] = iter(said[:-1])
    return lambda request, number: next(rest, said[-1])
