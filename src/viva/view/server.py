"""``viva view``: serve the page on this machine alone until the user stops it."""

import contextlib
import importlib.util
import os
import re
import secrets
import socket
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path

_TOKEN = re.compile(r"[A-Za-z0-9_-]{32}")
_NEEDED = ("starlette", "uvicorn")


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
        ValueError: If a package is missing, a folder is none of these, or the port is taken.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        it = "it" if len(missing) == 1 else "them"
        raise ValueError(
            f"viva view needs {' and '.join(missing)}; install {it}: pip install 'viva-rl[view]'"
        )
    import uvicorn

    from viva.view.app import make_app

    listener = listen(port)
    with listener:
        port = listener.getsockname()[1]
        token = kept_token()
        app = make_app(folders, token=token)
        address = f"http://127.0.0.1:{port}/?token={token}"
        say(f"{address}\nonly this machine can open it; Ctrl-C ends it")
        if open_browser:
            webbrowser.open(address)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            server_header=False,
        )
        with contextlib.suppress(KeyboardInterrupt):  # how a user ends it is no error
            uvicorn.Server(config).run(sockets=[listener])


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


def listen(port: int) -> socket.socket:
    """A listening socket on the loopback interface alone; `ValueError` if there is no such port, or it is taken."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be between 0 and 65535; got {port}")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # else a port that was served a minute ago is refused
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()  # a browser that is opened before the server runs waits instead of being refused
    except OSError as error:
        listener.close()
        raise ValueError(
            f"port {port} cannot be used ({error.strerror}); leave it out to get a free one"
        ) from error
    return listener
