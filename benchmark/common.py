"""What the benchmarks share: servers under test, prompts, the environment line, medians, JSON output."""

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import requests

import csa2
from csa2.demo_model import MODEL_NAME

CALIBRATION = Path(csa2.__file__).parent / "calibrations" / MODEL_NAME
"""The calibration of the demo model that ships."""
START_TIMEOUT_S = 900
WARM = "The server is fired up"
"""SGLang logs it when its own first request is answered."""
STREAM_TIMEOUT_S = 900
"""Longest silence of a streamed answer."""


class Server:
    """One server process on the demo model. `url` answers once `wait_ready` has returned."""

    def __init__(self, name: str, model: Path, arguments: Sequence[str]) -> None:
        self.name = name
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu"]
        self.command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
        self.log = Path(tempfile.mkstemp(prefix=f"{name}-", suffix=".log")[1])
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(self.command, stdout=out, stderr=subprocess.STDOUT)

    def wait_ready(self) -> None:
        """Return when the server answers; raise with the log's end when it does not."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            # Routes answer before SGLang's own first request is done.
            if WARM in self.log.read_text(errors="replace"):
                return
            time.sleep(0.5)
        raise RuntimeError(f"{self.name} did not start: {self.log}\n" + self.log.read_text(errors="replace")[-2000:])

    def post(self, route: str, **body: Any) -> Any:
        """POST a JSON body; the JSON answer."""
        answer = requests.post(self.url + route, json=body, timeout=1800)
        answer.raise_for_status()
        return answer.json() if answer.headers.get("content-type", "").startswith("application/json") else answer.text

    def generate(self, input_ids: list[int], max_new_tokens: int, **more: Any) -> Any:
        """Greedy generation by /generate."""
        return self.post("/generate", **_greedy(input_ids, max_new_tokens), **more)

    def stream(self, input_ids: list[int], max_new_tokens: int, **more: Any) -> requests.Response:
        """The same, streamed; `meta_infos` reads the answer."""
        body = {**_greedy(input_ids, max_new_tokens), "stream": True, **more}
        answer = requests.post(self.url + "/generate", json=body, stream=True, timeout=STREAM_TIMEOUT_S)
        answer.raise_for_status()
        return answer

    def processes(self) -> list[psutil.Process]:
        """The process and its children."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def cpu_s(self) -> float:
        """CPU time of all of them so far."""
        times = [process.cpu_times() for process in self.processes()]
        return sum(t.user + t.system for t in times)

    def stats(self) -> Any:
        """GET /csa2/stats."""
        return requests.get(f"{self.url}/csa2/stats", timeout=60).json()

    def stop(self) -> None:
        """End the process and its children."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _greedy(input_ids: list[int], max_new_tokens: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": input_ids, "sampling_params": sampling}


def meta_infos(answer: requests.Response) -> Iterator[dict[str, Any]]:
    """What SGLang says of a streamed answer beside each piece of it."""
    for line in answer.iter_lines():
        if line.startswith(b"data: {"):
            yield json.loads(line[len(b"data: ") :])["meta_info"]


@contextmanager
def servers(model: Path, sides: dict[str, Sequence[str]]) -> Iterator[dict[str, Server]]:
    """Start one server per side, all up together, and end them, also when this process is told to end."""
    started = {}
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    try:
        for name, arguments in sides.items():
            started[name] = Server(name, model, arguments)
            started[name].wait_ready()
        yield started
    finally:
        for server in started.values():
            server.stop()
        signal.signal(signal.SIGTERM, before)


def demo_model() -> Path:
    """Folder of the demo model, made on first use."""
    from csa2.demo_model import ensure_demo_model

    return Path(ensure_demo_model())


def kv_token_bytes(model: Path) -> int:
    """Bytes of keys and values of one token in bf16."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 2)


def prompts(model: Path, count: int, tokens: int) -> list[list[int]]:
    """`count` different prompts of `tokens` token ids each: the reference texts that come with Python itself."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids: list[int] = tokenizer("\n\n".join(topics[name] for name in sorted(topics)))["input_ids"]
    if count * tokens > len(ids):
        raise SystemExit(f"only {len(ids) // tokens} prompts of {tokens} tokens can be made")
    step = len(ids) // count
    return [ids[i * step : i * step + tokens] for i in range(count)]


def environment() -> dict[str, Any]:
    """What a reader needs to compare numbers."""
    cpu = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "unset"),
        "load_average": round(os.getloadavg()[0], 1),
        **{name: version(name) for name in ("sglang-csa2", "sglang", "torch")},
        "python": platform.python_version(),
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and spread."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder (default: the demo model)")
    parser.add_argument("--json", type=Path, help="write results to this file")
    return parser


def report(options: argparse.Namespace, sides: dict[str, Sequence[str]], results: dict[str, Any]) -> None:
    """Print environment, both sides' settings and results; write them with --json."""
    record = {"environment": environment(), "sides": {k: list(v) for k, v in sides.items()}, "results": results}
    print(json.dumps(record, indent=2))
    if options.json:
        options.json.write_text(json.dumps(record, indent=2) + "\n")
