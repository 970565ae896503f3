"""Servers that take turns: one is frozen while the other is measured, and requests that stream meanwhile."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
from common import STREAM_TIMEOUT_S, Server, meta_infos

POLL_S = 0.001
WATCHDOG_S = 7200
"""SGLang ends a scheduler that makes no step for 300 s, and a frozen one makes none."""


class Turns:
    """Only the server whose turn it is has processes that run; the idle loops of the others would take its cores."""

    def __init__(self, up: dict[str, Server]) -> None:
        self.up = up

    def __enter__(self) -> "Turns":
        for server in self.up.values():
            _signal(server, psutil.Process.suspend)
        return self

    def __exit__(self, *exception: object) -> None:
        for server in self.up.values():
            _signal(server, psutil.Process.resume)

    @contextmanager
    def of(self, name: str) -> Iterator[Server]:
        """Let one server run."""
        server = self.up[name]
        _signal(server, psutil.Process.resume)
        try:
            yield server
        finally:
            _signal(server, psutil.Process.suspend)


class Stream:
    """A greedy request whose tokens arrive in a thread of its own until `stop`."""

    def __init__(self, server: Server, input_ids: list[int], max_new_tokens: int) -> None:
        self._server, self._rid = server, uuid.uuid4().hex
        self.tokens = 0
        self._failure: Exception | None = None
        self._ended = False
        self._answer = server.stream(input_ids, max_new_tokens, rid=self._rid)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for(self, tokens: int) -> None:
        """Return when this many tokens in all have arrived; raise if they cannot any more."""
        deadline = time.monotonic() + STREAM_TIMEOUT_S
        while self.tokens < tokens:
            if self._ended or time.monotonic() > deadline:
                raise RuntimeError(f"the stream ended at {self.tokens} of {tokens} tokens: {self._failure}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Return when the server has ended the request, so that no later step computes it."""
        # Hanging up would not do: SGLang waits two seconds before it believes that.
        self._server.post("/abort_request", rid=self._rid)
        self._thread.join(STREAM_TIMEOUT_S)
        if not self._ended:
            raise RuntimeError(f"{self._server.name} did not end a request that was aborted")
        self._answer.close()

    def _read(self) -> None:
        try:
            for meta in meta_infos(self._answer):
                self.tokens = meta["completion_tokens"]
        except Exception as error:  # noqa: BLE001 - `wait_for` reports it
            self._failure = error
        self._ended = True


def _signal(server: Server, send: Callable[[psutil.Process], None]) -> None:
    for process in server.processes():
        send(process)
