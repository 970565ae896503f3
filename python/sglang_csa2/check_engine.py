"""One engine under check: SGLang's own server in a process of its own, its log, and the requests of the protocol.

A process of its own, because an SGLang engine whose scheduler dies takes the process that started it along.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from csa2.check.errors import EngineError
from csa2.check.metrics import TokenScores
from csa2.check.prompts import STEP_TOKENS, CopyProbe, Protocol

START_TIMEOUT_S = 900
START_TRIES = 3
PORT_TAKEN = "address already in use"
"""In the log of a server whose port somebody else took while it loaded; it is then started on another one."""
REQUEST_TIMEOUT_S = 3600
FLUSH_TIMEOUT_S = 60
STOP_TIMEOUT_S = 60
POLL_S = 0.5
LOG_LINES = 15
"""Of a dead engine's log, in the error."""


class Engine:
    """A server that is up inside the `with` block.

    Args:
        name: for messages.
        arguments: fields of SGLang's server arguments; True is a bare switch.

    Raises:
        EngineError: it ended, or answers with an error; holds the end of its log.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        self.name = name
        self._command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1"]
        for field, value in arguments.items():
            flag = "--" + field.replace("_", "-")
            self._command += [flag] if value is True else [flag, str(value)]
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""
        self._identity = ""
        self._log = Path()

    def __enter__(self) -> "Engine":
        for tries_left in reversed(range(START_TRIES)):
            self._start()
            try:
                self._wait_ready()
            except EngineError:
                self._stop()
                if not (tries_left and PORT_TAKEN in self._log.read_text(errors="replace")):
                    raise
            except BaseException:
                self._stop()
                raise
            else:
                break
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()
        # Kept where it explains an error.
        if error is None:
            self._log.unlink(missing_ok=True)

    def generate(self, tokens: Sequence[int], **more: Any) -> Any:
        """Meta information of the answer to a prompt of token ids, of which one token is generated."""
        sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        return self._post("/generate", {"input_ids": list(tokens), "sampling_params": sampling, **more})["meta_info"]

    def answer(self, tokens: Sequence[int], new_tokens: int) -> tuple[str, int]:
        """What follows a prompt of token ids, at most `new_tokens` of the most likely ones, and the prompt tokens that were
        found in the cache."""
        sampling = {"max_new_tokens": new_tokens, "temperature": 0}
        answer = self._post("/generate", {"input_ids": list(tokens), "sampling_params": sampling})
        return str(answer["text"]), int(answer["meta_info"]["cached_tokens"])

    def stats(self) -> Any:
        """Statistics of the compressed cache, read between two batches."""
        return self._request("/csa2/stats", None)

    def flush(self) -> None:
        """Empty the cache once nothing runs."""
        self._request(f"/flush_cache?timeout={FLUSH_TIMEOUT_S}", b"")

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        # By this name its answers are told from those of another server that took the port in between.
        self._identity = f"csa2-check-{uuid.uuid4().hex}"
        with tempfile.NamedTemporaryFile(prefix="csa2-check-", suffix=".log", delete=False) as log:
            self._log = Path(log.name)
            self._process = subprocess.Popen(  # noqa: S603 - this Python, with arguments checked by the caller
                [*self._command, "--served-model-name", self._identity, "--port", str(port)],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise self._failure("ended while it started")
            try:
                with urllib.request.urlopen(f"{self._url}/v1/models", timeout=5) as answer:  # noqa: S310 - our own address
                    if self._identity in answer.read().decode(errors="replace"):
                        return
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(POLL_S)
        raise self._failure(f"did not start within {START_TIMEOUT_S} s")

    def _post(self, route: str, body: Mapping[str, Any]) -> Any:
        return self._request(route, json.dumps(body).encode())

    def _request(self, route: str, body: bytes | None) -> Any:
        request = urllib.request.Request(self._url + route, body, {"Content-Type": "application/json"})  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:  # noqa: S310 - our own address
                text = answer.read()
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace").strip()
            raise self._failure(f"refused {route} with {error.code} ({said})") from error
        except (OSError, http.client.HTTPException) as error:
            raise self._failure(f"does not answer {route} ({error})") from error
        return json.loads(text) if text.startswith((b"{", b"[")) else None

    def _failure(self, what: str) -> EngineError:
        tail = self._log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:]
        return EngineError(f"the engine for {self.name} {what}. The end of its log, {self._log}:\n" + "\n".join(tail))

    def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        self._process = None
        try:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # Its children too: they share the session that was made for it.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def score_whole(engine: Engine, tokens: Sequence[int], protocol: Protocol, top: int) -> TokenScores:
    """Score in one request. Without compression the same as `score_in_steps`: attention to what is there is exact.

    Cheaper where a prefix hit computes the whole causal square again, as SGLang's torch attention does.
    """
    return _scores(engine, tokens[: protocol.document_tokens], protocol.context, 0, top)


def score_in_steps(engine: Engine, tokens: Sequence[int], protocol: Protocol, top: int) -> TokenScores:
    """Prefill the context, then score step by step: each finds everything before it in the cache and reads it from pages.

    A step's prompt ends one token after its pages, since an engine scores the tokens after the first new one.
    """
    engine.generate(tokens[: protocol.context])
    steps = []
    for start in range(protocol.context, protocol.context + protocol.score_tokens, STEP_TOKENS):
        steps.append(_scores(engine, tokens[: start + STEP_TOKENS + 1], start, start, top))
    return TokenScores(
        np.concatenate([step.tokens for step in steps]),
        np.concatenate([step.logprobs for step in steps]),
        np.concatenate([step.top_tokens for step in steps]),
        np.concatenate([step.top_logprobs for step in steps]),
    )


def score_copy(engine: Engine, tokens: Sequence[int], probe: CopyProbe, protocol: Protocol) -> TokenScores:
    """Scores of the repeated passage behind its cue; the text before it must have been scored."""
    start = protocol.context + protocol.score_tokens
    scores = _scores(engine, [*tokens[:start], *probe.passage], start, start, 1)
    # The first score is of the second token of the passage.
    rest = slice(probe.cue - 1, None)
    return TokenScores(scores.tokens[rest], scores.logprobs[rest], scores.top_tokens[rest], scores.top_logprobs[rest])


def _scores(engine: Engine, prompt: Sequence[int], start: int, cached: int, top: int) -> TokenScores:
    """Scores of the tokens of `prompt` after the one at `start`, of which `cached` must come from the cache."""
    meta = engine.generate(prompt, return_logprob=True, logprob_start_len=start, top_logprobs_num=top)
    if meta["cached_tokens"] != cached:
        raise EngineError(
            f"the engine for {engine.name} found {meta['cached_tokens']} tokens of a prompt in its cache instead of "
            f"{cached}: something was evicted, so this would not measure what it says. Report it with `csa2 info`"
        )
    # The first new token has no score: what comes before it was not computed in this request.
    scored, tops = meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:]
    if [token for _, token, _ in scored] != list(prompt[start + 1 :]):
        raise EngineError(f"the engine for {engine.name} scored other tokens than were sent: report it with `csa2 info`")
    return TokenScores(
        np.array([token for _, token, _ in scored], dtype=np.int64),
        np.array([value for value, _, _ in scored], dtype=np.float64),
        np.array([[token for _, token, _ in row] for row in tops], dtype=np.int64),
        np.array([[value for value, _, _ in row] for row in tops], dtype=np.float64),
    )
