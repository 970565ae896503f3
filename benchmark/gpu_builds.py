"""What benchmark/gpu_check.py has compiled in processes of their own: Triton kernels and modules of FlashInfer."""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path

from gpu_checks import compile_cases
from gpu_points import FORMATS, PAGE, SHAPES, TINY, Point, arena_of, different_pages, our_calls
from gpu_timing import Machine

WORKERS = 12
KINDS = ("bf16", "e4m3", "variant")
"""Modules of FlashInfer: for rows of two dtypes, and the attention of entries with a bias."""
MORE_KINDS = ("variant-e4m3",)
"""Those that take too long to compile beside the rest."""
WRONG = 3
"""Exit code of a check of FlashInfer that ran and found an error beyond its bound."""


class Builds:
    """Starts the processes. In a dry run there are none, and no FlashInfer."""

    def __init__(self, machine: Machine, program: Path) -> None:
        self._warm: list[subprocess.Popen[bytes]] = []
        self._flashinfer: dict[str, subprocess.Popen[bytes]] = {}
        self._why = "there is no GPU" if machine.dry else "it cannot be imported"
        if machine.dry:
            return
        workers = min(WORKERS, max(1, (os.cpu_count() or 1) * 3 // 4))
        command = [sys.executable, str(program)]
        self._warm = [self._start([*command, "--warm", f"{i}/{workers}"], f"warm{i}") for i in range(workers)]
        if importlib.util.find_spec("flashinfer"):
            # It compiles with all cores: behind the kernels, which are needed first.
            self._flashinfer = {kind: self._start(["nice", *command, "--flashinfer", kind], kind) for kind in KINDS}

    def _start(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        log = Path(tempfile.mkstemp(prefix=f"gpu-check-{name}-", suffix=".log")[1])
        with log.open("wb") as out:
            # A process group of its own, so that compilers end with it.
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        print(f"building {name}: pid {process.pid}, log {log}", flush=True)
        return process

    def wait_warm(self, seconds: float) -> None:
        """Until the Triton kernels are compiled, or some time has passed: the rest is then compiled where it is needed."""
        end = time.monotonic() + seconds
        for process in self._warm:
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"pid {process.pid} still compiles", flush=True)

    def ready(self, kind: str, wait_s: float) -> bool:
        """Whether FlashInfer has its modules of a kind, after some seconds at most."""
        if kind in self._flashinfer:
            try:
                return self._flashinfer[kind].wait(max(0.1, wait_s)) in (0, WRONG)
            except subprocess.TimeoutExpired:
                return False
        return False

    def state(self, kind: str) -> str:
        """Why it is not ready."""
        if kind not in self._flashinfer:
            return self._why
        code = self._flashinfer[kind].poll()
        return "not compiled in time" if code is None else f"its process ended with {code}, see its log"

    def end(self) -> None:
        """Stop what still runs."""
        for process in (*self._warm, *self._flashinfer.values()):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()


def warm_cases(machine: Machine, share: str) -> int:
    """Run the `i`-th of `n` shares of all kernels, "i/n", at small sizes, so that Triton's cache on disk has them."""
    i, n = map(int, share.split("/"))
    cases = compile_cases(machine)
    for shape in TINY if machine.dry else SHAPES:
        decode = Point("decode", shape, 2 * PAGE, 1)
        points = (decode, replace(decode, kind="extend", new_tokens=3 if machine.dry else 64))
        indices = (0, FORMATS.index("csa2-4x")) if machine.dry else range(len(FORMATS))
        cases += [lambda p=point, f=index: _run_once(machine, p, f) for point in points for index in indices]
    for case in cases[i::n]:
        try:
            case()
        except Exception:  # noqa: BLE001 - whoever needs the kernel meets it again, and reports it
            traceback.print_exc()
    machine.wait()
    return 0


def _run_once(machine: Machine, point: Point, index: int) -> None:
    pages = arena_of(machine, point, different_pages(machine, point.shape, index)[:2])
    with machine.kernels():
        our_calls(machine, point, index, pages)[0]()
