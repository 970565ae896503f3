"""How many requests run at once in a small memory, and what is left of them when they come back?

    OMP_NUM_THREADS=1 python benchmark/capacity.py --json capacity.json

Both servers get the memory of `arena-tokens` bf16 tokens. All prompts, no two with a common beginning, are sent at the same
moment (*cold*), and when all are answered once more (*again*). Printed: most requests that ran together, retractions, how
far first tokens came out of the order of sending, output tokens per second, mean time to the first token, prompt tokens that
were in the cache. While one server is measured the other is frozen.
"""

import json
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common import Server, arguments, demo_model, kv_token_bytes, meta_infos, prompts, report, servers
from streams import WATCHDOG_S, Turns

STOCK, OURS = "sglang torch_native", "csa2"
SEND_S = 0.01
"""Between two requests of a burst, so that their order is known."""


def most_running(log: str) -> int:
    """Largest number of running requests in a server's log."""
    return max((int(n) for n in re.findall(r"#running-req: (\d+)", log)), default=0)


def retractions(log: str) -> int:
    """Requests that gave up their pages, by a server's log."""
    return sum(int(n) for n in re.findall(r"#retracted_reqs: (\d+)", log))


def streamed(server: Server, input_ids: list[int], new_tokens: int) -> dict[str, float]:
    """One greedy request: when its first token came and when it ended (clock), and how much of its prompt was cached."""
    start = time.perf_counter()
    with server.stream(input_ids, new_tokens) as answer:
        pieces = [(time.perf_counter(), meta) for meta in meta_infos(answer)]
    count = pieces[-1][1]["completion_tokens"] if pieces else 0
    if count != new_tokens:
        raise RuntimeError(f"{server.name}: a request ended after {count} of {new_tokens} tokens")
    cached = pieces[-1][1]["cached_tokens"]
    return {"start": start, "first": pieces[0][0], "end": time.perf_counter(), "cached": cached}


def burst(server: Server, batch: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """All prompts at once; the figures of one row."""

    def send(index: int) -> dict[str, float]:
        time.sleep(index * SEND_S)
        return streamed(server, batch[index], new_tokens)

    before = len(server.log.read_text())
    with ThreadPoolExecutor(len(batch)) as pool:
        done = list(pool.map(send, range(len(batch))))
    log = server.log.read_text()[before:]
    seconds = max(d["end"] for d in done) - min(d["start"] for d in done)
    by_first = sorted(range(len(done)), key=lambda index: done[index]["first"])
    return {
        "seconds": seconds,
        "output_tok_s": len(batch) * new_tokens / seconds,
        "mean_ttft_s": statistics.mean(d["first"] - d["start"] for d in done),
        "most_running": most_running(log),
        "retractions": retractions(log),
        "places_out_of_order": max(abs(place - index) for place, index in enumerate(by_first)),
        "cached_tokens": sum(d["cached"] for d in done),
        "prompt_tokens": sum(map(len, batch)),
    }


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--arena-tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("rest", nargs="*", help="after --: more options of the server with compressed pages")
    options = parser.parse_args()
    model = options.model or demo_model()
    both = ["--decode-log-interval", "1", "--watchdog-timeout", str(WATCHDOG_S), "--skip-server-warmup"]
    size = str(options.arena_tokens * kv_token_bytes(model))
    sides = {
        STOCK: ["--attention-backend", "torch_native", "--max-total-tokens", str(options.arena_tokens), *both],
        OURS: ["--kv-compress", "csa2", "--csa2-arena-size", size, *both, *options.rest],
    }
    batch = prompts(model, options.prompts, options.tokens)
    results: dict[str, Any] = {}
    with servers(model, sides) as up, Turns(up) as turns:
        for name in up:
            with turns.of(name) as server:
                results[name] = {kind: burst(server, batch, options.new_tokens) for kind in ("cold", "again")}
                if name == OURS:
                    stats = server.stats()
                    keys = ("pages", "target_ratio", "demotions_total", "evicted_tokens_total")
                    results[name]["cache"] = {key: stats[key] for key in keys}
                print(json.dumps({name: results[name]}), flush=True)
    again = {name: results[name]["again"] for name in (STOCK, OURS)}
    results["again, times better"] = {
        "output_tok_s": again[OURS]["output_tok_s"] / again[STOCK]["output_tok_s"],
        "mean_ttft_s": again[STOCK]["mean_ttft_s"] / again[OURS]["mean_ttft_s"],
    }
    report(options, sides, results)


if __name__ == "__main__":
    main()
