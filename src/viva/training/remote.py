"""A remote engine: whether it is there, whether it still is, and what its errors mean.

What the SDK, which repeats requests for minutes, does not do: report at once that no server answers at an address; stop
waiting for results of a server that is gone; give remedies; keep the key from following a redirect to another host.
"""

import asyncio
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx
import tinker

from viva.hub import telling_wait
from viva.run.secrets import KEY_VARIABLE, split_address, without_secrets
from viva.sdk import ServiceClient

_HEALTH = "/api/v1/healthz"
_ANSWER_S = 10.0
_DELETION_S = 30.0
_FIRST_PAUSES_S = (0.0, 0.5, 1.5, 3.0)
_LAST_JSON_SDK = (0, 22)
"""The last version of the SDK that sends JSON where a server takes nothing else."""
_LONGEST_DESCRIPTION = 1 << 24
_LONGEST_DETAIL = 400
_LONGEST_NAME = 60
_MOST_REDIRECTS = 5
_PORTS = {"http": 80, "https": 443}


class EngineError(RuntimeError):
    """The engine can no longer be worked with; says why."""


class EngineLostError(EngineError):
    """The server could not be reached for longer than the limit."""


def _origin(address: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port: what a key that was given for one address stays with."""
    parts = urlsplit(address)
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)


def _sent_on(target: str) -> str:
    parts = urlsplit(target)
    return (
        f"it sends requests on to {parts.scheme}://{parts.netloc}, another address, where no key follows; if that is "
        "yours, give it as base_url"
    )


class _HealthRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects within an origin and refuses the others."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if _origin(newurl) != _origin(req.full_url):
            fp.close()
            raise ValueError(_sent_on(newurl))
        return super().redirect_request(req, fp, code, msg, headers, newurl)


_OPENER = urllib.request.build_opener(_HealthRedirects)


def keep_keys_at_home() -> None:
    """Let every client that the SDK makes from now on follow redirects within an origin only.

    The SDK's clients follow all redirects and send the key along, which httpx and reqwest strip from the header
    ``Authorization`` alone. The SDK takes no client of one's own, so its class is replaced, once.

    Raises:
        EngineError: If this SDK makes its connections in another way, so that nothing would keep the key back.
    """
    sdk = import_module("tinker._base_client")
    made: Any = vars(sdk).get("AsyncHttpxClientWrapper")
    if made is None:
        raise EngineError(
            f"tinker {tinker.__version__} makes its connections in a way that is not known here, so nothing would keep "
            "your key from following a redirect to another host. Install an older one: pip install tinker==0.38.0"
        )
    if not issubclass(made, _HomeClient):
        vars(sdk)["AsyncHttpxClientWrapper"] = type("HomeClient", (_HomeClient, made), {})


class _HomeClient(httpx.AsyncClient):
    """A client that returns the answer itself where it would be sent on to another origin."""

    def __init__(self, **options: Any) -> None:
        if "transport" in options:  # the SDK's own follows redirects by itself
            options["transport"] = _plain_transport()
        super().__init__(**options)

    async def send(
        self, request: httpx.Request, *, follow_redirects: Any = True, **options: Any
    ) -> httpx.Response:
        answer = await super().send(request, follow_redirects=False, **options)
        for _ in range(_MOST_REDIRECTS):
            following = answer.next_request
            if not follow_redirects or following is None:
                break
            if _origin(str(following.url)) != _origin(str(request.url)):
                break
            await answer.aclose()
            answer = await super().send(following, follow_redirects=False, **options)
        return answer


def _plain_transport() -> httpx.AsyncBaseTransport | None:
    """The SDK's kind of transport, without its redirects; ``None`` where its version has no such switch."""
    import pyqwest
    from pyqwest.httpx import AsyncPyqwestTransport

    try:
        transport = pyqwest.HTTPTransport(tls_include_system_certs=True, follow_redirects=False)
    except TypeError:
        return None
    return AsyncPyqwestTransport(transport=transport)


def _ask(base_url: str, path: str) -> Any:
    """The answer to a request for a path of a server, to be closed."""
    address, headers = split_address(base_url)
    request = urllib.request.Request(address.rstrip("/") + path, headers=headers)
    return _OPENER.open(request, timeout=_ANSWER_S)


def _problem(base_url: str) -> str | None:
    """The reason why no server answers at an address; ``None`` if one does, whatever the answer is."""
    try:
        with _ask(base_url, _HEALTH):
            return None
    except urllib.error.HTTPError as error:
        return None if error.code < 500 else f"it answers {error.code} {error.reason}"
    # URLError, a closed connection; no URL; a port that is none, an answer that is not HTTP
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        return without_secrets(str(reason).strip()) or type(error).__name__


def check_address(base_url: str, *, is_hosted: bool = False) -> None:
    """Make sure that a server answers, within seconds; the SDK by itself tries for minutes.

    Hosted Tinker cannot be started here, and is asked once.

    Raises:
        ValueError: If none does, or the address is none.
    """
    if not base_url.startswith(("http://", "https://")):
        raise ValueError(f"base_url must begin with http:// or https://; got {without_secrets(base_url)!r}")
    problem: str | None = None
    address = without_secrets(base_url)
    started = time.monotonic()
    with telling_wait(f"an answer of the server at {address}", _ANSWER_S + sum(_FIRST_PAUSES_S)):
        for pause_s in (0.0,) if is_hosted else _FIRST_PAUSES_S:
            time.sleep(pause_s)
            problem = _problem(base_url)
            if problem is None:
                return
            if time.monotonic() - started >= _ANSWER_S:  # the connection is taken, and nothing is said
                break
    if is_hosted:
        raise ValueError(
            f"Tinker does not answer at {address}: {problem}. Check the network, or use engine=local."
        )
    raise ValueError(f"no server answers at base_url={address}: {problem}. Start it, or correct the address.")


def check_version(base_url: str) -> None:
    """Refuse an SDK that is too new for a server, which would show after minutes of waiting for its first answer.

    Newer SDKs send gradients' requests in a binary form; a server's own description says which forms it takes.

    Raises:
        ValueError: If it takes JSON alone, and this SDK sends something else.
    """
    version = tuple(int(part) for part in tinker.__version__.split(".")[:2])
    if version > _LAST_JSON_SDK and _takes_json_alone(base_url):
        raise ValueError(
            f"the server at base_url={without_secrets(base_url)} takes requests as JSON alone, and tinker "
            f"{tinker.__version__} sends others: it is too new for it. SkyRL up to 0.3.0 talks to tinker 0.22; "
            'install that: pip install tinker==0.22.7 "tinker-cookbook<0.5.4"'
        )


def server_name(base_url: str) -> str:
    """A server's own name and version; empty if it says nothing."""
    found = _described(base_url, "info")
    parts = [found.get(name) for name in ("title", "version")] if isinstance(found, dict) else []
    return " ".join(part[:_LONGEST_NAME] for part in parts if isinstance(part, str))


def _takes_json_alone(base_url: str) -> bool:
    """Whether a server's own description names JSON alone; without a description, it may take anything."""
    asked = _described(base_url, "paths", "/api/v1/forward_backward", "post", "requestBody", "content")
    return isinstance(asked, dict) and list(asked) == ["application/json"]


def _described(base_url: str, *place: str) -> Any:
    """Value in a server's own description at a place; ``None`` if it has nothing there, or there is none."""
    try:
        with _ask(base_url, "/openapi.json") as answer:
            found: Any = json.loads(answer.read(_LONGEST_DESCRIPTION))
        for name in place:
            found = found[name]
    except (OSError, ValueError, RecursionError, http.client.HTTPException, LookupError, TypeError):
        return None
    return found


@asynccontextmanager
async def watched(base_url: str, *, limit_s: float = 300.0, every_s: float = 10.0) -> AsyncGenerator[None]:
    """Within this context, the current task is stopped when a server is gone for good.

    A server may be gone for ``limit_s`` without a break; one that only computes for long answers meanwhile.

    Raises:
        EngineLostError: When that is over.
    """
    task = asyncio.current_task()
    assert task is not None  # this is a coroutine
    is_over = has_stopped = False

    def stop(done: asyncio.Task[str]) -> None:
        nonlocal has_stopped
        if not (is_over or done.cancelled()):  # called a moment after the watch ended; the work may have, too
            has_stopped = True
            task.cancel()

    watch = asyncio.create_task(_until_gone(base_url, limit_s, every_s))
    watch.add_done_callback(stop)
    try:
        yield
    except asyncio.CancelledError:
        if not has_stopped or task.uncancel() > 0:  # the task is stopped from elsewhere, perhaps as well
            raise
        raise EngineLostError(
            f"the server at {without_secrets(base_url)} has been out of reach for {limit_s:g} s: {watch.result()}"
        ) from None
    finally:
        is_over = True
        watch.cancel()


async def _until_gone(base_url: str, limit_s: float, every_s: float) -> str:
    """The reason why no server answers, once that has been so for `limit_s`."""
    last_seen = time.monotonic()
    while True:
        await asyncio.sleep(every_s)
        found = await asyncio.to_thread(_problem, base_url)
        if found is None:
            last_seen = time.monotonic()
        elif time.monotonic() - last_seen >= limit_s:
            return found


def state_deleter(service: ServiceClient) -> Callable[[str], Awaitable[None]]:
    """A function that deletes a saved state by its path; where the engine cannot, the state stays."""

    def delete(path: str) -> None:
        engine: Any = service
        with suppress(tinker.TinkerError, TimeoutError):
            engine.create_rest_client().delete_checkpoint_from_tinker_path(path).result(_DELETION_S)

    return lambda path: asyncio.to_thread(delete, path)  # older SDKs block


async def saved_model(service: ServiceClient, path: str) -> tuple[str, int | None]:
    """Base model and rank of saved weights, as their engine knows them; 0 means all weights, ``None`` is unknown.

    Raises:
        TinkerError: If the engine cannot be reached or knows no such weights.
    """
    engine: Any = service
    info = await asyncio.to_thread(
        lambda: engine.create_rest_client().get_weights_info_by_tinker_path(path).result()
    )
    return str(info.base_model), info.lora_rank if info.is_lora else 0


_ADVICE = {
    400: "It cannot do that: if it was restarted, it has forgotten what it had not saved; else see `viva doctor`.",
    401: f"It does not know the key: set {KEY_VARIABLE} to a valid one.",
    402: "The account cannot pay for it; see its billing page.",
    403: f"The key in {KEY_VARIABLE} may not do this: use one that may.",
    404: "It has no such model, checkpoint or session: check model_name and the path. A server that was restarted has "
    "forgotten what it had not saved.",
    409: "It has done this before under the same name, or something else is doing it now.",
    422: "It does not accept such a request; `viva doctor` shows what it can do.",
}
_UNREACHABLE = "It may be down or restarting."


def explain(error: BaseException, server: str | None) -> str | None:
    """The meaning of a remote engine's error and its remedy, in words; ``None`` if the error came from elsewhere.

    ``server`` is the engine's name, ``None`` if it is none with a server. The SDK wraps some answers into other errors.
    """
    if isinstance(error, EngineError):
        return str(error)
    found = None if server is None else _of_engine(error)
    if found is None:
        return None
    detail = str(found)
    if len(detail) > _LONGEST_DETAIL:  # servers send the request back that they refuse
        detail = f"{detail[:_LONGEST_DETAIL]}..."
    if isinstance(found, tinker.APIStatusError) and found.response.has_redirect_location:
        target = urljoin(str(found.request.url), found.response.headers["location"])
        text = f"{server} answered {found.status_code}: {_sent_on(target)}"
    elif isinstance(found, tinker.APIStatusError):
        text = (
            f"{server} answered {found.status_code}: {detail}. {_ADVICE.get(found.status_code, _UNREACHABLE)}"
        )
    elif isinstance(found, tinker.APIConnectionError):
        text = f"{server} cannot be reached: {detail} {_UNREACHABLE}"
    else:
        text = f"{server} failed: {detail}"
    return without_secrets(text)


def _of_engine(error: BaseException) -> tinker.TinkerError | None:
    """The error itself if it is the SDK's own, or the answer behind another one that the SDK raised."""
    if isinstance(error, tinker.TinkerError):
        return error
    if not _was_raised_by_sdk(error):
        return None
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, tinker.TinkerError):
        cause = cause.__cause__ or cause.__context__
    return cause


def _was_raised_by_sdk(error: BaseException) -> bool:
    module = ""
    traceback = error.__traceback__
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__", ""))
        traceback = traceback.tb_next
    return module.partition(".")[0] == tinker.__name__
