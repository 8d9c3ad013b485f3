"""``viva view``: the page's files, and JSON about runs and results of ``viva eval``, served until the user stops it.

It only reads. Only a browser on this machine that was given the address may ask, and no page of another site.
"""

import contextlib
import hashlib
import importlib
import json
import os
import re
import secrets
import threading
import webbrowser
from collections.abc import Callable, Sequence
from functools import partial
from importlib import resources
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from viva import __version__
from viva.loopback import is_own_host, listen, run_server, same_secret
from viva.run.secrets import printable
from viva.view.answers import (
    NotFoundError,
    conversation_answer,
    curve_layout,
    curve_points,
    evaluations_answer,
    judge_answer,
    list_answer,
    run_answer,
    text_answer,
)
from viva.view.entries import Query, parse_query
from viva.view.files import names_of
from viva.view.run_index import IndexReader, RunIndex
from viva.view.summary import summary_answer

STATIC_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
"""Kinds of files that are served, by the ends of their names."""

_MAX_KEYS = 64
_MAX_RUNS = 2
_PAGE_SIZE = 50

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Nothing but the page's own files: no inline script or style, no other host, no frame."""

_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


_COOKIE_S = 30 * 24 * 3600
"""Life of the cookie, so that bookmarks work the next day."""

_TOKEN = re.compile(r"[A-Za-z0-9_-]{32}")

_Answer = Callable[[Request], object]
_Wait = Callable[[Request], object] | None


def serve(
    folders: Sequence[Path],
    *,
    port: int = 0,
    open_browser: bool = False,
    say: Callable[[str], None],
) -> None:
    """Serve one or two runs, one laid over the other, or results of ``viva eval``, until the process is interrupted.

    It listens on the loopback interface, where port 0 takes a free one; `say` gets the address.

    Raises:
        ValueError: If a folder is none of these, or the port is taken.
    """
    listener = listen(port)
    with listener:
        port = listener.getsockname()[1]
        token = kept_token()
        app = make_app(folders, token=token)
        address = f"http://127.0.0.1:{port}/?token={token}"
        say(f"{address}\nonly this machine can open it; Ctrl-C ends it")
        if open_browser:
            webbrowser.open(address)
        run_server(app, listener)


def kept_token() -> str:
    """The user's token, the same at every start, so that bookmarks and open pages go on working.

    It lies in a file that only the user can read. One that others can read or write is replaced; where nothing can be
    written, the token is a new one at every start.
    """
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(home) / "viva" / "view-token"
    try:
        if os.name == "posix" and path.is_file() and path.stat().st_mode & 0o077:
            path.unlink()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(24))
        token = path.read_text(encoding="ascii", errors="replace").strip()
        if _TOKEN.fullmatch(token):
            return token
        path.unlink()  # torn, or somebody else's; the next start makes another
    except OSError:  # a home that cannot be written to, or none
        pass
    return secrets.token_urlsafe(24)


def make_app(folders: Sequence[Path], *, token: str) -> ASGIApp:
    """The application for one or two runs, and any results of ``viva eval``; a request has to know the token.

    Raises:
        ValueError: If a path is none of these, two are the same, or there are more than two runs.
    """
    runs = [RunIndex(folder) for folder in folders]
    num_runs = sum(run.kind == "run" for run in runs)
    if num_runs > _MAX_RUNS:
        raise ValueError(f"viva view shows one run or two, and any results of viva eval; got {num_runs} runs")
    routes = [Route("/", _file), Route("/static/{name}", _file), *_Api(runs).routes()]
    return Guard(Starlette(routes=routes), token=token)


def _json(value: object, status: int = 200) -> Response:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode("utf-8", "replace"), status, media_type="application/json")


def _file(request: Request) -> Response:
    name = request.path_params.get("name", "index.html")
    folder = resources.files("viva.view").joinpath("static")
    known = {each.name: each for each in folder.iterdir() if Path(each.name).suffix in STATIC_TYPES}
    if name not in known:
        return PlainTextResponse("There is no such file.\n", 404)
    return Response(known[name].read_bytes(), media_type=STATIC_TYPES[Path(name).suffix])


class _Api:
    """Handlers of the page's requests, which are answered one at a time, between slices of the reading of files."""

    def __init__(self, runs: Sequence[RunIndex]) -> None:
        self._runs = runs
        self._names = names_of([run.folder for run in runs])
        self._lock = threading.Lock()
        self._reading = IndexReader(runs, self._lock)
        self._rewards: dict[RunIndex, tuple[str, object]] = {}
        """Other rewards of a run, and its version then."""

    def routes(self) -> list[Route]:
        """Handlers by the last part of their address. Some wait for what is read, or for modules to load."""
        handlers: dict[str, tuple[_Answer, _Wait]] = {
            "runs": (self._all_runs, lambda _: self._reading.go_on()),
            "curves": (lambda _: curve_layout({key for run in self._runs for key in run.metrics}), None),
            "series": (self._series, None),
            "conversations": (partial(self._page, list_answer), None),
            "conversation": (self._conversation, self._wait_for_conversation),
            "text": (self._text, None),
            "judge": (partial(self._page, judge_answer), None),
            # takes seconds, in which others are answered
            "summary": (
                lambda _: [summary_answer(run) for run in self._runs],
                lambda _: importlib.import_module("viva.training.advice"),
            ),
            "rewards": (lambda request: self._rewards[self._run(request)][1], self._score),
            "evaluations": (lambda _: evaluations_answer(self._runs, self._names), None),
        }
        return [Route(f"/api/{name}", self._endpoint(*handler)) for name, handler in handlers.items()]

    def _endpoint(self, answer: _Answer, wait: _Wait) -> Callable[[Request], Response]:
        """A handler that waits, then answers under the lock; its mistakes are answers that say what was wrong."""

        def endpoint(request: Request) -> Response:
            try:
                if wait is not None:
                    wait(request)
                with self._lock:
                    value = answer(request)
                return _json(value)
            except NotFoundError as error:
                status, told = 404, str(error)
            except OSError as error:  # a file of the run that is gone, or may not be read any more
                status, why = 410, error.strerror or error
                told = f"a file of the run cannot be read: {why}. Is its folder still there?"
            except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
                status, told = 400, f"{type(error).__name__}: {error}"
            return _json({"error": printable(told)}, status)

        return endpoint

    def _all_runs(self, _: Request) -> object:
        runs = zip(self._runs, self._names, strict=True)
        return {
            "viva": __version__,
            "runs": [run_answer(run, name, is_complete=self._reading.is_complete(run)) for run, name in runs],
        }

    def _series(self, request: Request) -> object:
        keys = request.query_params.getlist("key")[:_MAX_KEYS]
        return [curve_points(run, keys) for run in self._runs]

    def _page(self, answer: Callable[[RunIndex, Query, int, int], object], request: Request) -> object:
        query = parse_query(request.query_params)
        return answer(self._run(request), query, _whole(request, "page", 0), _PAGE_SIZE)

    def _wait_for_conversation(self, request: Request) -> None:
        self._reading.wait_for(self._run(request), *_place(request))

    def _conversation(self, request: Request) -> object:
        return conversation_answer(self._run(request), *_place(request), parse_query(request.query_params))

    def _score(self, request: Request) -> None:
        """Compute other rewards, without the lock: that takes seconds, in which others are answered."""
        # loads what plays conversations
        from viva.view.other_rewards import other_rewards, stored_conversations

        run = self._run(request)
        with self._lock:
            version = run.version
            if self._rewards.get(run, ("", None))[0] == version:
                return
            stored = stored_conversations(run)
        self._rewards[run] = version, other_rewards(stored)

    def _text(self, request: Request) -> object:
        return text_answer(self._run(request), *_place(request), request.query_params.get("ref", ""))

    def _run(self, request: Request) -> RunIndex:
        index = _whole(request, "run", 0)
        if not 0 <= index < len(self._runs):
            raise NotFoundError(f"there is no run {index}")
        return self._runs[index]


def _place(request: Request) -> tuple[int, int]:
    """Step and group of a conversation."""
    return _whole(request, "step"), _whole(request, "group")


def _whole(request: Request, name: str, default: int | None = None) -> int:
    value = request.query_params.get(name, "" if default is None else str(default))
    if not value.isascii() or not value.isdecimal() or len(value) > 12:
        raise ValueError(f"{name} must be a whole number; got {value[:40]!r}")
    return int(value)


def cookie_name(token: str) -> str:
    """Name of the cookie that holds a token.

    Cookies do not know ports: servers of several machines, each behind a tunnel, share one name of this machine.
    """
    return f"viva-{hashlib.sha256(token.encode()).hexdigest()[:12]}"


class Guard:
    """Wraps an application, which only those who know a token may ask.

    The host name must be one of this machine's own (a foreign name that resolves to it is refused: DNS rebinding), the
    request must not come from another site or from a page of another port, and it must carry the token: once in the
    address, from then on in a cookie that scripts cannot read.
    """

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app = app
        self._token = token
        self._cookie = cookie_name(token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            answer = self._refusal(Request(scope)) or self._app
            await answer(scope, receive, _with_headers(send))

    def _refusal(self, request: Request) -> Response | None:
        headers, path = request.headers, request.scope["path"]
        host = headers.get("host", "")
        if not is_own_host(host):
            return PlainTextResponse("This host name is not allowed.\n", 403)
        # browsers without the second header send the first
        is_foreign = headers.get("origin", f"http://{host}") != f"http://{host}"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            is_link = headers.get("sec-fetch-mode") == "navigate" and path == "/"
            is_foreign = is_foreign or not is_link
        if is_foreign:
            return PlainTextResponse("Requests of other sites are not answered.\n", 403)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("Only GET is allowed.\n", 405)
        if path == "/" and same_secret(request.query_params.get("token", ""), self._token):
            response = RedirectResponse("/", 303)
            response.set_cookie(
                self._cookie, self._token, max_age=_COOKIE_S, httponly=True, samesite="strict", path="/"
            )
            return response
        if not same_secret(request.cookies.get(self._cookie, ""), self._token):
            return PlainTextResponse("Open the address that 'viva view' printed; it has the token.\n", 403)
        return None


def _with_headers(send: Send) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(_HEADERS)
        await send(message)

    return wrapped
