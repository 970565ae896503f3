"""Compiling and loading the CPU kernels: once for each set of sources, flags and compiler, then from a cache folder."""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch  # first: it brings the OpenMP library that the kernels must share with it

from sgl_kernels.cpu import isa as isas
from sgl_kernels.errors import InstructionSetError, KernelBuildError

SOURCE_FOLDER = Path(__file__).parent / "csrc"
LIBRARY = "csa2_cpu"
ERROR_LINES = 20
"""Last lines of the compiler that an error shows."""
_FLAGS = ("-O3", "-fopenmp", "-fvisibility=hidden", "-fno-gnu-unique", "-fno-math-errno", "-fno-trapping-math", "-DNDEBUG")


def load(isa: str | None = None, *, extra_flags: tuple[str, ...] = ()) -> Any:
    """The module of kernels for instruction set `isa` (default: `best_isa`), compiled when there is none yet.

    Raises:
        InstructionSetError: an instruction set that does not exist, or that the CPU or its kernel lacks.
        KernelBuildError: no compiler, or it fails.
    """
    if isa is not None:
        return _load(isas.select(isa), extra_flags)
    return _load(best_isa(), extra_flags)


@functools.cache
def best_isa() -> isas.InstructionSet:
    """The best instruction set that CPU and operating system allow, or the one that $CSA2_ISA names.

    Raises:
        InstructionSetError: CSA2_ISA names one that does not exist, or that the CPU lacks.
        KernelBuildError: no compiler, or it fails.
    """
    if named := os.environ.get("CSA2_ISA"):
        return isas.select(named)
    best = isas.select()
    if best.name == "amx" and not _enabled(best):
        return isas.select("avx512")  # a kernel or a virtual machine that keeps the tiles to itself
    return best


def library_path(isa: isas.InstructionSet, extra_flags: tuple[str, ...] = ()) -> Path:
    """The compiled library, built under a lock when it is not in the cache.

    Raises:
        KernelBuildError: no compiler, or it fails.
    """
    sources = cache_folder() / f"{isa.name}-{_digest(isa, extra_flags)}"
    name = f"{LIBRARY}_{isa.name}.so"
    compiler = _compiler_version()
    if compiler is None:
        # Without a compiler whatever was built from these sources will do: the image of a container, for example.
        built = sorted(sources.glob(f"*/{name}"))
        if built:
            return built[0]
        raise KernelBuildError(
            f"no C++ compiler: {_compiler()!r} does not run. Install one (Debian, Ubuntu: apt install g++) or name one in "
            f"CXX; or do without compiled kernels"
        )
    library = sources / hashlib.sha256(compiler.encode()).hexdigest()[:12] / name
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with _locked(library.parent / "lock"):
            if not library.exists():
                _compile(isa, extra_flags, library)
    return library


def cache_folder() -> Path:
    """Where compiled kernels are kept: $CSA2_CACHE_DIR, or sglang-csa2 in $XDG_CACHE_HOME or ~/.cache; there `kernels`."""
    own = os.environ.get("CSA2_CACHE_DIR")
    if own:
        return Path(own) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-csa2" / "kernels"


@functools.cache
def _load(isa: isas.InstructionSet, extra_flags: tuple[str, ...]) -> Any:
    module = _module(isa, extra_flags)
    if not module.enable():
        raise InstructionSetError(
            f"instruction set {isa.name!r} is in the CPU, but the operating system does not let programs use it: choose one "
            f"of {', '.join(name for name in isas.available() if name != isa.name)}"
        )
    return module


def _enabled(isa: isas.InstructionSet) -> bool:
    return bool(_module(isa, ()).enable())


@functools.cache
def _module(isa: isas.InstructionSet, extra_flags: tuple[str, ...]) -> Any:
    import tvm_ffi

    return tvm_ffi.load_module(str(library_path(isa, extra_flags)))


def _compile(isa: isas.InstructionSet, extra_flags: tuple[str, ...], library: Path) -> None:
    import tvm_ffi.cpp

    with tempfile.TemporaryDirectory(dir=library.parent) as folder, _compiler_environment():
        try:
            built = tvm_ffi.cpp.build(
                LIBRARY,
                cpp_files=[str(path) for path in sorted(SOURCE_FOLDER.glob("*.cpp"))],
                extra_cflags=_flags(isa, extra_flags),
                extra_ldflags=[*_openmp_link_flags(), *_sanitizer_flags(), *extra_flags],
                build_directory=folder,
            )
        except FileNotFoundError as error:
            raise KernelBuildError(
                "ninja, which drives the compiler, is not installed: install it (pip install ninja)"
            ) from error
        except RuntimeError as error:
            lines = str(error).strip().splitlines()[-ERROR_LINES:]
            raise KernelBuildError(
                f"the C++ compiler {_compiler()!r} failed on the kernels for {isa.name}; it needs C++17 and OpenMP "
                f"(g++ 12 is known to work, CXX names another). Its last lines:\n" + "\n".join(lines)
            ) from error
        # One rename: a process that looks sees the whole library or none.
        Path(built).replace(library)


def _flags(isa: isas.InstructionSet, extra_flags: tuple[str, ...]) -> list[str]:
    return [*_FLAGS, *isa.compiler_flags, *_sanitizer_flags(), *extra_flags]


def _sanitizer_flags() -> tuple[str, ...]:
    """For `make asan`: find reads and writes outside of buffers, and undefined behaviour."""
    if os.environ.get("CSA2_SANITIZE") != "1":
        return ()
    return ("-fsanitize=address,undefined", "-fno-sanitize=alignment", "-fno-sanitize-recover=undefined", "-O1", "-g")


def _digest(isa: isas.InstructionSet, extra_flags: tuple[str, ...]) -> str:
    """Of everything but the compiler that decides what comes out."""
    import tvm_ffi

    digest = hashlib.sha256()
    for part in (*_flags(isa, extra_flags), *_openmp_link_flags(), tvm_ffi.__version__):
        digest.update(part.encode() + b"\0")
    for path in sorted(SOURCE_FOLDER.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _openmp_link_flags() -> tuple[str, ...]:
    """Link against the OpenMP library that torch has loaded: two of them would fight for the cores."""
    torch.get_num_threads()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines() if sys.platform == "linux" else []:
        path = Path(line.split()[-1])
        if path.name.startswith("libgomp"):
            return (f"-L{path.parent}", f"-l:{path.name}")
    return ("-fopenmp",)


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _compiler_version() -> str | None:
    """First line of `c++ --version`, or None if it does not run."""
    try:
        command = [*_compiler().split(), "--version"]
        ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)  # noqa: S603 - the user's CXX
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.partition("\n")[0]


@contextmanager
def _compiler_environment() -> Iterator[None]:
    """Tools of the environment whose Python runs are found, ninja among them, even if it was not activated; and nothing is
    loaded into them that was meant for Python, as the sanitizer of `make asan`, with which ninja hangs."""
    before = {name: os.environ.get(name) for name in ("PATH", "LD_PRELOAD")}
    if shutil.which("ninja") is None:
        os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), before["PATH"] or ""))
    os.environ.pop("LD_PRELOAD", None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the others wait for the library."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
