"""How fast is the whole server? Compressed pages against SGLang's own CPU backend, in alternation.

    OMP_NUM_THREADS=1 python benchmark/serving_cpu.py --json rows.json                    # half an hour on two free cores
    OMP_NUM_THREADS=1 python benchmark/serving_cpu.py --context 4096 --batch 1 8          # a quarter of that
    OMP_NUM_THREADS=1 python benchmark/serving_cpu.py --context 1024 --batch 1 4 --rounds 2

Both servers are up from start to end and have the same bytes for their caches; one is frozen while the other is measured.
For every context:

* prefill: a prompt of `context` tokens that is not cached, one token generated;
* hit: a cached prompt of `context` tokens, then one new token, one token generated;
* decode: `batch` different prompts of `context` tokens in the cache, all generating; `steps` tokens of each.

Prompt and answer together stay within the model's longest sequence. `cpu_s` is the time of all processes of a server, in
which work of others on the machine counts less than in wall time. Options after `--` go to the server with compressed
pages, for example `-- --csa2-ratio 2`.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Server, arguments, demo_model, environment, kv_token_bytes, prompts, servers, summary
from streams import WATCHDOG_S, Stream, Turns
from transformers import AutoConfig

STOCK, OURS = "sglang torch_native", "csa2"
WARM_TOKENS = 192
"""Of a first request that is not measured: products and kernels are prepared in it."""
SPARE_TOKENS = 64
"""Tokens that streams generate while others start."""

Samples = dict[tuple[str, str], list[float]]
"""(side, quantity) -> values; quantities of decode carry the batch: "decode_tok_s@8"."""


def sides_of(options: argparse.Namespace, model: Path) -> dict[str, Sequence[str]]:
    """Command lines: the same bytes of KV for both."""
    # A place for every stream, and for the prompts of the other measurements.
    tokens = (max(options.batch) + 1) * (max(options.context) + 2 * SPARE_TOKENS + new_tokens(options))
    both = ["--watchdog-timeout", str(WATCHDOG_S), "--skip-server-warmup"]
    formats = [
        part
        for name, value in (("--csa2-ratio", options.csa2_ratio), ("--csa2-tail-format", options.csa2_tail_format))
        if value is not None
        for part in (name, value)
    ]
    size = ["--csa2-arena-size", str(tokens * kv_token_bytes(model))]
    return {
        STOCK: ["--attention-backend", "torch_native", "--max-total-tokens", str(tokens), *both],
        OURS: ["--kv-compress", "csa2", *size, *formats, *both, *options.rest],
    }


def new_tokens(options: argparse.Namespace) -> int:
    """Tokens that a stream may have to generate: every round of every batch, and a token to get going."""
    return SPARE_TOKENS + len(options.batch) * options.rounds * (options.steps + 2)


def order(names: Sequence[str], turn: int) -> Sequence[str]:
    """Each side is first every other time."""
    return names if turn % 2 == 0 else names[::-1]


def timed(samples: Samples, server: Server, quantity: str, input_ids: list[int], *, cached: int) -> None:
    """Seconds and CPU seconds of a request of one token, of whose prompt `cached` tokens must be in the cache."""
    before, start = server.cpu_s(), time.perf_counter()
    answer = server.generate(input_ids, 1)
    samples[server.name, quantity].append(time.perf_counter() - start)
    samples[server.name, f"{quantity}_cpu"].append(server.cpu_s() - before)
    found = answer["meta_info"]["cached_tokens"]
    if found != cached:
        raise RuntimeError(f"{server.name}: {found} tokens of the prompt were cached, not {cached}")


def measure_context(options: argparse.Namespace, turns: Turns, texts: list[list[int]]) -> Samples:
    """All measurements of one context; `texts` are its prompts, one more than there are streams."""
    samples: Samples = defaultdict(list)
    names = list(turns.up)
    for name in names:
        with turns.of(name) as server:
            server.generate(texts[0][:WARM_TOKENS], 4)
            server.post("/flush_cache")
    hit, *streamed = texts
    for turn in range(options.rounds):
        for name in order(names, turn):
            with turns.of(name) as server:
                # Another first token makes a prompt of the same length that shares nothing with those in the cache.
                timed(samples, server, "prefill", [hit[0] + turn, *hit[1:]], cached=0)
    for turn in range(options.rounds):
        for name in order(names, turn):
            with turns.of(name) as server:
                timed(samples, server, "ttft_hit", [*hit, streamed[0][turn]], cached=len(hit))
    measure_decode(options, turns, streamed, samples)
    return samples


def measure_decode(options: argparse.Namespace, turns: Turns, texts: list[list[int]], samples: Samples) -> None:
    """Largest batch first; then streams are stopped until the next one is left."""
    names = list(turns.up)
    streams: dict[str, list[Stream]] = {}
    for name in names:
        with turns.of(name) as server:
            streams[name] = []
            for text in texts[: max(options.batch)]:
                streams[name].append(Stream(server, text, new_tokens(options)))
                streams[name][-1].wait_for(1)
    for batch in sorted(options.batch, reverse=True):
        for name in names:
            with turns.of(name):
                for stream in streams[name][batch:]:
                    stream.stop()
                del streams[name][batch:]
        for turn in range(options.rounds):
            for name in order(names, turn):
                with turns.of(name) as server:
                    decode_window(server, streams[name], options.steps, samples)
    for name in names:
        with turns.of(name):
            for stream in streams[name]:
                stream.stop()


def decode_window(server: Server, running: list[Stream], steps: int, samples: Samples) -> None:
    """Wall and CPU time of `steps` steps of all streams together."""
    last = running[-1]
    last.wait_for(last.tokens + 2)  # one step was under way when the server was frozen
    before, start, first = server.cpu_s(), time.perf_counter(), last.tokens
    last.wait_for(first + steps)
    seconds, tokens = time.perf_counter() - start, (last.tokens - first) * len(running)
    samples[server.name, f"decode_tok_s@{len(running)}"].append(tokens / seconds)
    samples[server.name, f"decode_cpu_s@{len(running)}"].append((server.cpu_s() - before) * len(running) / tokens)


def rows_of(context: int, batches: Sequence[int], samples: Samples, names: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each side and batch."""
    rows = []
    for batch in batches:
        for name in names:
            prefill = [context / seconds for seconds in samples[name, "prefill"]]
            hits, rates = samples[name, "ttft_hit"], samples[name, f"decode_tok_s@{batch}"]
            spreads = {"decode_tok_s": summary(rates), "prefill_tok_s": summary(prefill), "ttft_hit_s": summary(hits)}
            cpu = {
                "decode_step": summary(samples[name, f"decode_cpu_s@{batch}"])["median"],
                "prefill": summary(samples[name, "prefill_cpu"])["median"],
                "ttft_hit": summary(samples[name, "ttft_hit_cpu"])["median"],
            }
            medians = {key: spread["median"] for key, spread in spreads.items()}
            rows.append({"context": context, "batch": batch, "side": name, **medians, "spread": spreads, "cpu_s": cpu})
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Medians, spreads and how many times better csa2 is than SGLang, by wall and by CPU time."""
    for stock, ours in zip(rows[::2], rows[1::2], strict=True):
        for row in (stock, ours):
            values = [
                f"{key} {row[key]:.4g} ({row['spread'][key]['min']:.4g} to {row['spread'][key]['max']:.4g})"
                for key in ("decode_tok_s", "prefill_tok_s", "ttft_hit_s")
            ]
            print(f"context {row['context']} batch {row['batch']} {row['side']:>19}: {', '.join(values)}", flush=True)
        wall = {
            "decode": ours["decode_tok_s"] / stock["decode_tok_s"],
            "prefill": ours["prefill_tok_s"] / stock["prefill_tok_s"],
            "hit": stock["ttft_hit_s"] / ours["ttft_hit_s"],
        }
        steps = {"decode": "decode_step", "prefill": "prefill", "hit": "ttft_hit"}
        cpu = {key: stock["cpu_s"][step] / ours["cpu_s"][step] for key, step in steps.items()}
        told = (f"{key} {value:.2f} (CPU time {cpu[key]:.2f})" for key, value in wall.items())
        print(f"  times faster: {', '.join(told)}", flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__)
    parser.add_argument("--context", nargs="+", type=int, default=[1024, 4096, 8192], help="tokens, whole pages of 64")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind")
    parser.add_argument("--steps", type=int, default=8, help="decode steps in a measurement")
    parser.add_argument("--csa2-ratio", help="goes to the server with compressed pages")
    parser.add_argument("--csa2-tail-format", help="goes to the server with compressed pages")
    parser.add_argument("rest", nargs="*", help="after --: more options of the server with compressed pages")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = parse()
    model = options.model or demo_model()
    config = AutoConfig.from_pretrained(model)
    longest = (config.max_position_embeddings - new_tokens(options) - SPARE_TOKENS) // 64 * 64
    sides = sides_of(options, model)
    print(json.dumps({"environment": environment(), "sides": sides}, indent=2), flush=True)
    rows = []
    with servers(model, sides) as up, Turns(up) as turns:
        for asked in options.context:
            context = min(asked, longest)
            samples = measure_context(options, turns, prompts(model, max(options.batch) + 1, context))
            rows += (found := rows_of(context, options.batch, samples, list(up)))
            print_rows(found)
    if options.json:
        record = {"environment": environment(), "sides": sides, "rows": rows}
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
