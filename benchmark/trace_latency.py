"""How long do requests of a trace wait for their first token, by eviction policy? One server for each, in alternation.

    OMP_NUM_THREADS=1 python benchmark/trace_latency.py --trace agents --requests 200 --seed 1

Every server gets the same requests in the same order, one at a time, the other servers frozen; one token is generated, and
the answer of the trace is part of the next prompt of its conversation. All have `--arena-tokens` bf16 tokens of bytes,
their pages compressed alike, and compute prompts in chunks of `--chunk-tokens`, as `eviction.py` does: a chunk is written
uncompressed, so one as large as the arena pushes out whatever is there, by any policy. Prints the share of prompt tokens
found in the cache, and median and 99th percentile of the time to the first token: by the clock, and by CPU time of the
server, which other work on the machine disturbs less.
"""

import time
from itertools import islice
from statistics import median, quantiles
from typing import Any

from common import Server, arguments, demo_model, kv_token_bytes, report, servers
from streams import WATCHDOG_S, Turns
from tqdm import tqdm
from traces import TRACES

POLICIES = {
    "csa2": (),
    "lru": ("--radix-eviction-policy", "lru"),
    "slru": ("--radix-eviction-policy", "slru"),
    "tlru": (
        *("--radix-eviction-policy", "tlru"),
        *("--radix-eviction-policy-config", '{"threshold": 1024, "next_prompt_estimate": 256}'),
    ),
}


def first_token(server: Server, prompt: list[int]) -> dict[str, float]:
    """One request: seconds by the clock and of CPU time, and tokens of the prompt that were found in the cache."""
    cpu, start = server.cpu_s(), time.perf_counter()
    answer = server.generate(prompt, 1)
    took = time.perf_counter() - start
    return {"s": took, "cpu_s": server.cpu_s() - cpu, "cached": answer["meta_info"]["cached_tokens"], "tokens": len(prompt)}


def summary(requests: list[dict[str, float]]) -> dict[str, Any]:
    """Hit rate and times of one server."""
    times = {name: [request[name] for request in requests] for name in ("s", "cpu_s")}
    return {
        "hit_rate": sum(request["cached"] for request in requests) / sum(request["tokens"] for request in requests),
        **{f"ttft_{name}": {"median": median(x), "p99": quantiles(x, n=100)[-1]} for name, x in times.items()},
    }


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--trace", choices=list(TRACES), default="multi-turn")
    parser.add_argument("--requests", type=int, default=160, help="first requests of the trace (default: 160)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--arena-tokens", type=int, default=2048, help="size of the arena in bf16 tokens (default: 2048)")
    parser.add_argument("--chunk-tokens", type=int, default=512, help="of a prompt at once (default: 512)")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    options = parser.parse_args()
    model = options.model or demo_model()
    arena = str(options.arena_tokens * kv_token_bytes(model))
    both = ["--kv-compress", "csa2", "--csa2-arena-size", arena, "--watchdog-timeout", str(WATCHDOG_S)]
    both += ["--chunked-prefill-size", str(options.chunk_tokens)]
    sides = {name: [*both, *POLICIES[name]] for name in options.policies}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    with servers(model, sides) as up:
        with Turns(up) as turns:
            for request in tqdm(list(islice(TRACES[options.trace](options.seed), options.requests)), unit="request"):
                for name in up:
                    with turns.of(name) as server:
                        results[name].append(first_token(server, list(request.prompt)))
        evicted = {name: server.stats()["evicted_tokens_total"] for name, server in up.items()}
    found = {name: {**summary(requests), "evicted_tokens": evicted[name]} for name, requests in results.items()}
    settings = {name: getattr(options, name) for name in ("trace", "requests", "seed", "arena_tokens", "chunk_tokens")}
    report(options, sides, {"settings": settings, "policies": found})


if __name__ == "__main__":
    main()
