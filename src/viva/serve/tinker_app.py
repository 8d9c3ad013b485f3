"""Tinker's protocol over HTTP: the addresses that the ``tinker`` SDK asks, each a method of `TinkerEngine`."""

import inspect
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from viva.serve.bodies import RequestError, read_json
from viva.serve.tinker_engine import TinkerEngine
from viva.serve.tinker_wire import Gradients
from viva.serve.transport import (
    Endpoint,
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


def tinker_routes(thread: EngineThread, engine: TinkerEngine) -> list[Route]:
    """The addresses of the protocol.

    Args:
        thread: Where the engine computes.
        engine: The engine as clients of the protocol know it.
    """
    calls: dict[str, Callable[[dict[str, Any]], Any]] = {
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

    def called(path: str, call: Callable[[Any], Any], read: Callable[[bytes], Any] = read_json) -> Route:
        """An address to which a body is sent; `read` makes of it what the call takes."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            with telling():
                body = read(await read_body(scope, receive, _BODY_BYTES))
                value = await unless_gone(thread.run(_called(call, body)), receive)
            await _response(value)(scope, receive, send)

        return Route(f"/api/v1/{path}", Endpoint(answer, _refusal), methods=["POST"])

    def asked(path: str, call: Callable[..., Any], method: str = "GET") -> Route:
        """An address without a body; the call takes the path's parts that vary."""

        async def answer(request: Request) -> Response:
            try:
                with telling():
                    value = await thread.run(_called(call, *request.path_params.values()))
            except RequestError as error:
                return _refusal(error)
            return json_answer({} if value is None else value)

        return Route(f"/api/v1/{path}", answer, methods=[method])

    return [
        *(called(path, call) for path, call in calls.items()),
        called("forward_backward", engine.forward_backward, Gradients),
        asked("healthz", lambda: {"status": "ok"}),
        asked("get_server_capabilities", engine.capabilities),
        asked("samplers/{name:path}", engine.samplers.describe),
        asked("sessions/{name}/finish", engine.finish_session, "POST"),
        asked("training_runs/{run}/checkpoints/{checkpoint:path}", engine.weights.delete, "DELETE"),
    ]


async def _called(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        value = call(*arguments)
        return await value if inspect.isawaitable(value) else value
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise RequestError(f"{place}: {first['msg']}", param=place) from error


def _response(value: dict[str, Any] | bytes | None) -> Response:
    if isinstance(value, bytes):
        return Response(value, media_type=_BINARY)
    if value is None:  # a result that is not there yet
        return json_answer({"type": "try_again", "queue_state": "active"}, 408)
    return json_answer(value)


def _refusal(error: RequestError) -> Response:
    """An error as the SDK shows it."""
    answer = error_answer(error)
    if error.status == 429:
        return answer
    return json_answer({"detail": str(error)}, error.status)
