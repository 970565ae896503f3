"""benchmark/gpu_check.py without a GPU: all of its steps, tiny, in the interpreter; and its FlashInfer by stand-ins."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flashinfer_stand_ins import StandDecode, StandPrefill

from sgl_kernels.flashinfer import wrappers

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch):
    """The modules of the benchmark can be imported, and change no path for good."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmark"), *sys.path])
    monkeypatch.setattr(wrappers, "flashinfer_classes", lambda: (StandDecode, StandPrefill))


def run(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(ROOT / "benchmark" / "gpu_check.sh"), "--dry-run", *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_a_dry_run_takes_every_step(tmp_path):
    ended = run("--json", str(tmp_path / "out.json"))
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["title"] == "DRY RUN on a CPU, no figure of a GPU"
    assert found["environment"]["dry_run"] is True
    assert len(found["checks"]) == 6
    assert all(check["ok"] for check in found["checks"])
    assert {(row["kind"], row["name"]) for row in found["rows"]} == {
        (kind, name) for kind in ("decode", "extend") for name in ("sdpa bf16", "bf16", "csa2-4x")
    }
    assert [skipped["name"] for skipped in found["skipped"]] == ["flashinfer bf16", "flashinfer e4m3", "flashinfer variant"]
    assert len(found["steps"]) == 4
    assert found["splits"]
    table = ended.stdout[ended.stdout.index("== DRY RUN") :]
    assert table.rstrip().endswith("checks: 6 passed, 0 failed")


def test_a_run_without_time_still_ends_with_its_table(tmp_path):
    ended = run("--seconds", "1", "--json", str(tmp_path / "out.json"))
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["rows"] == found["checks"] == []
    assert {skipped["why"] for skipped in found["skipped"]} == {"time", "flashinfer: there is no GPU"}
    assert "skipped: 11 (flashinfer, time)" in ended.stdout


ABSENT = ("sglang", "sglang_csa2", "csa2", "pytest", "hypothesis", "requests", "psutil", "transformers")


def test_it_needs_little_more_than_torch_and_triton():
    program = f"""
import sys

sys.modules.update(dict.fromkeys({ABSENT}, None))
sys.path[:0] = ["benchmark", "."]
from gpu_check import main

sys.exit(main(["--dry-run", "--seconds", "1"]))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_a_share_of_the_kernels_is_compiled_ahead():
    ended = run("--warm", "3/9")
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "Traceback" not in ended.stderr


def test_without_a_device_it_says_what_to_do(benchmark):
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    from gpu_check import main

    with pytest.raises(SystemExit, match="torch sees no CUDA device: run it on a machine with one, or with --dry-run"):
        main([])


@pytest.mark.parametrize("kind", ["bf16", "e4m3", "variant", "variant-e4m3"])
def test_checks_of_flashinfer_pass_where_it_is_right(benchmark, kind):
    from gpu_checks import flashinfer_checks
    from gpu_timing import Machine

    ((_, check),) = flashinfer_checks(Machine(dry=True), kind)
    assert check() < 1


def test_one_check_of_flashinfer_alone(benchmark, capsys):
    from gpu_check import main

    assert main(["--dry-run", "--flashinfer", "variant-e4m3"]) == 0
    assert "flashinfer variant-e4m3: error over bound 0." in capsys.readouterr().out


def test_checks_of_flashinfer_fail_where_it_is_wrong(benchmark, monkeypatch):
    from gpu_builds import WRONG
    from gpu_check import main
    from gpu_checks import flashinfer_checks
    from gpu_timing import Machine

    class Wrong(StandDecode):
        def attend(self, query, cache, extra, run):
            super().attend(query, cache, extra, run)
            run["out"] *= 1.25

    monkeypatch.setattr(wrappers, "flashinfer_classes", lambda: (Wrong, StandPrefill))
    for kind in ("bf16", "e4m3", "variant"):
        ((_, check),) = flashinfer_checks(Machine(dry=True), kind)
        assert check() > 1
    assert main(["--dry-run", "--flashinfer", "bf16"]) == WRONG


def test_calls_of_both_sides_read_the_same_tokens(benchmark):
    """Bare rows through FlashInfer's stand-in, and through the Triton kernels: one table, one result."""
    from gpu_points import TINY, Point, arena_of, different_pages, flashinfer_calls, model_of, our_calls
    from gpu_timing import Machine

    from sgl_kernels.flashinfer.plan import DenseFormat

    machine = Machine(dry=True)
    for point in (Point("decode", TINY[0], 256, 2), Point("extend", TINY[0], 128, 2, 3)):
        pages = arena_of(machine, point, different_pages(machine, point.shape, 0))
        calls, plan = flashinfer_calls(machine, point, DenseFormat(0, model_of(machine, point.shape).layouts[0]), pages)
        plan()
        with machine.kernels():
            ours = our_calls(machine, point, 0, pages, 2)[0]()
        # Both round results to fp16, ours its weights too.
        assert torch.allclose(ours.float(), calls[0]().float(), rtol=0, atol=2.0**-9)


def test_the_table_says_whether_aims_are_reached(benchmark, tmp_path):
    from gpu_points import SHAPES, Point
    from gpu_report import Report
    from gpu_timing import Machine, Timing

    report = Report(Machine(dry=True), tmp_path / "out.json")
    report.record["environment"]["dry_run"] = False
    report.record["copy_gb_per_s"] = 4000.0
    times = {name: Timing(us, us, us, 5) for name, us in (("flashinfer bf16", 100.0), ("fp8", 50.0), ("csa2-4x", 25.0))}
    report.add_times(Point("decode", SHAPES[0], 32768, 16), times, dict.fromkeys(times, 10**8))
    report.add("checks", name="merge", ok=False, error_over_bound=None, error="RuntimeError: no")
    report.add("skipped", name="x", why="memory: 2 of 1 MiB")
    table = report.table()
    assert "aim fp8 1.6x: 2.0x of flashinfer bf16, reached" in table
    assert "aim csa2-4x 5.0x: 4.0x of flashinfer bf16, MISSED" in table
    assert "FAILED merge: RuntimeError: no" in table
    assert "skipped: 1 (memory)" in table
    assert report.record["rows"][1]["gb_per_s"] == 2000
    assert report.record["rows"][1]["share"] == 0.5


class Arriving:
    """Builds of FlashInfer that are ready when asked for the third and fifth time."""

    def __init__(self) -> None:
        self.asked = 0

    def ready(self, kind: str, wait_s: float) -> bool:
        self.asked += kind == "bf16"
        return self.asked > {"bf16": 2, "e4m3": 4}[kind]


def test_the_first_comparison_comes_again_when_flashinfer_has_been_compiled(benchmark, tmp_path, monkeypatch):
    import gpu_check
    from gpu_report import Report
    from gpu_timing import Budget, Machine

    machine = Machine(dry=True)
    names = [gpu_check.Point("decode", gpu_check.TINY[0], 64 * i, 1) for i in range(1, 6)]
    monkeypatch.setattr(gpu_check, "points_of", lambda machine: list(names))
    seen = []
    monkeypatch.setattr(gpu_check, "run_point", lambda m, point, dense, report, budget: seen.append((point, len(dense))))
    gpu_check.run_points(machine, Report(machine, None), Budget(100), Arriving())
    a, b, c, d, e = names
    assert seen == [(a, 0), (b, 0), (a, 1), (c, 1), (a, 2), (d, 2), (e, 2)]


def test_the_most_telling_comparison_comes_first_and_none_twice(benchmark):
    from gpu_check import points_of
    from gpu_points import sets_of
    from gpu_timing import Machine

    machine = Machine(dry=True)
    machine.dry = False
    points = points_of(machine)
    assert points[0].name == "decode Llama-3-8B 32k x16"
    assert len({point.name for point in points}) == len(points) == 36
    assert {(p.context, p.batch) for p in points} == {(c << 10, b) for c in (8, 32, 64) for b in (1, 16, 64)}
    small = next(p for p in points if (p.context, p.batch) == (8192, 1))
    assert (sets_of(points[0], 262144), sets_of(small, 262144), sets_of(small, 4096)) == (1, 6, 16)
