"""Instruction sets for which the kernels are compiled, and which of them this CPU has."""

import functools
from dataclasses import dataclass
from pathlib import Path

from sgl_kernels.errors import InstructionSetError


@dataclass(frozen=True)
class InstructionSet:
    """One way to compile the same sources."""

    name: str
    cpu_flags: frozenset[str]
    """Names in /proc/cpuinfo that a CPU needs."""
    compiler_flags: tuple[str, ...]


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"}
_AVX512_FLAGS = (
    *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni"),
    "-mprefer-vector-width=512",
)
INSTRUCTION_SETS = (
    InstructionSet("amx", _AVX512 | {"amx_tile", "amx_bf16"}, (*_AVX512_FLAGS, "-mamx-tile", "-mamx-bf16")),
    InstructionSet("avx512", _AVX512, _AVX512_FLAGS),
    InstructionSet("avx2", _AVX2, ("-mavx2", "-mfma", "-mf16c")),
    InstructionSet("scalar", frozenset(), ()),
)
"""Best first. `scalar` is whatever the compiler makes for the oldest CPU of the architecture."""
NAMES = tuple(isa.name for isa in INSTRUCTION_SETS)


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Flags of the first CPU in /proc/cpuinfo; empty where the system has no such file."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return frozenset()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def available() -> tuple[str, ...]:
    """Names of the instruction sets that this CPU has, best first."""
    return tuple(isa.name for isa in INSTRUCTION_SETS if isa.cpu_flags <= cpu_flags())


def select(name: str | None = None) -> InstructionSet:
    """The best instruction set of this CPU, or the one called `name`.

    Raises:
        InstructionSetError: no such set, or the CPU lacks it.
    """
    if name is None:
        name = available()[0]
    if name not in NAMES:
        raise InstructionSetError(f"instruction set {name!r} does not exist: choose one of {', '.join(NAMES)}")
    isa = INSTRUCTION_SETS[NAMES.index(name)]
    missing = sorted(isa.cpu_flags - cpu_flags())
    if missing:
        raise InstructionSetError(
            f"instruction set {name!r} cannot run on this CPU, which lacks {', '.join(missing)}: choose one of "
            f"{', '.join(available())}"
        )
    return isa
