"""Requests and answers on the wire (whose, how large, how long, errors), and the thread that the engine computes in."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from viva.loopback import is_own_host
from viva.serve.bodies import RequestError

T = TypeVar("T")
Work: TypeAlias = Coroutine[Any, Any, T]

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
_TOLD = (HTTPException, ClientDisconnect, ValueError, TimeoutError, FloatingPointError)
"""Errors of requests: the framework's own (no such address, no such method), and the engine's."""


def application(routes: Sequence[Route]) -> Starlette:
    """An application whose errors are answers (`told_error`), below ``/api/`` as Tinker's SDK shows them."""

    async def refuse(request: Request, error: Exception) -> Response:
        told = told_error(error)
        if request.scope["path"].startswith("/api/") and told.status != 429:
            return json_answer({"detail": str(told)}, told.status)
        return error_answer(told)

    return Starlette(routes=routes, exception_handlers=dict.fromkeys(_TOLD, refuse))


def told_error(error: Exception) -> RequestError:
    """The answer to a request that an error ended."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, HTTPException):
        return RequestError(error.detail, status=error.status_code)
    if isinstance(error, ClientDisconnect):  # nobody hears it
        return RequestError("the client has closed the connection", status=499)
    if isinstance(error, TimeoutError):
        return RequestError(
            "the answer took too long; ask for fewer tokens at once, or give 'viva serve' a longer timeout_s",
            status=504,
        )
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        return RequestError(f"{place}: {first['msg']}", param=place)
    if isinstance(error, ValueError | NotImplementedError):
        return RequestError(str(error))
    return RequestError(f"{type(error).__name__}: {error}", status=500)


def error_answer(error: RequestError) -> Response:
    """An error in the form of OpenAI's interface."""
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if error.status == 429 else {}
    return json_answer({"error": _described(error)}, error.status, headers)


def _described(error: RequestError) -> dict[str, str | None]:
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"message": str(error), "type": kind, "param": error.param, "code": error.code}


def json_answer(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer of JSON."""
    return Response(_json(value), status, headers, "application/json")


def _json(value: object) -> bytes:
    """JSON in ASCII: a name that a client made up may hold half of a surrogate pair, which UTF-8 cannot spell."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def given_key(headers: Headers) -> str:
    """The API key of a request; empty if it has none."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


class TokenGuard:
    """Wraps an application: a request must carry the token, and come from no web page of another site.

    Args:
        app: What is guarded.
        is_known: Whether a client may ask that gives this as ``Authorization: Bearer KEY`` or ``X-API-Key: KEY``.
        checks_host: Whether the host name must be one of this machine's own, as is right on the loopback address.
    """

    def __init__(self, app: ASGIApp, *, is_known: Callable[[str], bool], checks_host: bool) -> None:
        self._app = app
        self._is_known = is_known
        self._checks_host = checks_host

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
        if not self._is_known(given_key(headers)):
            raise RequestError(
                "the token is missing or wrong; give the one that 'viva serve' printed as the API key",
                status=401,
                code="invalid_api_key",
            )


async def read_body(request: Request, limit: int) -> bytes:
    """A request's body.

    Raises:
        RequestError: If it is larger than the limit in bytes (413), compressed (415) or too slow (408).
        ClientDisconnect: If it breaks off.
    """
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RequestError("send the body as it is, not compressed", status=415)
    too_large = RequestError(f"the body is larger than {limit} bytes; send less at once", status=413)
    if int(request.headers.get("content-length", "0")) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_UPLOAD_S):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_large
    except TimeoutError as error:
        raise RequestError(f"the body did not arrive within {_UPLOAD_S:g} s", status=408) from error
    return bytes(body)


async def unless_gone(work: Work[T], receive: Receive) -> T:
    """The result of work, which is cancelled when the client of a request goes, whose body was read.

    Raises:
        ClientDisconnect: If it went.
    """
    answering = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
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

    A later error is an event of its own.
    """
    async with aclosing(events):
        event: object | None = await anext(events)
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
        while event is not None:
            await send(_part(_json(event), more=True))
            try:
                event = await anext(events, None)
            except _TOLD as error:
                event = {"error": _described(told_error(error)) | {"type": "server_error"}}
    await send(_part(b"[DONE]", more=False))


def _part(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": more}


class EngineThread:
    """An event loop in a thread, in which all work with the engine and its tokenizers is done.

    Neither is made for several threads; a request that is cancelled here is cancelled there.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="viva-serve-engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop):  # at its end, it cancels what is left
            self._loop.run_forever()

    def do(self, work: Work[T]) -> T:
        """The result of work, for a caller outside every event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def run(self, work: Work[T]) -> T:
        """The result of work; cancelling the wait cancels the work."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        """Cancel what is left and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
