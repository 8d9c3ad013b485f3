"""``viva serve``: policies over HTTP until the user stops it."""

import os
import secrets
import socket
from collections.abc import Callable

from viva.loopback import is_loopback, run_server
from viva.serve.app import Access, ServerLimits, make_app
from viva.serve.host import EngineThread
from viva.serve.sampling import ServedPolicy
from viva.serve.tinker_engine import TinkerEngine

TOKEN_VARIABLE = "VIVA_SERVE_TOKEN"
"""The environment variable that may hold the token."""

_SHORTEST_TOKEN = 16
_PREFIX = "tml-"
"""The SDK of Tinker wants keys to begin so."""


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
    access = Access(token=token, is_local=is_local)
    run_server(make_app(engine, policies, access=access, limits=limits, tinker=tinker), listener)
