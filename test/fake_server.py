"""A server for commands that ask one over HTTP: canned answers, and what was asked."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer(ThreadingHTTPServer):
    """Answers GET by path; a path that it does not know is 404."""

    def __init__(self, answers: dict[str, tuple[int, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.answers = answers
        self.asked: list[tuple[str, str | None]] = []
        """Path and Authorization header of each request."""


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        server.asked.append((self.path, self.headers.get("Authorization")))
        status, body = server.answers.get(self.path, (404, b"{}"))
        self.send_response(status)
        if status == 302:
            self.send_header("Location", server.url + "/elsewhere")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""


@contextmanager
def serving(answers: dict[str, tuple[int, bytes]]) -> Iterator[FakeServer]:
    """A server that runs in a thread of its own."""
    with FakeServer(answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
