"""``viva view``: serve the page on this machine alone until the user stops it."""

import contextlib
import os
import re
import secrets
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path

from viva.loopback import check_packages, listen, run_server

_TOKEN = re.compile(r"[A-Za-z0-9_-]{32}")


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
    check_packages("viva view")
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
