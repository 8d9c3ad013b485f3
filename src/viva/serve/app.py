"""The server's application: OpenAI's interface to the policies that are served, and Tinker's protocol beside it."""

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from viva.loopback import is_loopback, run_server
from viva.serve.answers import Answer, chat_job, completion_job, model_entry
from viva.serve.bodies import ChatBody, CompletionBody, RequestError, parse_body
from viva.serve.sampling import Job, Piece, ServedPolicy
from viva.serve.tinker_app import tinker_routes
from viva.serve.tinker_engine import TinkerEngine
from viva.serve.transport import (
    Endpoint,
    EngineThread,
    TokenGuard,
    error_answer,
    http_error,
    in_loop,
    json_answer,
    read_body,
    send_events,
    telling,
    unless_gone,
)

TOKEN_VARIABLE = "VIVA_SERVE_TOKEN"
"""The environment variable that may hold the token."""

_SHORTEST_TOKEN = 16
_PREFIX = "tml-"
"""The SDK of Tinker wants keys to begin so."""


class Places:
    """Places of requests that are being answered or wait for it.

    Args:
        limit: At least 1.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.taken = 0

    @contextmanager
    def take(self) -> Generator[None]:
        """A place for as long as the context lasts.

        Raises:
            RequestError: If all are taken (429).
        """
        if self.taken >= self._limit:
            raise RequestError(
                f"{self.taken} requests are being answered or wait, and no more are taken (queue={self._limit}); try "
                "again in a moment",
                status=429,
                code="rate_limit_exceeded",
            )
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Bounds of what clients can take up."""

    queue: int = 256
    """Requests that may be answered or wait at once; further ones are told to come back."""
    body_bytes: int = 16 * 2**20
    """Size of a request's body."""
    timeout_s: float = 600.0
    """Longest time for an answer."""

    def __post_init__(self) -> None:
        """Reject limits that let nothing through."""
        if self.queue < 1:
            raise ValueError(f"queue must be at least 1, the number of requests at once; got {self.queue}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0; got {self.timeout_s}")


def make_app(
    engine: EngineThread,
    policies: dict[str, ServedPolicy],
    *,
    token: str,
    limits: ServerLimits,
    is_local: bool = True,
    tinker: TinkerEngine | None = None,
) -> ASGIApp:
    """The application.

    Args:
        engine: Where the policies compute.
        policies: By the name that requests give as ``model``.
        token: A secret that every request has to carry.
        limits: Bounds.
        is_local: Whether it is on the loopback address, where only this machine's own host names are right.
        tinker: The engine for clients of Tinker's protocol; ``None`` answers none.
    """
    places = Places(limits.queue)
    models = _Models(engine, policies, tinker)
    routes = [
        Route("/v1/models", models.all),
        Route("/v1/models/{name:path}", models.one),
        *(
            Route(path, Endpoint(_Completions(engine, models, body, places, limits).answer), methods=["POST"])
            for path, body in (("/v1/chat/completions", ChatBody), ("/v1/completions", CompletionBody))
        ),
        *(() if tinker is None else tinker_routes(engine, tinker)),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: http_error})
    return TokenGuard(app, token=token, checks_host=is_local)


class _Models:
    """The policies that are served, and the weights that clients of Tinker's protocol have saved."""

    def __init__(
        self, engine: EngineThread, policies: dict[str, ServedPolicy], tinker: TinkerEngine | None
    ) -> None:
        self._engine = engine
        self._policies = policies
        self._tinker = tinker

    async def find(self, name: str) -> ServedPolicy:
        """The policy of this name, or at this address (``tinker://...``).

        Raises:
            RequestError: If there is none.
        """
        if name not in self._policies:
            if self._tinker is not None and name.startswith("tinker://"):
                like = next(iter(self._policies.values()))
                with telling():
                    return await self._engine.run(self._tinker.samplers.saved_policy(name, like))
            raise RequestError(
                f"model {name[:200]!r} is not served here; served: {', '.join(self._policies)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return self._policies[name]

    async def all(self, _: Request) -> Response:
        """Answer with the list of models."""
        rows = [model_entry(name, policy.context_length) for name, policy in self._policies.items()]
        return json_answer({"object": "list", "data": rows})

    async def one(self, request: Request) -> Response:
        """Answer with one model."""
        name = str(request.path_params["name"])
        try:
            policy = await self.find(name)
            return json_answer(model_entry(name, policy.context_length))
        except RequestError as error:
            return error_answer(error)


class _Completions:
    """An address at which samples are asked for."""

    def __init__(
        self,
        engine: EngineThread,
        models: _Models,
        body_class: type[ChatBody] | type[CompletionBody],
        places: Places,
        limits: ServerLimits,
    ) -> None:
        self._engine = engine
        self._models = models
        self._body_class = body_class
        self._places = places
        self._limits = limits

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; when its client goes, its samples leave the batch."""
        with self._places.take():
            raw = await read_body(scope, receive, self._limits.body_bytes)
            await unless_gone(self._answer(raw, scope, receive, send), receive)

    async def _answer(self, raw: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        body = parse_body(self._body_class, raw)
        policy = await self._models.find(body.model)
        if body.stream:
            await send_events(self._events(body, policy), send)
            return
        pieces: list[Piece] = []
        with telling():
            async with asyncio.timeout(self._limits.timeout_s):
                job = await self._engine.run(_make_job(body, policy))
                prompts = await self._engine.run(policy.sample(job, pieces.append))
        answer = Answer(body, job).whole(pieces, prompts)
        await json_answer(answer)(scope, receive, send)

    async def _events(
        self, body: ChatBody | CompletionBody, policy: ServedPolicy
    ) -> AsyncGenerator[dict[str, Any]]:
        queue: asyncio.Queue[Piece | None] = asyncio.Queue()

        async def sample(job: Job) -> None:
            try:
                await self._engine.run(policy.sample(job, in_loop(queue.put_nowait)))
            finally:
                queue.put_nowait(None)

        with telling():
            async with asyncio.timeout(self._limits.timeout_s):
                job = await self._engine.run(_make_job(body, policy))
                answer = Answer(body, job)
                sampling = asyncio.ensure_future(sample(job))
                try:
                    first = await queue.get()
                    if first is None:
                        await sampling  # it failed
                    if (opening := answer.opening()) is not None:
                        yield opening
                    while first is not None:
                        yield answer.chunk(first)
                        first = await queue.get()
                    await sampling
                finally:
                    sampling.cancel()
                    await asyncio.gather(sampling, return_exceptions=True)
        if (closing := answer.closing()) is not None:
            yield closing


async def _make_job(body: ChatBody | CompletionBody, policy: ServedPolicy) -> Job:
    return chat_job(body, policy) if isinstance(body, ChatBody) else completion_job(body, policy)


def choose_token(given: str | None) -> str:
    """The token that requests have to carry: the one given, else that of the variable, else a new one.

    Raises:
        ValueError: If it is short, or has characters that no header can carry.
    """
    token = given or os.environ.get(TOKEN_VARIABLE)
    if token is None:
        return _PREFIX + secrets.token_urlsafe(24)
    if len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(
            f"token must have at least {_SHORTEST_TOKEN} characters, all of them printable ASCII and no spaces; got "
            f"{len(token)} characters. Leave it out to get a new one at every start."
        )
    return token


def serve(
    engine: EngineThread,
    policies: dict[str, ServedPolicy],
    *,
    listener: socket.socket,
    token: str,
    limits: ServerLimits,
    tinker: TinkerEngine,
    say: Callable[[str], None],
) -> None:
    """Serve policies until the process is interrupted.

    Args:
        engine: Where they compute.
        policies: By the name that requests give as ``model``.
        listener: From `viva.loopback.listen`.
        token: From `choose_token`.
        limits: Bounds.
        tinker: The engine for clients of Tinker's protocol.
        say: Gets the address and what a client needs.
    """
    address, port = listener.getsockname()[:2]
    is_local = is_loopback(address)
    host = f"[{address}]" if ":" in address else address
    say(
        f"serving {', '.join(policies)}\nOPENAI_BASE_URL=http://{host}:{port}/v1\nOPENAI_API_KEY={token}\n"
        f"TINKER_BASE_URL=http://{host}:{port}\nTINKER_API_KEY={token}"
    )
    if not token.startswith(_PREFIX):
        say(f"note: the tinker SDK takes no token that does not begin with {_PREFIX}")
    if not is_local:
        say("note: other machines can reach this address, and the connection is not encrypted")
    say("Ctrl-C ends it")
    app = make_app(engine, policies, token=token, limits=limits, is_local=is_local, tinker=tinker)
    run_server(app, listener)
