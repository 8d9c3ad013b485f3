"""Requests and answers on the wire (whose, how large, how long, errors), and the thread that the engine computes in."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from viva.loopback import is_own_host, same_secret
from viva.serve.bodies import RequestError

T = TypeVar("T")

_UPLOAD_S = 60.0
"""Longest time that a body may take to arrive."""
_RETRY_AFTER_S = 1
_EVENT_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ClientGoneError(ConnectionError):
    """The client has closed the connection."""


@contextmanager
def telling() -> Generator[None]:
    """Within this context, the engine's errors become answers.

    Raises:
        RequestError: In their place.
    """
    try:
        yield
    except (ValueError, TimeoutError, FloatingPointError) as error:
        raise told_error(error) from error


def told_error(error: Exception) -> RequestError:
    """The answer to a request that an error ended."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, TimeoutError):
        return RequestError(
            "the answer took too long; ask for fewer tokens at once, or give 'viva serve' a longer timeout_s",
            status=504,
        )
    if isinstance(error, ValueError | NotImplementedError):
        return RequestError(str(error))
    return RequestError(f"{type(error).__name__}: {error}", status=500)


def error_answer(error: RequestError) -> Response:
    """An error in the form of OpenAI's interface."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    content = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if error.status == 429 else {}
    return json_answer({"error": content}, error.status, headers)


def json_answer(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer of JSON."""
    body = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    return Response(body, status, headers, "application/json")


def http_error(_: Request, error: Exception) -> Response:
    """The framework's own errors (no such address, no such method) in the same form."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else "internal error"
    return error_answer(RequestError(detail, status=status))


def given_key(headers: Headers) -> str:
    """The API key of a request; empty if it has none."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address as an application: its `RequestError` is an answer, and a client that has gone gets none."""

    answer: Callable[[Scope, Receive, Send], Awaitable[None]]
    refusal: Callable[[RequestError], Response] = error_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        try:
            await self.answer(scope, receive, send)
        except RequestError as error:
            await self.refusal(error)(scope, receive, send)
        except ClientGoneError:
            return


class TokenGuard:
    """Wraps an application: a request must carry the token, and come from no web page of another site.

    Args:
        app: What is guarded.
        token: A secret, sent as ``Authorization: Bearer TOKEN`` or ``X-API-Key: TOKEN``.
        checks_host: Whether the host name must be one of this machine's own, as is right on the loopback address.
        ends_at: Character at which the token ends in what clients give; what follows is for the application.
    """

    def __init__(self, app: ASGIApp, *, token: str, checks_host: bool, ends_at: str | None = None) -> None:
        self._app = app
        self._token = token
        self._checks_host = checks_host
        self._ends_at = ends_at

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            return
        try:
            self._check(Headers(scope=scope))
        except RequestError as error:
            await error_answer(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        if self._checks_host and not is_own_host(headers.get("host", "")):
            raise RequestError("this host name is not allowed", status=403)
        if "origin" in headers or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise RequestError("requests of web pages are not answered", status=403)
        given = given_key(headers)
        if self._ends_at is not None:
            given = given.partition(self._ends_at)[0]
        if not same_secret(given, self._token):
            raise RequestError(
                "the token is missing or wrong; give the one that 'viva serve' printed as the API key",
                status=401,
                code="invalid_api_key",
            )


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """A request's body.

    Raises:
        RequestError: If it is larger than the limit in bytes (413), compressed (415) or too slow (408).
        ClientGoneError: If it breaks off.
    """
    headers = Headers(scope=scope)
    if headers.get("content-encoding", "identity") != "identity":
        raise RequestError("send the body as it is, not compressed", status=415)
    length = headers.get("content-length", "0")
    if length.isdecimal() and len(length) < 20 and int(length) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(_UPLOAD_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise _too_large(limit)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError as error:
        raise RequestError(f"the body did not arrive within {_UPLOAD_S:g} s", status=408) from error


def _too_large(limit: int) -> RequestError:
    return RequestError(f"the body is larger than {limit} bytes; send less at once", status=413)


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of work, which is cancelled when the client goes.

    Args:
        work: The answer in the making.
        receive: Of the request, whose body was read.

    Raises:
        ClientGoneError: If it went.
    """
    answering = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientGoneError
        return await answering
    finally:
        for task in (answering, watching):
            task.cancel()
        await asyncio.gather(answering, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_events(events: AsyncGenerator[object], send: Send) -> None:
    """Server-sent events of JSON. The first is made before anything is sent, so that its error is an answer.

    A later `RequestError` is an event of its own.
    """
    async with aclosing(events):
        event: object | None = await anext(events)
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
        while event is not None:
            await send({"type": "http.response.body", "body": _event(event), "more_body": True})
            try:
                event = await anext(events, None)
            except RequestError as error:
                event = {
                    "error": {"message": str(error), "type": "server_error", "param": None, "code": None}
                }
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


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
