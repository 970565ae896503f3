"""How long do short prompts wait while long ones arrive? Settings of the scheduler side by side, compressed pages in all.

    OMP_NUM_THREADS=1 python benchmark/mixed_load.py                                   # about 5 minutes
    OMP_NUM_THREADS=1 python benchmark/mixed_load.py --sides default priorities shortest --shorts 40 --json rows.json

`--longs` clients each send a prompt of `--long-tokens` tokens, and the next one when it is answered, so there is always one
to compute. Meanwhile a prompt of `--short-tokens` tokens arrives every `--interval` seconds, `--shorts` in all. No prompt is
in the cache. One server is frozen while the other is measured. Per side: time to the first token of the short prompts, the
longest pause between two of their tokens, and tokens of long prompts computed per second, which is what a setting costs.
"""

import argparse
import statistics
import threading
import time
from itertools import pairwise
from typing import Any

from common import Server, arguments, demo_model, meta_infos, prompts, report, servers
from streams import WATCHDOG_S, Turns

SIDES = {
    "default": [],
    "priorities": ["--enable-priority-scheduling"],
    "mixed": ["--chunked-prefill-size", "512", "--enable-mixed-chunk"],
    "shortest": ["--schedule-policy", "shortest-prefill-first", "--chunked-prefill-size", "512", "--enable-mixed-chunk"],
}
SHORT_PRIORITY = 1
"""Of short prompts where there are priorities; that of long ones is 0."""
NEW_TOKENS = 8
WARM_TOKENS = 192


class LongPrompts:
    """Clients that always have a long prompt in work, until `stop`."""

    def __init__(self, server: Server, base: list[int], clients: int, more: dict[str, Any]) -> None:
        self._server, self._base, self._more = server, base, more
        self._stop, self._lock, self._sent = threading.Event(), threading.Lock(), 0
        self.answered = 0
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Return when the last one is answered."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                self._sent += 1
                # Another first token makes a prompt of the same length that shares nothing with those in the cache.
                first = self._base[0] + self._sent
            self._server.generate([first, *self._base[1:]], NEW_TOKENS, **self._more)
            with self._lock:
                self.answered += 1


def short_prompt(server: Server, input_ids: list[int], more: dict[str, Any], found: list[dict[str, float]]) -> None:
    """One short request: seconds to its first token, and the longest pause after it."""
    sent, times = time.perf_counter(), []
    for _ in meta_infos(server.stream(input_ids, NEW_TOKENS, **more)):
        times.append(time.perf_counter())
    pauses = [after - before for before, after in pairwise(times)]
    found.append({"first_token_s": times[0] - sent, "longest_pause_s": max(pauses, default=0.0)})


def measure(server: Server, options: argparse.Namespace, texts: list[list[int]], has_priorities: bool) -> dict[str, Any]:
    """All short prompts of one side."""
    base, *shorts = texts
    server.generate(base[:WARM_TOKENS], NEW_TOKENS)
    server.post("/flush_cache")
    short_more, long_more = ({"priority": SHORT_PRIORITY}, {"priority": 0}) if has_priorities else ({}, {})
    start = time.perf_counter()
    longs = LongPrompts(server, base, options.longs, long_more)
    found: list[dict[str, float]] = []
    threads = []
    for short in shorts:
        time.sleep(options.interval)
        ids = short[: options.short_tokens]
        threads.append(threading.Thread(target=short_prompt, args=(server, ids, short_more, found)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    longs.stop()
    seconds = time.perf_counter() - start
    if len(found) < len(shorts):
        raise RuntimeError(f"{server.name} answered {len(found)} of {len(shorts)} short prompts: see {server.log}")
    return {
        "short_prompts": len(found),
        "first_token_s": percentiles([row["first_token_s"] for row in found]),
        "longest_pause_s": percentiles([row["longest_pause_s"] for row in found]),
        "long_prompt_tok_s": longs.answered * options.long_tokens / seconds,
        "chunked_prefill_size": server_argument(server, "chunked_prefill_size"),
    }


def server_argument(server: Server, name: str) -> Any:
    """An argument of the server in effect."""
    import requests

    return requests.get(f"{server.url}/server_info", timeout=60).json()[name]


def percentiles(values: list[float]) -> dict[str, float]:
    """p50 and p99; with fewer than a hundred values p99 is next to the largest."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98], "max": max(values)}


def print_table(results: dict[str, Any]) -> None:
    """One row a side."""
    print("\n| | first token p50, s | p99, s | longest pause p50, s | p99, s | long prompts, tokens/s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, row in results.items():
        first, pause = row["first_token_s"], row["longest_pause_s"]
        times = f"{first['p50']:.2f} | {first['p99']:.2f} | {pause['p50']:.2f} | {pause['p99']:.2f}"
        print(f"| {name} | {times} | {row['long_prompt_tok_s']:.0f} |")


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=["default", "shortest"])
    parser.add_argument("--longs", type=int, default=2, help="clients with long prompts")
    parser.add_argument("--long-tokens", type=int, default=2560)
    parser.add_argument("--shorts", type=int, default=20, help="short prompts in all")
    parser.add_argument("--short-tokens", type=int, default=64)
    parser.add_argument("--interval", type=float, default=1.5, help="seconds between two short prompts")
    options = parser.parse_args()
    model = options.model or demo_model()
    both = ["--kv-compress", "csa2", "--csa2-arena-size", "188MB"]
    both += ["--watchdog-timeout", str(WATCHDOG_S), "--skip-server-warmup"]
    sides = {name: [*both, *SIDES[name]] for name in options.sides}
    texts = prompts(model, options.shorts + 1, max(options.long_tokens, options.short_tokens))
    results = {}
    with servers(model, sides) as up, Turns(up) as turns:
        for name in sides:
            with turns.of(name) as server:
                results[name] = measure(server, options, texts, "--enable-priority-scheduling" in sides[name])
    report(options, sides, results)
    print_table(results)


if __name__ == "__main__":
    main()
