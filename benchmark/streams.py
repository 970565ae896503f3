"""Servers that take turns: one is frozen while the other is measured, and requests that stream meanwhile."""

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import requests
from common import Server

POLL_S = 0.001
TOKEN_TIMEOUT_S = 900
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
        sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
        self._server, self._rid = server, uuid.uuid4().hex
        body = {"input_ids": input_ids, "sampling_params": sampling, "stream": True, "rid": self._rid}
        self.tokens = 0
        self._failure: Exception | None = None
        self._ended = False
        self._answer = requests.post(server.url + "/generate", json=body, stream=True, timeout=TOKEN_TIMEOUT_S)
        self._answer.raise_for_status()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for(self, tokens: int) -> None:
        """Return when this many tokens in all have arrived; raise if they cannot any more."""
        deadline = time.monotonic() + TOKEN_TIMEOUT_S
        while self.tokens < tokens:
            if self._ended or time.monotonic() > deadline:
                raise RuntimeError(f"the stream ended at {self.tokens} of {tokens} tokens: {self._failure}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Return when the server has ended the request, so that no later step computes it."""
        # Hanging up would not do: SGLang waits two seconds before it believes that.
        self._server.post("/abort_request", rid=self._rid)
        self._thread.join(TOKEN_TIMEOUT_S)
        if not self._ended:
            raise RuntimeError(f"{self._server.name} did not end a request that was aborted")
        self._answer.close()

    def _read(self) -> None:
        try:
            for line in self._answer.iter_lines():
                if line.startswith(b"data: {"):
                    self.tokens = json.loads(line[len(b"data: ") :])["meta_info"]["completion_tokens"]
        except Exception as error:  # noqa: BLE001 - `wait_for` reports it
            self._failure = error
        self._ended = True


def cpu_s(server: Server) -> float:
    """CPU time of the processes of a server so far."""
    times = [process.cpu_times() for process in _processes(server)]
    return sum(t.user + t.system for t in times)


def _processes(server: Server) -> list[psutil.Process]:
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children(recursive=True)]


def _signal(server: Server, send: Callable[[psutil.Process], None]) -> None:
    for process in _processes(server):
        send(process)
