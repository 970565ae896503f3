"""Compiling every kernel ahead of time, without a device, and reading what came out.

    python -m sgl_kernels.triton.gate              # the table of docs/gpu.md
    python -m sgl_kernels.triton.gate docs/gpu.md  # puts it there, between the two comments that mark it

Instructions are counted in the machine code of the loop over tiles of entries.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sgl_kernels.triton.gate_cases import CASES, Case

ARCHITECTURES = {80: "sm_80", 90: "sm_90", 100: "sm_100"}
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that a program can have (CUDA C++ Programming Guide, table of technical specifications)."""
PRODUCTS = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}
"""The matrix instructions, in PTX, that the main loops are made for."""
REGISTER_LIMIT = 255
MARKS = ("<!-- gate: begin -->", "<!-- gate: end -->")
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_LABEL = re.compile(r"\s*(\.L_\w+):")


@dataclass(frozen=True)
class Compiled:
    """What is known of a kernel for one architecture."""

    registers: int
    stack_bytes: int
    """Of spilled registers; also `LOCAL` memory."""
    shared_bytes: int
    loop_instructions: int
    """0 if there is no such loop."""
    loop_spills: int
    """Of them, those that read or write spilled registers."""
    products: tuple[str, ...]
    """Matrix instructions in its PTX."""


def compile_case(case: Case, architecture: int) -> Compiled:
    """Compile one kernel; it is not loaded anywhere."""
    names = list(case.signature)
    # Triton finds out at run time that pointers and strides are multiples of 16.
    whole = [i for i, name in enumerate(names) if case.signature[name].startswith("*") or name.endswith("_stride")]
    aligned = {(i,): [["tt.divisibility", 16]] for i in whole}
    source = ASTSource(fn=case.kernel, signature=case.signature, constexprs=case.constants, attrs=aligned)
    options = {"num_warps": case.warps, "maxnreg": case.registers if architecture >= 90 else REGISTER_LIMIT}
    with _own_assembler():
        kernel = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    usage = _tool("cuobjdump", "-res-usage", kernel.asm["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of the registers of {case.name}: {usage}")
    loop = main_loop(_tool("nvdisasm", "-c", kernel.asm["cubin"]))
    spills = sum(name.startswith(("STL", "LDL")) for name in loop)
    products = tuple(name for name in PRODUCTS.values() if name in kernel.asm["ptx"])
    return Compiled(int(found[1]), int(found[2]) + int(found[3]), kernel.metadata.shared, len(loop), spills, products)


@contextmanager
def _own_assembler() -> Iterator[None]:
    """Inside, Triton uses the assembler that it brings. SGLang, once imported, names that of the machine for sm_100."""
    with triton.knobs.nvidia.scope():  # which restores the environment too
        for variable in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
            os.environ.pop(variable, None)
        yield


def main_loop(assembly: str) -> list[str]:
    """Names of the instructions of the largest innermost loop with products and exponentials: that over tiles of entries.

    Loops over means have both too, and fewer of them. Behind the end lies what waits for a product and jumps back.
    """
    labels: dict[str, int] = {}
    names: list[str] = []
    back: list[tuple[int, int]] = []
    exits = 0
    for line in assembly.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(names)
        if found := _INSTRUCTION.search(line):
            target = re.search(r"\.L_\w+", found[2])
            if found[1].startswith("BRA") and target and target[0] in labels:
                back.append((labels[target[0]], len(names)))
            if found[1] == "EXIT":
                exits = len(names)
            names.append(found[1])
    loops = [(start, end) for start, end in back if end < exits and _is_main(names[start : end + 1])]
    inner = [a for a in loops if not any(a[0] <= b[0] and b[1] <= a[1] and a != b for b in loops)]
    start, end = max(inner, key=lambda loop: loop[1] - loop[0], default=(0, -1))
    return names[start : end + 1]


def _is_main(body: Sequence[str]) -> bool:
    products = sum("MMA" in name for name in body)
    return products >= 2 and any(name.startswith("MUFU.EX2") for name in body)


@cache
def _tool_path(name: str) -> str:
    path = _TOOLS / name
    if not path.exists():
        raise FileNotFoundError(f"triton {triton.__version__} brings no {name} at {path}: install triton from its wheel")
    return str(path)


def _tool(name: str, option: str, cubin: bytes) -> str:
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_tool_path(name), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603 - of the triton wheel


def table(cases: Sequence[Case] = CASES) -> str:
    """What docs/gpu.md shows: registers / shared KiB / instructions of the loop."""
    head = ["Kernel", *ARCHITECTURES.values()]
    rows = [head, ["---"] * len(head)]
    for case in cases:
        row = [case.name]
        for architecture in ARCHITECTURES:
            c = compile_case(case, architecture)
            loop = str(c.loop_instructions) if c.loop_instructions else "-"
            spilled = f", {c.stack_bytes} bytes spilled" if c.stack_bytes else ""
            row.append(f"{c.registers} / {c.shared_bytes / 1024:.1f} / {loop}{spilled}")
        rows.append(row)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def put_table(path: Path, text: str) -> None:
    """Replace what is between the marks in the file.

    Raises:
        ValueError: the file lacks the marks.
    """
    content = path.read_text(encoding="utf-8")
    parts = re.split("|".join(map(re.escape, MARKS)), content)
    if len(parts) != 3:
        raise ValueError(f"{path} has no place for the table: it must hold {MARKS[0]} and then {MARKS[1]}")
    path.write_text(f"{parts[0]}{MARKS[0]}\n{text}\n{MARKS[1]}{parts[2]}", encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Print the table, or put it into the file that is named."""
    text = table()
    if arguments:
        put_table(Path(arguments[0]), text)
    else:
        sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
