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
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
from common import Server, arguments, demo_model, kv_token_bytes, prompts, report, servers
from streams import TOKEN_TIMEOUT_S, WATCHDOG_S, Turns

STOCK, OURS = "sglang torch_native", "csa2"
SEND_S = 0.01
"""Between two requests of a burst, so that their order is known."""


def most_running(server: Server) -> int:
    """Largest number of running requests in the server's log."""
    return max((int(n) for n in re.findall(r"#running-req: (\d+)", server.log.read_text())), default=0)


def retractions(server: Server) -> int:
    """Requests that gave up their pages so far, by the server's log."""
    return sum(int(n) for n in re.findall(r"#retracted_reqs: (\d+)", server.log.read_text()))


def streamed(server: Server, input_ids: list[int], new_tokens: int) -> dict[str, float]:
    """One greedy request: when its first token came and when it ended (clock), and how much of its prompt was cached."""
    sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": input_ids, "sampling_params": sampling, "stream": True}
    start, first, meta = time.perf_counter(), 0.0, {}
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=TOKEN_TIMEOUT_S) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith(b"data: {"):
                first = first or time.perf_counter()
                meta = json.loads(line[len(b"data: ") :])["meta_info"]
    if meta.get("completion_tokens") != new_tokens:
        raise RuntimeError(f"{server.name}: a request ended after {meta.get('completion_tokens')} of {new_tokens} tokens")
    return {"start": start, "first": first, "end": time.perf_counter(), "cached": meta["cached_tokens"]}


def burst(server: Server, batch: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """All prompts at once; the figures of one row."""
    turn = threading.Semaphore(0)

    def send(index: int) -> dict[str, float]:
        turn.acquire()
        time.sleep(index * SEND_S)
        return streamed(server, batch[index], new_tokens)

    retracted = retractions(server)
    with ThreadPoolExecutor(len(batch)) as pool:
        answers = [pool.submit(send, index) for index in range(len(batch))]
        turn.release(len(batch))
        done = [answer.result() for answer in answers]
    seconds = max(d["end"] for d in done) - min(d["start"] for d in done)
    by_first = sorted(range(len(done)), key=lambda index: done[index]["first"])
    return {
        "seconds": seconds,
        "output_tok_s": len(batch) * new_tokens / seconds,
        "mean_ttft_s": statistics.mean(d["first"] - d["start"] for d in done),
        "most_running": most_running(server),
        "retractions": retractions(server) - retracted,
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
