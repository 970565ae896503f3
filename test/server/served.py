"""A real server under test: the process, its log, and what tests ask of it."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import requests

PAGE_SIZE = 64
METADATA_FRACTION = 0.273
"""Of a page of the demo model in the smallest format, csa2-8x: 192 of 704 bytes a head."""
ARENA = ("--csa2-arena-size", "188MB")
"""127 plain pages of the demo model: 8128 tokens."""
START_TIMEOUT_S = 600
REQUEST_TIMEOUT_S = 300
IDLE_TIMEOUT_S = 60
POLL_S = 0.05
WARM = "The server is fired up"
"""SGLang logs it when its own first request is answered."""
FAULTS = re.compile(r"Traceback \(most recent|IntegrityError|ArenaFullError|memory leak|double free|use-after-free")
"""What a healthy server never logs."""

CAPITALS = {
    "Germany": "Berlin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Spain": "Madrid",
    "Egypt": "Cairo",
    "Russia": "Moscow",
    "Portugal": "Lisbon",
    "Ireland": "Dublin",
}
"""What the demo model knows."""


def capital_prompt(country: str) -> str:
    """A prompt that the demo model continues with the capital."""
    return f"The capital of France is Paris. The capital of Greece is Athens. The capital of {country} is"


CERTAIN_PROMPTS = tuple(f"Q: What is the capital of {country}?\nA:" for country in ("France", "Greece"))
CERTAIN_TOKENS = 24
"""Greedy tokens after `CERTAIN_PROMPTS` of which each leads the next best by more than 0.18.

Rounding decides nothing there: a bf16 logit has steps of 0.06 to 0.12. Where two requests take different ways to the same
answer, another text than this could differ by chance.
"""


def poll(what: str, condition: Callable[[], bool], timeout_s: float) -> None:
    """Return when `condition` holds; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:g} s")
        time.sleep(POLL_S)


class Later:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._answer: Any = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._answer = self._call()
        except Exception as error:  # noqa: BLE001 - raised again by `result`
            self._error = error

    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(REQUEST_TIMEOUT_S)
        assert not self._thread.is_alive(), "no answer in time"
        if self._error is not None:
            raise self._error
        return self._answer


class Served:
    """One server. `url` answers once `wait_ready` has returned."""

    def __init__(self, model: Path, options: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu"]
        command += ["--kv-compress", "csa2", "--host", "127.0.0.1", "--port", str(port), *options]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=dict(env))

    def wait_ready(self) -> None:
        """Return when requests are served; fail with the end of the log when they never are."""

        def ready() -> bool:
            assert self.process.poll() is None, f"the server ended:\n{self.log_text()[-3000:]}"
            # Routes answer before SGLang's own first request is done, which leaves a page in the cache.
            return WARM in self.log_text()

        poll("server ready", ready, START_TIMEOUT_S)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def faults(self) -> list[str]:
        """Lines of the log that a healthy server does not write, and the end of a process that should run."""
        lines = self.log_text().splitlines()
        found = ["\n".join(lines[max(0, i - 2) : i + 30]) for i, line in enumerate(lines) if FAULTS.search(line)]
        if self.process.poll() is not None:
            found.append(f"the server ended with status {self.process.returncode}")
        return found

    def stop(self) -> None:
        """End the process, which ends its children."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    # Requests

    def get(self, route: str) -> requests.Response:
        return requests.get(self.url + route, timeout=REQUEST_TIMEOUT_S)

    def post(self, route: str, **body: Any) -> requests.Response:
        return requests.post(self.url + route, json=body, timeout=REQUEST_TIMEOUT_S)

    def body(self, prompt: Any, max_new_tokens: int, sampling: Mapping[str, Any] | None, **more: Any) -> dict[str, Any]:
        """Body of /generate: text, token ids, or a list of either; greedy, and exactly `max_new_tokens` long."""
        first = prompt[0] if isinstance(prompt, list) else prompt
        key = "text" if isinstance(first, str) else "input_ids"
        params = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True, **(sampling or {})}
        return {key: prompt, "sampling_params": params, **more}

    def generate(self, prompt: Any, max_new_tokens: int = 12, sampling: Mapping[str, Any] | None = None, **more: Any) -> Any:
        """/generate; one answer, or a list of them for a list of prompts."""
        answer = self.post("/generate", **self.body(prompt, max_new_tokens, sampling, **more))
        assert answer.ok, answer.text
        return answer.json()

    def stream(self, prompt: Any, max_new_tokens: int, **more: Any) -> Iterator[Any]:
        """/generate as a stream of answers so far. Closing the iterator disconnects."""
        body = self.body(prompt, max_new_tokens, None, stream=True, **more)
        with requests.post(self.url + "/generate", json=body, stream=True, timeout=REQUEST_TIMEOUT_S) as answer:
            assert answer.ok, answer.text
            yield from events(answer)

    def chat(self, content: str, max_tokens: int = 16, **more: Any) -> Any:
        """/v1/chat/completions, one user message, greedy."""
        messages = [{"role": "user", "content": content}]
        answer = self.post("/v1/chat/completions", messages=messages, max_tokens=max_tokens, temperature=0, **more)
        assert answer.ok, answer.text
        return answer.json()

    def abort(self, rid: str) -> None:
        self.post("/abort_request", rid=rid).raise_for_status()

    # State

    def stats(self) -> Any:
        answer = self.get("/csa2/stats")
        assert answer.ok, answer.text
        return answer.json()

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by name, with the label values of `format` and `step` in brackets."""
        samples = {}
        for line in self.get("/metrics").text.splitlines():
            if line.startswith("#"):
                continue
            name, value = line.rsplit(" ", 1)
            label = re.search(r'[{,](?:format|step)="([^"]*)"', name)
            samples[name.split("{")[0] + (f"[{label[1]}]" if label else "")] = float(value)
        return samples

    def loads(self) -> tuple[int, int]:
        """Running and waiting requests, of all replicas."""
        answer = self.get("/v1/loads?include=core")
        assert answer.ok, answer.text
        loads = answer.json()["loads"]
        return sum(load["num_running_reqs"] for load in loads), sum(load["num_waiting_reqs"] for load in loads)

    def wait_idle(self, timeout_s: float = IDLE_TIMEOUT_S) -> None:
        """Return when nothing runs or waits."""
        poll("server idle", lambda: self.loads() == (0, 0), timeout_s)

    def wait_running(self, count: int = 1) -> None:
        """Return when `count` requests run."""
        poll(f"{count} requests running", lambda: self.loads()[0] >= count, IDLE_TIMEOUT_S)

    def flush(self) -> None:
        """Empty the cache of an idle server. The flush waits in the scheduler until it is idle."""
        self.wait_idle()
        answer = self.post(f"/flush_cache?timeout={IDLE_TIMEOUT_S}")
        assert answer.ok, answer.text


StartServer = Callable[..., Served]
"""Type of the fixture `start_server`."""


def events(answer: requests.Response) -> Iterator[Any]:
    """The JSON of server-sent events, up to [DONE]."""
    for line in answer.iter_lines(chunk_size=1, decode_unicode=True):
        if line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            yield json.loads(data)


def check_stats(stats: Mapping[str, Any]) -> None:
    """What holds of every reading."""
    pages, page_bytes = stats["pages"], stats["page_bytes"]
    count = sum(pages.values())
    assert sum(pages[name] * page_bytes[name] for name in pages) == stats["used_bytes"]
    assert stats["used_bytes"] <= stats["slab_bytes"] <= stats["arena_bytes"]
    assert stats["logical_tokens"] == count * PAGE_SIZE <= stats["capacity_tokens"]
    if count:
        whole = count * page_bytes["bf16"] / stats["used_bytes"]
        assert abs(stats["compression_ratio"] - whole) < 1e-6
        assert 1 <= stats["compression_ratio"] <= page_bytes["bf16"] / min(page_bytes.values())
    else:
        assert (stats["compression_ratio"], stats["metadata_fraction"]) == (1, 0)
    assert 0 <= stats["metadata_fraction"] <= METADATA_FRACTION
    assert 0 <= stats["prefix_hit_tokens_total"] <= stats["prompt_tokens_total"]
    assert all(number >= 0 for number in stats["demotions_total"].values())
