"""How fast does one layer of decode attention read pages of each format? One core, cold memory.

    OMP_NUM_THREADS=1 python benchmark/attention_kernels.py --context 4096 16384 --batch 1 8 --json rows.json

Pages lie in random order in an arena larger than the last-level cache, and each call reads other pages. `ratio_vs_sdpa` is
against what SGLang's torch_native backend does (gather, then scaled_dot_product_attention), of which `sdpa-grouped` is the
better use, `ratio_vs_bf16` against our own kernel on bf16 pages, `bandwidth_fraction` is bytes of the pages read per second
over the read bandwidth of this core.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import environment
from torch import Tensor

from sgl_kernels.basis import orthonormal_basis
from sgl_kernels.cpu import build
from sgl_kernels.page_codec.reference import CodecBases, Entries, seal_pages
from sgl_kernels.page_layout import KeyClass, PageGeometry, PageLayout, coded_layout, plain_layout, reduced_layout
from sgl_kernels.paged_attention.cpu import CpuAttention

SHAPES = {"9q/3kv d64": (9, 3, 64), "32q/8kv d128": (32, 8, 128)}
CODED = {"fp8": ("e4m3", "e4m3"), "k8v4": ("e4m3", "e2m1"), "fp4": ("e2m1", "e2m1"), "int4": ("int4", "int4")}
MERGES = {"csa2-2x": 1, "csa2-4x": 2, "csa2-8x": 4}
DIFFERENT_PAGES = 16


def layouts_of(geometry: PageGeometry) -> list[PageLayout]:
    """The ladder, with three eighths of the channels at 4 bits and as many at 2 in the reduced formats."""
    part = geometry.head_dim * 3 // 8
    classes = ((KeyClass("int4", part), KeyClass("lloyd2", part)),) * geometry.num_kv_heads
    reduced = [reduced_layout(name, classes, "lloyd2", merge, geometry) for name, merge in MERGES.items()]
    return [plain_layout("bf16", geometry), *(coded_layout(n, *c, geometry) for n, c in CODED.items()), *reduced]


def sealed(layout: PageLayout, bases: CodecBases) -> Tensor:
    """(DIFFERENT_PAGES, page_bytes) uint8."""
    g = layout.geometry
    shape = (DIFFERENT_PAGES, g.num_kv_heads, layout.entries, g.head_dim)
    keys, values = torch.randn(2, *shape)
    if layout.is_plain:
        return torch.stack((keys, values), 1).to(g.dtype).view(torch.uint8).view(DIFFERENT_PAGES, -1)
    bias = torch.rand(shape[:3]) if layout.is_merged else None
    return seal_pages(Entries(keys, values, bias), layout, bases)


def median_s(calls: list[Callable[[], object]], seconds: float = 1.5) -> float:
    """Median CPU time of a call; calls are made in turn, so that each reads cold memory."""
    times, end, i = [], time.monotonic() + seconds, 0
    calls[0]()
    while time.monotonic() < end or len(times) < 5:
        i += 1
        start = time.thread_time()
        calls[i % len(calls)]()
        times.append(time.thread_time() - start)
    return statistics.median(times)


def read_bandwidth(cold_bytes: int) -> float:
    """Bytes per second of one core reading memory."""
    data = torch.ones(cold_bytes // 4)
    return cold_bytes / median_s([data.sum], 3.0)


def ours(layout: PageLayout, kernels: CpuAttention, bases: CodecBases, options: argparse.Namespace, shape: tuple[int, int, int], context: int, batch: int) -> tuple[float, int]:  # fmt: skip # noqa: E501
    """Seconds of one layer, and the bytes of the pages it reads."""
    heads, groups, dim = shape
    pages = context // layout.geometry.page_size
    used = batch * pages * layout.page_bytes
    sets = max(2, -(-options.cold // used))
    count = sets * batch * pages
    arena = torch.empty(count, layout.page_bytes, dtype=torch.uint8)
    kernels.advise(arena)  # before it is written, as a server does
    different = sealed(layout, bases)
    for start in range(0, count, DIFFERENT_PAGES):
        arena[start : start + DIFFERENT_PAGES] = different[: count - start]
    arena = arena.view(-1)
    table = torch.randperm(count).view(sets, batch, pages)
    formats = torch.full((count,), options.index, dtype=torch.int8)
    offsets = torch.arange(count) * layout.page_bytes
    cached, new = torch.full((batch,), context), torch.ones(batch, dtype=torch.int64)
    query = torch.randn(batch, heads, dim).bfloat16()
    keys, values = torch.randn(2, batch, groups, dim).bfloat16()
    plans = [kernels.plan(one, cached, new, formats, offsets) for one in table]
    calls = [lambda p=p: kernels.attend(query, keys, values, arena, p, 0, dim**-0.5) for p in plans]
    return median_s(calls), used


def theirs(shape: tuple[int, int, int], context: int, batch: int, cold: int, grouped: bool) -> tuple[float, int]:
    """Seconds of SGLang's torch_native decode, and bytes of the keys and values: gather each request's rows, then SDPA per
    query head or, `grouped`, with the query heads of a KV head as rows of one query, which reads keys and values once.
    """
    heads, groups, dim = shape
    used = batch * context * groups * dim * 4
    sets = max(2, -(-cold // used))
    slots = sets * batch * context
    k_cache, v_cache = torch.randn(2, slots, groups, dim, dtype=torch.bfloat16)
    table = torch.randperm(slots // 64)[:, None] * 64 + torch.arange(64)
    table = table.view(sets, batch, context)
    query = torch.randn(batch, heads, 1, dim).bfloat16()

    def call(rows: Tensor) -> None:
        for i in range(batch):
            k, v = (cache[rows[i]].movedim(0, 1)[None] for cache in (k_cache, v_cache))
            q = query[i].view(1, groups, -1, dim) if grouped else query[i : i + 1]
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=not grouped, scale=dim**-0.5)

    return median_s([lambda r=r: call(r) for r in table]), used


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--context", nargs="+", type=int, default=[4096])
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--isa", help="instruction set (default: the best)")
    parser.add_argument("--cold", type=int, default=512 << 20, help="bytes that calls rotate through")
    parser.add_argument("--json", type=Path, help="write rows to this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    bandwidth = read_bandwidth(options.cold)
    impl = f"cpu-{options.isa or build.best_isa().name}"
    print(f"{impl}, read bandwidth of one core {bandwidth / 1e9:.1f} GB/s")
    rows = []
    for name in options.shape:
        _, groups, dim = shape = SHAPES[name]
        geometry = PageGeometry(1, groups, dim, 64, torch.bfloat16)
        bases = CodecBases(orthonormal_basis(dim), torch.linalg.qr(torch.randn(groups, dim, dim)).Q)
        layouts = layouts_of(geometry)
        kernels = CpuAttention(layouts, bases, options.isa)
        for context in options.context:
            for batch in options.batch:
                measured = [
                    (f"sdpa{'-grouped' * grouped}", layouts[0], *theirs(shape, context, batch, options.cold, grouped))
                    for grouped in (False, True)
                ]
                for options.index, layout in enumerate(layouts):
                    measured.append((impl, layout, *ours(layout, kernels, bases, options, shape, context, batch)))
                sdpa, plain = measured[0][2], measured[2][2]
                for by, layout, seconds, used in measured:
                    row = {
                        "shape": name,
                        "context": context,
                        "batch": batch,
                        "format": layout.name,
                        "impl": by,
                        "us_per_layer": round(seconds * 1e6, 1),
                        "ratio_vs_sdpa": round(sdpa / seconds, 2),
                        "ratio_vs_bf16": round(plain / seconds, 2),
                        "bandwidth_fraction": round(used / seconds / bandwidth, 3),
                    }
                    rows.append(row)
                    print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if options.json:
        options.json.write_text(
            json.dumps({"environment": environment(), "bandwidth": bandwidth, "rows": rows}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
