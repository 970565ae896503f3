"""A load test of one model with every way to hold its cache, by SGLang's own `bench_serving`.

    OMP_NUM_THREADS=1 python benchmark/load.py --scale 0.1 --concurrency 1 4 --markdown load.md --plots plots

Rounds, in this order, each on a server of its own with the same bytes for its cache: no compression and no reuse; pages and
prefix cache; FP8; FP8 with pages, chunks and order of service tuned; 4 bits; and 2, 4 and 8 times smaller than that. Classes
of requests: short chat (500 + 100 tokens), medium (2000 + 1000), long document (8000 + 500), all times `--scale`; four
requests share the first half of their prompt. Measured: output tokens per second, time to the first token and per token
after it (median and 99th percentile), prompt tokens found in the cache, bytes of the cache in use.

FP8 is that of csa2 pages: SGLang's own CPU backend has none. What a format costs in quality: `csa2 check --json FILE`, whose
report `--quality FILE` puts beside the figures.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common import Server, arguments, demo_model, kv_token_bytes, report, servers
from load_report import markdown, plot

CLASSES = {"short": (500, 100), "medium": (2000, 1000), "long": (8000, 500)}
"""Tokens of prompt and answer."""
SHARING = 4
"""Requests with the same first half of their prompt."""
SAMPLE_S = 1.0
Samples = list[tuple[float, int]]
"""Seconds since the start, and bytes in use."""
FP8 = ("--csa2-tail-format", "fp8", "--csa2-shared-format", "fp8")
TUNED = ("--page-size", "32", "--chunked-prefill-size", "512", "--enable-mixed-chunk", "--schedule-policy", "lpm")
ROUNDS: dict[str, tuple[str, ...]] = {
    "none": ("--disable-radix-cache",),
    "prefix cache": ("--page-size", "64"),
    "fp8": ("--kv-compress", "csa2", *FP8),
    "fp8, tuned": ("--kv-compress", "csa2", *FP8, *TUNED),
    "fp4": ("--kv-compress", "csa2", "--csa2-ratio", "1"),
    "csa2-2x": ("--kv-compress", "csa2", "--csa2-ratio", "2"),
    "csa2-4x": ("--kv-compress", "csa2", "--csa2-ratio", "4"),
    "csa2-8x": ("--kv-compress", "csa2", "--csa2-ratio", "8"),
}


class ArenaSampler:
    """Bytes in use in the cache of a server, as long as it is entered; nothing of a server without csa2."""

    def __init__(self, server: Server, *, compressed: bool) -> None:
        self._server, self._compressed = server, compressed
        self.samples: Samples = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "ArenaSampler":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        start = time.monotonic()
        while self._compressed and not self._done.wait(SAMPLE_S):
            self.samples.append((time.monotonic() - start, self._server.stats()["used_bytes"]))


def bench(server: Server, model: Path, prompt: int, answer: int, concurrency: int, requests: int) -> dict[str, Any]:
    """One run of `bench_serving`, as it reports it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        shared = prompt // 2
        command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", server.url]
        command += ["--model", str(model), "--dataset-name", "generated-shared-prefix", "--gsp-range-ratio", "1"]
        command += ["--gsp-num-groups", str(-(-requests // SHARING)), "--gsp-prompts-per-group", str(SHARING)]
        command += ["--gsp-system-prompt-len", str(shared), "--gsp-question-len", str(prompt - shared)]
        command += ["--gsp-output-len", str(answer), "--max-concurrency", str(concurrency), "--cache-report"]
        command += ["--output-file", str(out), "--disable-tqdm", "--flush-cache", "--warmup-requests", "0"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode != 0 or not out.exists():
            raise RuntimeError(
                f"bench_serving failed with {ended.returncode}:\n{ended.stdout[-1500:]}\n{ended.stderr[-1500:]}"
            )
        result: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
        return result


def row_of(
    name: str, kind: str, concurrency: int, found: dict[str, Any], samples: list[tuple[float, int]]
) -> dict[str, Any]:
    """What is kept of a run."""
    times = {f"{what}_ms": {p: found[f"{p}_{what}_ms"] for p in ("median", "p99")} for what in ("ttft", "tpot")}
    return {
        "round": name,
        "class": kind,
        "concurrency": concurrency,
        "completed": found["completed"],
        "output_tok_s": found["output_throughput"],
        **times,
        "hit_rate": found["cache_report"]["cache_hit_rate_pct"] / 100,
        "used_bytes": max((used for _, used in samples), default=None),
        "arena": samples,
    }


def measure(server: Server, model: Path, options: Any) -> list[dict[str, Any]]:
    """All classes and concurrencies of one round."""
    rows = []
    for kind in options.classes:
        prompt, answer = (max(16, round(tokens * options.scale)) for tokens in CLASSES[kind])
        for concurrency in options.concurrency:
            requests = max(SHARING, concurrency * options.waves)
            with ArenaSampler(server, compressed="csa2" in server.command) as sampler:
                found = bench(server, model, prompt, answer, concurrency, requests)
            rows.append(row_of(server.name, kind, concurrency, found, sampler.samples))
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "arena"}), flush=True)
    return rows


def quality(path: Path | None) -> dict[str, float]:
    """Loss of perplexity by format, from a report of `csa2 check`."""
    results = json.loads(path.read_text())["results"] if path else []
    return {row["name"]: row["ppl_increase_pct"] / 100 for row in results}


def main() -> None:
    """Measure, print, write table and plots."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", nargs="+", choices=list(ROUNDS), default=list(ROUNDS))
    parser.add_argument("--classes", nargs="+", choices=list(CLASSES), default=list(CLASSES))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all lengths (default: 1)")
    parser.add_argument("--waves", type=int, default=2, help="requests for each one at a time (default: 2)")
    parser.add_argument("--arena-tokens", type=int, default=8192, help="size of the cache in bf16 tokens (default: 8192)")
    parser.add_argument("--quality", type=Path, metavar="FILE", help="report of csa2 check --json")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--plots", type=Path, help="write plots to this folder")
    options = parser.parse_args()
    model = options.model or demo_model()
    size = str(options.arena_tokens * kv_token_bytes(model))
    stock = ["--attention-backend", "torch_native", "--max-total-tokens", str(options.arena_tokens)]
    sides = {
        name: ["--enable-cache-report", *ROUNDS[name], *(["--csa2-arena-size", size] if "csa2" in ROUNDS[name] else stock)]
        for name in options.rounds
    }
    rows: list[dict[str, Any]] = []
    for name, side in sides.items():
        with servers(model, {name: side}) as up:
            rows += measure(up[name], model, options)
    losses = quality(options.quality)
    if options.markdown:
        options.markdown.write_text(markdown(rows, losses))
    if options.plots:
        plot(rows, losses, options.plots)
    settings = {name: getattr(options, name) for name in ("scale", "waves", "arena_tokens", "concurrency", "classes")}
    report(options, sides, {"settings": settings, "rows": rows, "quality": losses})


if __name__ == "__main__":
    main()
