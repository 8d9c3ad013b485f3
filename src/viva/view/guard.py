"""Who may read a run: only a browser on this machine that was given the address, and no page of another site."""

import hashlib
import hmac
import re
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["CONTENT_POLICY", "Guard", "cookie_name"]

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


_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.I)
"""Names of this machine. The port is whichever the browser knows: a tunnel's is another than the server's."""

_COOKIE_S = 30 * 24 * 3600
"""How long a browser keeps the cookie, so that bookmarks work the next day."""


def cookie_name(token: str) -> str:
    """Name of the cookie that holds a token.

    Cookies do not know ports: servers of several machines, each behind a tunnel, share one name of this machine.
    """
    return f"viva-{hashlib.sha256(token.encode()).hexdigest()[:12]}"


class Guard:
    """Wraps an application.

    The host name must be one of this machine's own (a foreign name that resolves to it is refused: DNS rebinding), the
    request must not come from another site or from a page of another port, and it must carry the token: once in the
    address, from then on in a cookie that scripts cannot read.

    Args:
        app: What is guarded.
        token: A secret.
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
            refusal = self._refusal(scope)
            if refusal is None:
                await self._app(scope, receive, _with_headers(send))
            else:
                await refusal(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not _HOST.fullmatch(host):
            return PlainTextResponse("This host name is not allowed.\n", 403)
        if (
            headers.get("origin", f"http://{host}") != f"http://{host}"
        ):  # browsers without the next header send this
            return PlainTextResponse("Requests of other sites are not answered.\n", 403)
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            is_link = headers.get("sec-fetch-mode") == "navigate" and scope["path"] == "/"
            if not is_link:
                return PlainTextResponse("Requests of other sites are not answered.\n", 403)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("Only GET is allowed.\n", 405)
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and self._is_token(given):
            response = RedirectResponse("/", 303)
            response.set_cookie(
                self._cookie, self._token, max_age=_COOKIE_S, httponly=True, samesite="strict", path="/"
            )
            return response
        if not self._is_token(_cookie(headers, self._cookie)):
            return PlainTextResponse("Open the address that 'viva view' printed; it has the token.\n", 403)
        return None

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _cookie(headers: Headers, name: str) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value


def _with_headers(send: Send) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers[name] = value
        await send(message)

    return wrapped
