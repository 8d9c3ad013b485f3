"""Tinker's protocol over HTTP: the addresses that the ``tinker`` SDK asks, each a method of `TinkerEngine`."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from viva.serve.bodies import RequestError, read_json
from viva.serve.tinker_engine import TinkerEngine
from viva.serve.tinker_store import Result
from viva.serve.tinker_wire import Gradients
from viva.serve.transport import (
    ClientGoneError,
    EngineThread,
    error_answer,
    json_answer,
    read_body,
    telling,
    unless_gone,
)

_BODY_BYTES = 64 * 2**20
_WAIT_S = 25.0
"""Wait of a question for a result; the SDK gives up after 45 s and asks again after an answer."""
_BINARY = "application/x-protobuf"

_CLIENT_CONFIG = {
    "parallel_fwdbwd_chunks": False,
    "fwdbwd_max_chunk_len": 2**16,
    "fwdbwd_max_chunk_bytes_count": _BODY_BYTES // 2,
    "sample_max_concurrent_requests": 256,
    "use_pyqwest_transport": False,
}
"""Settings for the SDK: a batch comes in one piece, so that the engine packs it as it would in Python."""
_DYNAMIC_CONFIG = {"sample_cancel_enabled": True}

Call = Callable[[dict[str, Any]], Any]


def tinker_routes(thread: EngineThread, engine: TinkerEngine) -> list[Route]:
    """The addresses of the protocol.

    Args:
        thread: Where the engine computes.
        engine: The engine as clients of the protocol know it.
    """
    calls: dict[str, Call] = {
        "client/config": lambda _: _CLIENT_CONFIG,
        "client/dynamic_config": lambda _: _DYNAMIC_CONFIG,
        "telemetry": lambda _: {"status": "accepted"},
        "create_session": engine.create_session,
        "session_heartbeat": engine.heartbeat,
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
        "retrieve_future": lambda body: engine.result(body, _WAIT_S),
    }
    look = _Looks(thread, engine)
    return [
        *(Route(f"/api/v1/{name}", _Call(thread, call), methods=["POST"]) for name, call in calls.items()),
        Route(
            "/api/v1/forward_backward", _Call(thread, engine.forward_backward, Gradients), methods=["POST"]
        ),
        Route("/api/v1/healthz", look.health),
        Route("/api/v1/get_server_capabilities", look.capabilities),
        Route("/api/v1/samplers/{name:path}", look.sampler),
        Route("/api/v1/sessions/{name}/finish", look.finish_session, methods=["POST"]),
        Route(
            "/api/v1/training_runs/{run}/checkpoints/{checkpoint:path}",
            look.delete_checkpoint,
            methods=["DELETE"],
        ),
    ]


class _Call:
    """An address to which a body is sent.

    Args:
        thread: Where the engine computes.
        call: Answers; in the engine's thread.
        read: Makes of the body what it takes.
    """

    def __init__(
        self, thread: EngineThread, call: Callable[[Any], Any], read: Callable[[bytes], Any] = read_json
    ) -> None:
        self._thread = thread
        self._call = call
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        try:
            with telling():
                raw = await read_body(scope, receive, _BODY_BYTES)
                value = await unless_gone(self._answer(raw), receive)
            await _response(value)(scope, receive, send)
        except RequestError as error:
            await _refusal(error)(scope, receive, send)
        except ClientGoneError:
            return

    async def _answer(self, raw: bytes) -> Any:
        body = self._read(raw)
        return await self._thread.run(_called(self._call, body))


async def _called(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        value = call(*arguments)
        return await value if inspect.isawaitable(value) else value
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise RequestError(f"{place}: {first['msg']}", param=place) from error


def _response(value: Any) -> Response:
    if isinstance(value, Result):
        if isinstance(value.value, bytes):
            return Response(value.value, media_type=_BINARY)
        return json_answer(value.value)
    if value is None:  # a result that is not there yet
        return json_answer({"type": "try_again", "queue_state": "active"}, 408)
    return json_answer(value)


def _refusal(error: RequestError) -> Response:
    """An error as the SDK shows it."""
    answer = error_answer(error)
    if error.status == 429:
        return answer
    return json_answer({"detail": str(error)}, error.status)


class _Looks:
    """Addresses without a body."""

    def __init__(self, thread: EngineThread, engine: TinkerEngine) -> None:
        self._thread = thread
        self._engine = engine

    async def health(self, _: Request) -> Response:
        """Whether the server answers."""
        return json_answer({"status": "ok"})

    async def capabilities(self, _: Request) -> Response:
        """The model that is served."""
        return await self._answered(self._engine.capabilities)

    async def sampler(self, request: Request) -> Response:
        """Model and weights of a sampler."""
        return await self._answered(self._engine.samplers.describe, str(request.path_params["name"]))

    async def finish_session(self, request: Request) -> Response:
        """End a session."""
        return await self._answered(self._engine.finish_session, str(request.path_params["name"]))

    async def delete_checkpoint(self, request: Request) -> Response:
        """Delete saved weights."""
        run, checkpoint = (str(request.path_params[name]) for name in ("run", "checkpoint"))
        return await self._answered(self._engine.weights.delete, run, checkpoint)

    async def _answered(self, call: Callable[..., Any | Awaitable[Any]], *arguments: str) -> Response:
        try:
            with telling():
                value = await self._thread.run(_called(call, *arguments))
        except RequestError as error:
            return _refusal(error)
        return json_answer({} if value is None else value)
