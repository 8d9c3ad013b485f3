"""Servers on this machine, in a thread of their own while a context lasts."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseServer


class QuietHandler(BaseHTTPRequestHandler):
    """Says nothing of its requests."""

    def log_message(self, *_):
        pass

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        """One whole answer; underscores in headers' names are hyphens."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def running(server: BaseServer) -> Generator[None]:
    """A server that is bound already."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def serving(handler: type[QuietHandler], *, port: int = 0) -> Generator[int]:
    """The port at which a handler answers."""
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    with running(server):
        yield server.server_port
