"""Are the CUDA kernels right, and how fast, on the GPU of this machine? Needs PyTorch and Triton; FlashInfer if it is there.

    benchmark/gpu_check.sh --json gpu.json    # all of it in less than six minutes
    benchmark/gpu_check.sh --dry-run          # the same steps on a CPU, tiny and interpreted: its figures mean nothing

First whether kernels are right, against float64; then times of one layer in a CUDA graph, formats in turn, the most telling
comparison first, so that a run that is cut short is still of use. `vs_bf16` is the time of FlashInfer over bf16 pages, or of
torch's attention where there is no FlashInfer, over that of a row: speed per original token. `gb_per_s` is the bytes of the
pages per second, `share` their share of what a copy inside the memory of this device moves.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from gpu_builds import KINDS, MORE_KINDS, WRONG, Builds, warm_cases
from gpu_checks import Check, flashinfer_checks, kernel_checks
from gpu_points import (
    FORMATS,
    GRAPH_CALLS,
    PAGE,
    SHAPES,
    TINY,
    Point,
    arena_of,
    different_pages,
    e4m3_rows,
    flashinfer_calls,
    in_graph,
    model_of,
    our_calls,
    plan_of,
    sdpa_calls,
    splits_of,
)
from gpu_report import Report
from gpu_timing import Budget, Call, Machine, alternate, captured, copy_bandwidth, host_us

from sgl_kernels.flashinfer.plan import DenseFormat

CONTEXTS, BATCHES = (32, 8, 64), (16, 1, 64)
"""In Ki tokens and requests, the most telling first."""
SWEPT = ("bf16", "fp8", "fp4", "csa2-2x", "csa2-4x")
SPLITS = (1, 2, 4, 8, 16, 32)
MEMORY_SHARE = 0.85
RESERVE_S = 8
"""Kept to print and write."""
WAIT_S = 20.0
"""For FlashInfer, before the first comparison."""


def points_of(machine: Machine) -> list[Point]:
    """Every comparison: the three most telling ones, decode of both shapes, then extend."""
    if machine.dry:
        return [Point("decode", TINY[0], 2 * PAGE, 2), Point("extend", TINY[0], 2 * PAGE, 1, 3)]
    pairs = [(c << 10, b) for c in CONTEXTS for b in BATCHES]
    decode = [[Point("decode", shape, *pair) for pair in pairs] for shape in SHAPES]
    extend = [[Point("extend", shape, c, b, max(64, 2048 // b)) for c, b in pairs] for shape in SHAPES]
    head = [decode[0][0], decode[1][0], extend[0][0]]
    return head + [point for group in (*decode, *extend) for point in group if point not in head]


def run_checks(machine: Machine, report: Report, budget: Budget, checks: list[Check]) -> None:
    """Each on its own: one that raises is a failure, not the end."""
    for name, check in checks:
        if budget.left() < RESERVE_S:
            report.add("skipped", name=name, why="time")
            continue
        begin = time.monotonic()
        try:
            worst, error = check(), None
            machine.wait()
        except Exception as problem:  # noqa: BLE001 - whatever it is goes into the report
            worst, error = float("inf"), f"{type(problem).__name__}: {problem}"[:300]
            traceback.print_exc()
        shown = round(worst, 3) if worst < 1e9 else None
        took = round(time.monotonic() - begin, 1)
        report.add("checks", name=name, ok=worst <= 1, error_over_bound=shown, seconds=took, error=error)


def candidates(machine: Machine, point: Point, dense: Sequence[str], report: Report) -> dict[str, tuple[list[Call], int]]:
    """Name -> calls, and bytes of pages that a call reads. Arenas live in the calls.

    Args:
        dense: kinds of rows that FlashInfer has modules for.
    """
    found: dict[str, tuple[list[Call], int]] = {}
    count = point.batch * point.pages
    formats = ("bf16", "csa2-4x") if machine.dry else FORMATS
    for index, name in ((i, n) for i, n in enumerate(FORMATS) if n in formats):
        layout = model_of(machine, point.shape).layouts[index]
        pages = arena_of(machine, point, different_pages(machine, point.shape, index))
        if name == "bf16" and "bf16" in dense:
            calls, plan = flashinfer_calls(machine, point, DenseFormat(0, layout), pages)
            found["flashinfer bf16"] = calls, count * layout.page_bytes
            report.add_step(point, "plan of flashinfer bf16, host", host_us(machine, plan))
        elif name == "bf16":
            found["sdpa bf16"] = sdpa_calls(machine, point, len(pages[1])), count * layout.page_bytes
        found[name] = our_calls(machine, point, index, pages), count * layout.page_bytes
        if name == "fp8" and "e4m3" in dense:
            rows, different = e4m3_rows(machine, point.shape)
            calls, _ = flashinfer_calls(machine, point, rows, arena_of(machine, point, different))
            found["flashinfer e4m3"] = calls, count * rows.layout.page_bytes
    return found


def needed_bytes(machine: Machine, point: Point) -> int:
    """Of all arenas of a point together, and as much as the plain pages twice for others' keys and values."""
    layouts = model_of(machine, point.shape).layouts
    pages = point.batch * point.pages
    return pages * sum(layout.page_bytes for layout in layouts) + 2 * pages * layouts[0].page_bytes


def measure(machine: Machine, point: Point, dense: Sequence[str], report: Report) -> None:
    """All formats at one point, in turn."""
    with machine.kernels():
        found = candidates(machine, point, dense, report)
        least = GRAPH_CALLS if point.kind == "decode" and not machine.dry else 1
        whole = {name: in_graph(calls, least) for name, (calls, _) in found.items()}
        graphs = {name: (captured(machine, calls), len(calls)) for name, calls in whole.items()}
        alternate(machine, graphs, 0.0, least=1)
        times = alternate(machine, graphs, 0.7, least=1 if machine.dry else 5)
    report.add_times(point, times, {name: used for name, (_, used) in found.items()})


def headline(machine: Machine, point: Point, report: Report, budget: Budget) -> None:
    """At the first point: what a graph saves, what a plan costs, and how many parts are best."""
    swept, counts = (("bf16",), (1, 2)) if machine.dry else (SWEPT, SPLITS)
    with machine.kernels():
        index = FORMATS.index("bf16" if machine.dry else "fp4")
        pages = arena_of(machine, point, different_pages(machine, point.shape, index))
        one, bytes_of = our_calls(machine, point, index, pages)[0], model_of(machine, point.shape).layouts[index].page_bytes
        plan = plan_of(machine, point, pages[1][0], index, bytes_of, splits_of(machine, point))
        steps: dict[str, Callable[[], object]] = {
            f"attention {FORMATS[index]}, eager": one,
            f"attention {FORMATS[index]}, graph": captured(machine, [one]),
            "plan of the Triton kernels, eager": plan,
            "plan of the Triton kernels, graph": captured(machine, [plan]),
        }
        for step, run in steps.items():
            report.add_step(point, step, host_us(machine, run, 2 if machine.dry else 20))
        if not machine.dry:
            equal = graph_equal(one)
            report.add(
                "checks", name="graph and eager give the same bits", ok=equal, error_over_bound=0.0 if equal else None
            )
        for name in swept:
            if budget.left() < RESERVE_S:
                report.add("skipped", name=f"parts of {name}", why="time")
                continue
            sweep(machine, point, name, counts, report)


def sweep(machine: Machine, point: Point, name: str, counts: Sequence[int], report: Report) -> None:
    """Times by the number of parts that the pages of a request are split into."""
    index = FORMATS.index(name)
    pages = arena_of(machine, point, different_pages(machine, point.shape, index))
    least = 1 if machine.dry else GRAPH_CALLS
    calls = {str(n): in_graph(our_calls(machine, point, index, pages, n), least) for n in counts}
    graphs = {n: (captured(machine, c), len(c)) for n, c in calls.items()}
    times = alternate(machine, graphs, 0.2, least=1 if machine.dry else 5)
    shown = {n: round(timing.median, 1) for n, timing in times.items()}
    report.add("splits", point=point.name, name=name, us=shown, chosen=splits_of(machine, point))


def graph_equal(call: Call) -> bool:
    """Whether a replay gives what a call gives, to the bit, twice."""
    want = call().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    for _ in range(2):
        got.zero_()
        graph.replay()
        if not torch.equal(want, got):
            return False
    return True


def run_points(machine: Machine, report: Report, budget: Budget, builds: Builds) -> None:
    """As many as the time allows, the first one again whenever FlashInfer has compiled more."""
    todo, slowest, first = points_of(machine), 0.0, True
    best, seen = todo[0], 0
    while todo:
        wait = min(WAIT_S, budget.left() / 8) if first else 0.0
        dense = [kind for kind in ("bf16", "e4m3") if builds.ready(kind, wait)]
        if len(dense) > seen and not first:
            todo.insert(0, best)
        seen = len(dense)
        point = todo.pop(0)
        needed, free = needed_bytes(machine, point), machine.free_bytes()
        if needed > MEMORY_SHARE * free:
            report.add("skipped", name=point.name, why=f"memory: {needed >> 20} of {free >> 20} MiB")
        elif budget.left() < max(RESERVE_S, slowest):
            report.add("skipped", name=point.name, why="time")
        else:
            begin = time.monotonic()
            run_point(machine, point, dense, report, budget if first else None)
            slowest = max(slowest * 0.7, time.monotonic() - begin)
        first = False
        machine.release()


def run_point(machine: Machine, point: Point, dense: Sequence[str], report: Report, budget: Budget | None) -> None:
    """One comparison, and what else is asked at the first one. One that raises is a failure, not the end."""
    try:
        measure(machine, point, dense, report)
        if budget:
            headline(machine, point, report, budget)
    except Exception as problem:  # noqa: BLE001 - whatever it is goes into the report
        traceback.print_exc()
        error = f"{type(problem).__name__}: {problem}"[:300]
        report.add("checks", name=point.name, ok=False, error_over_bound=None, error=error)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write everything to this file, after every step")
    parser.add_argument("--seconds", type=float, default=330.0, help="budget of the whole run (default: 330)")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, tiny, by Triton's interpreter")
    parser.add_argument("--warm", help=argparse.SUPPRESS)  # I/N: compile this share of the kernels, and end
    parser.add_argument("--flashinfer", choices=(*KINDS, *MORE_KINDS), help="only this check, which FlashInfer compiles for")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Check, time, print, write; 1 if something is wrong."""
    options = parse(arguments)
    budget = Budget(options.seconds)
    machine = Machine(options.dry_run)
    if options.warm:
        return warm_cases(machine, options.warm)
    if options.flashinfer:
        worst = [(name, check()) for name, check in flashinfer_checks(machine, options.flashinfer)]
        print("\n".join(f"{name}: error over bound {error:.3f}" for name, error in worst), flush=True)
        return WRONG if any(error > 1 for _, error in worst) else 0
    builds = Builds(machine, Path(__file__))
    try:
        report = Report(machine, options.json)
        print(report.record["title"], json.dumps(report.record["environment"]), flush=True)
        builds.wait_warm(min(90.0, budget.left() / 3))
        report.record["copy_gb_per_s"] = copy_bandwidth(machine) / 1e9
        run_checks(machine, report, budget, kernel_checks(machine))
        run_points(machine, report, budget, builds)
        for kind in KINDS:
            if builds.ready(kind, max(0.0, budget.left() - RESERVE_S)):
                run_checks(machine, report, budget, flashinfer_checks(machine, kind))
            else:
                report.add("skipped", name=f"flashinfer {kind}", why=f"flashinfer: {builds.state(kind)}")
    finally:
        builds.end()
    report.write()
    print(report.table(), flush=True)
    return int(bool(report.failed()))


if __name__ == "__main__":
    sys.exit(main())
