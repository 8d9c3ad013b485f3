"""The server's application: OpenAI's interface to the policy that is served, and Tinker's protocol beside it."""

import asyncio
import contextlib
import inspect
import os
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from viva.loopback import is_loopback, run_server, same_secret
from viva.serve.answers import PendingAnswer, make_job, model_entry
from viva.serve.bodies import ChatBody, CompletionBody, JsonObject, RequestError, parse_body, read_json
from viva.serve.sampling import Piece, SamplingJob, ServedPolicy
from viva.serve.tinker_engine import TinkerEngine
from viva.serve.tinker_wire import read_gradients
from viva.serve.transport import (
    EngineThread,
    TokenGuard,
    application,
    json_answer,
    read_body,
    send_events,
    unless_gone,
)

TOKEN_VARIABLE = "VIVA_SERVE_TOKEN"
"""The environment variable that may hold the token."""

_SHORTEST_TOKEN = 16
_PREFIX = "tml-"
"""The SDK of Tinker wants keys to begin so."""

_TINKER_BODY_BYTES = 64 * 2**20
_BINARY = "application/x-protobuf"

_CLIENT_CONFIG = {
    "parallel_fwdbwd_chunks": False,
    "fwdbwd_max_chunk_len": 2**16,
    "fwdbwd_max_chunk_bytes_count": _TINKER_BODY_BYTES // 2,
    "sample_max_concurrent_requests": 256,
    "use_pyqwest_transport": False,
}
"""Settings for the SDK: a batch comes in one piece, so that the engine packs it as it would in Python."""
_DYNAMIC_CONFIG = {"sample_cancel_enabled": True}


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
    policy: ServedPolicy,
    *,
    token: str,
    limits: ServerLimits,
    tinker: TinkerEngine,
    is_local: bool = True,
) -> ASGIApp:
    """The application, of which every request has to carry the token.

    ``is_local`` says whether it is on the loopback address, where only this machine's own host names are right.
    """
    models = _Models(engine, policy, tinker)
    places = asyncio.Semaphore(limits.queue)
    completions = (("/v1/chat/completions", ChatBody), ("/v1/completions", CompletionBody))
    routes = [
        Route("/v1/models", models.all),
        Route("/v1/models/{name:path}", models.one),
        *(
            Route(path, _Completions(models, body, places, limits), methods=["POST"])
            for path, body in completions
        ),
        *_tinker_routes(engine, tinker),
    ]
    return TokenGuard(
        application(routes), is_known=lambda given: same_secret(given, token), checks_host=is_local
    )


@dataclass(frozen=True, slots=True)
class _Models:
    """The policy that is served, and the weights that clients of Tinker's protocol have saved."""

    engine: EngineThread
    policy: ServedPolicy
    tinker: TinkerEngine

    async def find(self, name: str) -> ServedPolicy:
        """The policy of this name, or at this address (``tinker://...``).

        Raises:
            RequestError: If there is none.
        """
        if name == self.policy.name:
            return self.policy
        if name.startswith("tinker://"):
            return await self.engine.run(self.tinker.samplers.saved_policy(name, self.policy))
        raise RequestError(
            f"model {name[:200]!r} is not served here; served: {self.policy.name}",
            status=404,
            param="model",
            code="model_not_found",
        )

    async def all(self, _: Request) -> Response:
        """Answer with the list of models."""
        return json_answer({"object": "list", "data": [model_entry(self.policy)]})

    async def one(self, request: Request) -> Response:
        """Answer with one model."""
        return json_answer(model_entry(await self.find(str(request.path_params["name"]))))


@dataclass(frozen=True, slots=True)
class _Completions:
    """An address at which samples are asked for, as an application of its own."""

    models: _Models
    body_class: type[ChatBody] | type[CompletionBody]
    places: asyncio.Semaphore
    """Room for requests that are being answered or wait for it."""
    limits: ServerLimits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; when its client goes, its samples leave the batch."""
        if self.places.locked():
            raise RequestError(
                f"{self.limits.queue} requests are being answered or wait, and no more are taken "
                f"(queue={self.limits.queue}); try again in a moment",
                status=429,
                code="rate_limit_exceeded",
            )
        async with self.places:
            raw = await read_body(Request(scope, receive), self.limits.body_bytes)
            with contextlib.suppress(ClientDisconnect):  # a stream that nobody hears just ends
                await unless_gone(self._answer(raw, scope, receive, send), receive)

    async def _answer(self, raw: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        body = parse_body(self.body_class, raw)
        policy = await self.models.find(body.model)
        if body.stream:
            await send_events(self._events(body, policy), send)
            return
        pieces: list[Piece] = []
        async with asyncio.timeout(self.limits.timeout_s):
            job = await self.models.engine.run(make_job(body, policy))
            prompts = await self.models.engine.run(policy.sample(job, pieces.append))
        await json_answer(PendingAnswer(body, job).whole(pieces, prompts))(scope, receive, send)

    async def _events(
        self, body: ChatBody | CompletionBody, policy: ServedPolicy
    ) -> AsyncGenerator[JsonObject]:
        queue: asyncio.Queue[Piece | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def hear(piece: Piece) -> None:  # in the engine's thread, which may outlive this loop
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, piece)

        async def sample(job: SamplingJob) -> None:
            try:
                await self.models.engine.run(policy.sample(job, hear))
            finally:
                queue.put_nowait(None)

        async with asyncio.timeout(self.limits.timeout_s):
            job = await self.models.engine.run(make_job(body, policy))
            answer = PendingAnswer(body, job)
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


def _tinker_routes(thread: EngineThread, engine: TinkerEngine) -> list[Route]:
    """The addresses of Tinker's protocol, most of them a method of the engine, which computes in the thread."""

    def route(
        path: str,
        call: Callable[..., object],
        read: Callable[[bytes], object] | None = read_json,
        method: str = "POST",
    ) -> Route:
        """An address; the call takes the path's parts that vary, and what `read` makes of the body, if one is sent."""

        async def answer(request: Request) -> Response:
            given: list[object] = list(request.path_params.values())
            if read is not None:
                given.append(read(await read_body(request, _TINKER_BODY_BYTES)))
            work = thread.run(_called(call, given))
            # what has no body is done, whether or not its client waits: the end of a session, say
            value = await (work if read is None else unless_gone(work, request.receive))
            if isinstance(value, bytes):
                return Response(value, media_type=_BINARY)
            if value is None:  # a result that is not there yet
                return json_answer({"type": "try_again", "queue_state": "active"}, 408)
            return json_answer(value)

        return Route(f"/api/v1/{path}", answer, methods=[method])

    calls: dict[str, Callable[[JsonObject], object]] = {
        "client/config": lambda _: _CLIENT_CONFIG,
        "client/dynamic_config": lambda _: _DYNAMIC_CONFIG,
        "telemetry": lambda _: {"status": "accepted"},
        "create_session": engine.sessions.create,
        "session_heartbeat": engine.sessions.heartbeat,
        "create_model": engine.create_model,
        "get_info": engine.get_info,
        "load_weights": engine.load_weights,
        "optim_step": engine.optim_step,
        "save_weights": engine.save_weights,
        "save_weights_for_sampler": engine.save_weights_for_sampler,
        "create_sampling_session": engine.samplers.create,
        "asample": engine.samplers.sample,
        "cancel_future": engine.cancel,
        "weights_info": engine.weights.info,
        "retrieve_future": engine.results.fetch,
    }
    checkpoint = "training_runs/{run}/checkpoints/{checkpoint:path}"
    return [
        *(route(path, call) for path, call in calls.items()),
        route("forward_backward", engine.forward_backward, read_gradients),
        route("healthz", lambda: {"status": "ok"}, None, "GET"),
        route("get_server_capabilities", engine.capabilities, None, "GET"),
        route("samplers/{name:path}", engine.samplers.describe, None, "GET"),
        route("sessions/{name}/finish", engine.sessions.end, None),
        route(checkpoint, engine.weights.delete, None, "DELETE"),
    ]


async def _called(call: Callable[..., object], given: Sequence[object]) -> object:
    value = call(*given)
    return await value if inspect.isawaitable(value) else value


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
    policy: ServedPolicy,
    *,
    listener: socket.socket,
    token: str,
    limits: ServerLimits,
    tinker: TinkerEngine,
    say: Callable[[str], None],
) -> None:
    """Serve a policy until the process is interrupted; `say` gets the address and what a client needs.

    The listener is from `viva.loopback.listen`, the token from `choose_token`.
    """
    address, port = listener.getsockname()[:2]
    is_local = is_loopback(address)
    host = f"[{address}]" if ":" in address else address
    say(
        f"serving {policy.name}\nOPENAI_BASE_URL=http://{host}:{port}/v1\nOPENAI_API_KEY={token}\n"
        f"TINKER_BASE_URL=http://{host}:{port}\nTINKER_API_KEY={token}"
    )
    if not token.startswith(_PREFIX):
        say(f"note: the tinker SDK takes no token that does not begin with {_PREFIX}")
    if not is_local:
        say("note: other machines can reach this address, and the connection is not encrypted")
    say("Ctrl-C ends it")
    app = make_app(engine, policy, token=token, limits=limits, is_local=is_local, tinker=tinker)
    run_server(app, listener)
