"""What does sealing cost? Time per page of the torch reference and of compiled code, and shares of prefill and decode.

    OMP_NUM_THREADS=1 python benchmark/sealing.py --tokens 4096 --prompts 2 --json rows.json

Pages have the shape of the demo model and random contents; both implementations re-encode the same pages in turn. A server
of each setting then answers a prompt of `tokens` tokens and generates `new` tokens after it; the shares are what its own
counters say it re-encoded, at the time per page of each implementation, over what the rest took. All times are CPU time: of
the thread that seals, and of the processes of the server.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import CALIBRATION, Server, arguments, demo_model, prompts, report, servers
from torch import Tensor

from csa2.calibrate.artefact import load
from csa2.codec.assembly import codec_and_ladder
from csa2.codec.channels import make_rotation
from csa2.codec.queries import QuerySamples
from csa2.codec.sealing import CompiledSealer, ReferenceSealer, Wave
from csa2.options import CacheOptions
from sgl_kernels.page_layout import PageGeometry

GEOMETRY = PageGeometry(30, 3, 64, 64, torch.bfloat16)
QUERY_HEADS = 9
SETTINGS = {
    "ratio 1": CacheOptions(ratio="1"),
    "ratio 4": CacheOptions(ratio="4", calibration=str(CALIBRATION)),
    "tail k8v4": CacheOptions(tail_format="k8v4"),
}
PAGES = 8


def server_arguments(options: CacheOptions) -> list[str]:
    """Of the server with `options`."""
    given = ["--kv-compress", "csa2", "--csa2-arena-size", "400MB", "--csa2-ratio", options.ratio]
    given += ["--csa2-tail-format", options.tail_format]
    return given if options.calibration is None else [*given, "--csa2-calibration", options.calibration]


def samples() -> QuerySamples:
    """The queries of one reader, number 0."""
    found = QuerySamples(GEOMETRY.num_layers, GEOMETRY.num_kv_heads)
    for layer in range(GEOMETRY.num_layers):
        found.record_extend(0, layer, torch.randn(1024, QUERY_HEADS, GEOMETRY.head_dim), GEOMETRY.head_dim**-0.5)
    return found


def plain_pages() -> Tensor:
    """(PAGES x bytes,) uint8: tokens that resemble their neighbours, around a mean."""
    shape = (PAGES, GEOMETRY.num_layers, 2, GEOMETRY.num_kv_heads, GEOMETRY.page_size, GEOMETRY.head_dim)
    tokens = torch.randn(shape)
    mean = torch.randn(*shape[:-2], 1, GEOMETRY.head_dim)
    return (tokens + tokens.roll(1, -2) + mean).bfloat16().flatten().view(torch.uint8)


def ms_per_page(options: CacheOptions, rounds: int) -> dict[str, dict[str, float]]:
    """Median CPU time by step of the ladder, "bf16->fp4" for example, and by implementation."""
    known = None
    if options.calibration is not None:
        known = load(Path(options.calibration)).of(range(GEOMETRY.num_layers), range(GEOMETRY.num_kv_heads))
    codec, ladder = codec_and_ladder(options, GEOMETRY, make_rotation(GEOMETRY.head_dim, neox=True), known)
    sealers = {"reference": ReferenceSealer(ladder.layouts, codec), "cpu": CompiledSealer(ladder.layouts, codec)}
    asked, pages = samples(), torch.arange(PAGES)
    found = {}
    for start, before in enumerate(ladder.layouts):
        arena = plain_pages()
        if start:
            wave = Wave(pages * 0, pages * ladder.page_bytes[0], pages * 0 + start, pages * 0)
            arena = sealers["cpu"].seal(arena, wave, asked)[start].flatten()
        for end in range(start + 1, len(ladder.layouts)):
            wave = Wave(pages * 0 + start, pages * before.page_bytes, pages * 0 + end, pages * 0)
            times: dict[str, list[float]] = {name: [] for name in sealers}
            for _ in range(rounds):
                for name, sealer in sealers.items():
                    began = time.thread_time()
                    sealer.seal(arena, wave, asked)
                    times[name].append((time.thread_time() - began) / PAGES * 1e3)
            found[f"{ladder.names[start]}->{ladder.names[end]}"] = {n: statistics.median(t) for n, t in times.items()}
    return found


def shares(server: Server, cost: dict[str, dict[str, float]], documents: list[list[int]], new: int) -> dict[str, Any]:
    """Sealing over all of prefill and of decode, median over `documents`; the server seals with compiled code."""
    runs: dict[str, list[float]] = {}
    for document in documents:
        marks = [server.stats()["demotions_total"]]
        seconds = []
        for count in (1, 1 + new):
            began = server.cpu_s()
            server.generate(document, count)
            seconds.append(server.cpu_s() - began)
            marks.append(server.stats()["demotions_total"])
        for phase, took, before, after in zip(("prefill", "decode"), seconds, marks, marks[1:], strict=False):
            runs.setdefault(f"{phase}_s", []).append(took)
            runs.setdefault(f"{phase}_pages", []).append(sum(after[step] - before[step] for step in after))
            spent = {n: sum((after[s] - before[s]) * cost[s][n] for s in after) / 1e3 for n in ("reference", "cpu")}
            for name, sealing in spent.items():
                runs.setdefault(f"{phase}_share_{name}", []).append(sealing / (took - spent["cpu"] + sealing))
    return {key: round(statistics.median(values), 4) for key, values in runs.items()}


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = options.model or demo_model()
    documents = prompts(model, options.prompts + 1, options.tokens)
    results: dict[str, Any] = {}
    sides = {name: server_arguments(SETTINGS[name]) for name in options.settings}
    for name in options.settings:
        cost = ms_per_page(SETTINGS[name], options.rounds)
        with servers(model, {name: sides[name]}) as up:
            up[name].generate(documents[0], 1)  # whatever the first request pays
            results[name] = {"ms_per_page": cost, "shares": shares(up[name], cost, documents[1:], options.new)}
        print(name, json.dumps(results[name]), flush=True)
    report(options, sides, results)


if __name__ == "__main__":
    main()
