"""What benchmark/gpu_check.py measures with: the machine, CUDA events, graphs, a budget of time."""

import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
SCENES = (ROOT / "test", ROOT / "test" / "sgl_kernels")
"""Folders with the scenes of the tests and the interpreter of the kernels."""
Call = Callable[[], Any]
COPY_BYTES = 4 << 30


class Machine:
    """A CUDA device; or, in a dry run, this CPU with Triton's interpreter, where times mean nothing."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        sys.path[:0] = [str(path) for path in SCENES if str(path) not in sys.path]
        if not dry and not torch.cuda.is_available():
            raise SystemExit("torch sees no CUDA device: run it on a machine with one, or with --dry-run")
        self.device = torch.device("cpu" if dry else "cuda")
        # The interpreter computes bfloat16 wrongly.
        self.dtype = torch.float16 if dry else torch.bfloat16
        self.multiprocessors = 1 if dry else torch.cuda.get_device_properties(0).multi_processor_count

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Inside, Triton kernels run on the device, or interpreted."""
        if not self.dry:
            yield
            return
        from interpreted import interpreted

        with interpreted():
            yield

    def free_bytes(self) -> int:
        """Of the memory of the device."""
        return 1 << 30 if self.dry else int(torch.cuda.mem_get_info()[0])

    def wait(self) -> None:
        """Until the device is done."""
        if not self.dry:
            torch.cuda.synchronize()

    def release(self) -> None:
        """Give memory that nobody holds back to the device."""
        if not self.dry:
            torch.cuda.empty_cache()

    def environment(self) -> dict[str, Any]:
        """What a reader needs to compare numbers."""
        found: dict[str, Any] = {"python": platform.python_version(), "dry_run": self.dry}
        for name in ("torch", "triton", "flashinfer-python", "numpy"):
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = None
        if not self.dry:
            about = torch.cuda.get_device_properties(0)
            found |= {"gpu": about.name, "capability": f"{about.major}.{about.minor}", "cuda": torch.version.cuda}
            found |= {"multiprocessors": self.multiprocessors, "memory_gb": round(about.total_memory / 1e9, 1)}
        return found


class Budget:
    """Seconds that are left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Until the end; negative behind it."""
        return self._end - time.monotonic()


@dataclass(frozen=True)
class Timing:
    """Of one call, in microseconds."""

    median: float
    low: float
    high: float
    rounds: int


def captured(machine: Machine, calls: Sequence[Call]) -> Call:
    """One graph of all calls. In a dry run, and so without a graph, the calls themselves."""
    if machine.dry:
        return lambda: [call() for call in calls]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:  # compiles, and allocates what must not be allocated in a graph
            call()
    torch.cuda.current_stream().wait_stream(side)
    machine.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def alternate(machine: Machine, whole: Mapping[str, tuple[Call, int]], seconds: float, least: int = 5) -> dict[str, Timing]:
    """Time several things in turn, so that whatever changes on the machine meets all of them.

    Args:
        whole: by name, what to run, and how many calls that is.
        seconds: after this no round begins, once there were `least`.
    """
    times: dict[str, list[float]] = {name: [] for name in whole}
    end = time.monotonic() + seconds
    rounds = 0
    while rounds < least or (time.monotonic() < end and rounds < 100):
        rounds += 1
        for name, (run, count) in whole.items():
            times[name].append(_elapsed_us(machine, run) / count)
    return {name: Timing(statistics.median(t), min(t), max(t), rounds) for name, t in times.items()}


def _elapsed_us(machine: Machine, run: Call) -> float:
    if machine.dry:
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e6
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3


def host_us(machine: Machine, run: Call, times: int = 20) -> Timing:
    """Time of the host until a call has returned and the device is done."""
    taken = []
    for _ in range(times):
        machine.wait()
        begin = time.perf_counter()
        run()
        machine.wait()
        taken.append((time.perf_counter() - begin) * 1e6)
    return Timing(statistics.median(taken), min(taken), max(taken), times)


def copy_bandwidth(machine: Machine) -> float:
    """Bytes per second, read and written, of a copy inside the memory of the device."""
    size = min(COPY_BYTES, machine.free_bytes() // 4) if not machine.dry else 1 << 20
    source = torch.zeros(size, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    call = {"copy": (lambda: target.copy_(source), 1)}
    alternate(machine, call, 0.0)
    return 2 * size / alternate(machine, call, 0.5)["copy"].median * 1e6
