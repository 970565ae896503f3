"""What of benchmark/gpu_check.py only a device runs, with a device that is made up."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from flashinfer_stand_ins import StandDecode, StandPrefill
from interpreted import interpreted

from sgl_kernels.flashinfer import wrappers

BENCHMARK = Path(__file__).parents[2] / "benchmark"


class Graph:
    """Replays write what the captured call wrote."""

    current: "Graph | None" = None

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


class Capture:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def __enter__(self) -> None:
        Graph.current = self.graph

    def __exit__(self, *error: object) -> None:
        Graph.current = None


class Event:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: "Event") -> float:
        return (other.at - self.at) * 1e3


class Stream:
    def wait_stream(self, other: "Stream") -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


ABOUT = SimpleNamespace(name="Made-up GPU", major=9, minor=0, multi_processor_count=132, total_memory=141 * 10**9)


@pytest.fixture
def machine(monkeypatch):
    """A machine with a device of which torch says what it says of an H200."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARK), *sys.path])
    said = {
        "is_available": lambda: True, "get_device_properties": lambda index: ABOUT, "mem_get_info": lambda: (10**9, 10**10),
        "synchronize": lambda: None, "empty_cache": lambda: None, "Stream": Stream, "stream": lambda stream: stream,
        "current_stream": Stream, "CUDAGraph": Graph, "graph": Capture, "Event": Event,
    }  # fmt: skip
    for name, value in said.items():
        monkeypatch.setattr(torch.cuda, name, value)
    from gpu_timing import Machine

    return Machine(dry=False)


def test_the_environment_names_the_device(machine):
    found = machine.environment()
    assert (found["gpu"], found["capability"], found["multiprocessors"]) == ("Made-up GPU", "9.0", 132)
    assert (machine.device.type, machine.dtype, machine.free_bytes()) == ("cuda", torch.bfloat16, 10**9)
    with machine.kernels():
        machine.wait()
        machine.release()


def test_calls_are_made_once_before_they_are_captured(machine):
    from gpu_timing import captured

    seen = []
    replay = captured(machine, [lambda: seen.append(("a", Graph.current)), lambda: seen.append(("b", Graph.current))])
    graph = replay.__self__
    assert seen == [("a", None), ("b", None), ("a", graph), ("b", graph)]
    assert graph.replays == 0


def test_times_are_in_microseconds_of_one_call(machine):
    from gpu_timing import alternate, host_us

    order = []
    whole = {"slow": (lambda: order.append("slow") or time.sleep(0.004), 4), "fast": (lambda: order.append("fast"), 1)}
    times = alternate(machine, whole, 0.0, least=3)
    assert order == ["slow", "fast"] * 3
    assert times["slow"].median >= 1000
    assert times["slow"].low <= times["slow"].median <= times["slow"].high
    assert times["slow"].rounds == 3
    assert host_us(machine, lambda: time.sleep(0.002), 3).low >= 2000


def test_a_replay_must_give_the_bits_of_a_call(machine, monkeypatch):
    from gpu_check import graph_equal

    values = torch.arange(4.0)
    kept = []

    def call() -> torch.Tensor:
        kept.append(values.clone())
        return kept[-1]

    monkeypatch.setattr(Graph, "replay", lambda self: kept[-1].copy_(values))
    assert graph_equal(call)
    monkeypatch.setattr(Graph, "replay", lambda self: kept[-1].copy_(values + 1))
    assert not graph_equal(call)


def test_a_device_gets_several_programs_for_each_multiprocessor(machine):
    from gpu_check import MEMORY_SHARE, needed_bytes, points_of
    from gpu_points import splits_of

    machine.device = torch.device("cpu")
    for point in points_of(machine):
        splits = splits_of(machine, point)
        assert 1 <= splits <= max(1, point.pages // 8)
        assert needed_bytes(machine, point) < MEMORY_SHARE * ABOUT.total_memory
        if point.kind == "decode" and point.context == 32768:
            assert splits * point.batch * point.shape.groups >= 2 * 132 or splits == point.pages // 8


def test_a_point_is_measured_against_both_kinds_of_rows(machine, monkeypatch):
    """What a dry run leaves out, with few formats. FlashInfer is a stand-in, graphs replay nothing."""
    import gpu_check
    import gpu_points
    from gpu_report import Report
    from gpu_timing import Budget

    machine.device, machine.dtype = torch.device("cpu"), torch.float16
    monkeypatch.setattr(type(machine), "kernels", lambda self: interpreted())
    monkeypatch.setattr(wrappers, "flashinfer_classes", lambda: (StandDecode, StandPrefill))
    few = {"FORMATS": ("bf16", "fp8"), "GRAPH_CALLS": 2, "SWEPT": ("bf16",), "SPLITS": (1,)}
    for name, value in few.items():
        monkeypatch.setattr(gpu_check, name, value)
    monkeypatch.setattr(gpu_points, "MOST_SETS", 1)
    report = Report(machine, None)
    report.record["copy_gb_per_s"] = 4000.0
    shape = gpu_points.TINY[0]
    for point in (gpu_points.Point("decode", shape, 64, 2), gpu_points.Point("extend", shape, 64, 1, 3)):
        gpu_check.measure(machine, point, ("bf16", "e4m3"), report)
    names = ["flashinfer bf16", "bf16", "fp8", "flashinfer e4m3"]
    assert [row["name"] for row in report.record["rows"]] == names * 2
    assert {row["base"] for row in report.record["rows"]} == {"flashinfer bf16"}
    assert [step["name"] for step in report.record["steps"]] == ["plan of flashinfer bf16, host"] * 2
    # What is asked at the first point is asked of fp4.
    monkeypatch.setattr(gpu_check, "FORMATS", gpu_points.FORMATS)
    gpu_check.headline(machine, gpu_points.Point("decode", shape, 128, 1), report, Budget(60))
    assert [step["name"] for step in report.record["steps"][2:]] == [
        f"{what}, {how}" for what in ("attention fp4", "plan of the Triton kernels") for how in ("eager", "graph")
    ]
    assert report.record["checks"][-1]["name"] == "graph and eager give the same bits"
    assert list(report.record["splits"][-1]["us"]) == ["1"]


PROGRAM = """
import sys, time
if sys.argv[1] == "--warm":
    assert sys.argv[2].split("/")[0] < sys.argv[2].split("/")[1]
elif sys.argv[2] == "variant":
    time.sleep(600)
else:
    sys.exit({"bf16": 0, "e4m3": 3}[sys.argv[2]])
"""


def test_builds_start_are_awaited_and_end(machine, tmp_path, capsys, monkeypatch):
    """A check that found an error has its module, and one that still compiles is stopped."""
    import gpu_builds

    monkeypatch.setattr(gpu_builds.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(gpu_builds.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "program.py").write_text(PROGRAM)
    builds = gpu_builds.Builds(machine, tmp_path / "program.py")
    try:
        builds.wait_warm(60)
        assert [builds.ready(kind, 60 if kind != "variant" else 0) for kind in gpu_builds.KINDS] == [True, True, False]
        assert builds.state("variant") == "not compiled in time"
    finally:
        builds.end()
    assert builds.state("variant").startswith("its process ended with -15")
    assert "still compiles" not in capsys.readouterr().out


def test_builds_without_flashinfer_say_so(machine, tmp_path, monkeypatch):
    import gpu_builds

    monkeypatch.setattr(gpu_builds.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu_builds.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "program.py").write_text(PROGRAM)
    builds = gpu_builds.Builds(machine, tmp_path / "program.py")
    builds.wait_warm(60)
    assert not builds.ready("bf16", 0)
    assert builds.state("bf16") == "it cannot be imported"
    builds.end()
