"""Servers of one user on one machine: their socket, the names they answer to, how they compare secrets and run."""

import contextlib
import hmac
import importlib.util
import ipaddress
import os
import re
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

LOOPBACK = "127.0.0.1"

_NEEDED = ("starlette", "uvicorn")
_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.I)
"""Names of this machine. The port is whichever the client knows: a tunnel's is another than the server's."""
_MOST_CONNECTIONS = 2048


def check_packages(command: str) -> None:
    """Refuse a command whose packages are not installed.

    Raises:
        ValueError: If one is missing; with what installs it.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        it = "it" if len(missing) == 1 else "them"
        raise ValueError(
            f"{command} needs {' and '.join(missing)}; install {it}: pip install 'viva-rl[view]'"
        )


def listen(port: int, address: str = LOOPBACK) -> socket.socket:
    """A listening socket, by default on the loopback interface alone.

    Args:
        port: 0 takes a free one.
        address: IP address of an interface of this machine.

    Raises:
        ValueError: If there is no such port or address, or it is taken.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be between 0 and 65535; got {port}")
    try:
        version = ipaddress.ip_address(address).version
    except ValueError as error:
        raise ValueError(f"address must be an IP address, like {LOOPBACK}; got {address!r}") from error
    listener = socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # else a port that was served a minute ago is refused
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen()  # a client that comes before the server runs waits instead of being refused
    except OSError as error:
        listener.close()
        where = "" if address == LOOPBACK else f" of address {address}"
        raise ValueError(
            f"port {port}{where} cannot be used ({error.strerror}); 0 takes a free one"
        ) from error
    return listener


def is_loopback(address: str) -> bool:
    """Whether an IP address is reached from this machine alone."""
    return ipaddress.ip_address(address).is_loopback


def is_own_host(host: str) -> bool:
    """Whether a request's ``Host`` is one of this machine's own names.

    A foreign name that resolves to this machine is not (DNS rebinding).
    """
    return _HOST.fullmatch(host) is not None


def same_secret(given: str, secret: str) -> bool:
    """Whether two texts are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), secret.encode())


def server_config(app: "ASGIApp") -> "uvicorn.Config":
    """Settings of the server: quiet, and for so many connections at once."""
    import uvicorn

    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        server_header=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=2,
    )


def run_server(app: "ASGIApp", listener: socket.socket) -> None:
    """Serve an application until the process is interrupted."""
    import uvicorn

    with contextlib.suppress(KeyboardInterrupt):  # how a user ends it is no error
        uvicorn.Server(server_config(app)).run(sockets=[listener])
