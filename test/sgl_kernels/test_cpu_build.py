"""Building the CPU kernels: instruction sets by name, the cache, and errors that say what to do."""

import multiprocessing
from pathlib import Path

import pytest

from sgl_kernels.cpu import build
from sgl_kernels.cpu import isa as isas
from sgl_kernels.errors import InstructionSetError, KernelBuildError

TINY = """
#include <tvm/ffi/function.h>
static bool enable() { return true; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(enable, enable);
"""


@pytest.fixture
def tiny_sources(tmp_path, monkeypatch):
    """Sources that compile in seconds, and a cache of their own."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "module.cpp").write_text(TINY)
    monkeypatch.setattr(build, "SOURCE_FOLDER", sources)
    monkeypatch.setenv("CSA2_CACHE_DIR", str(tmp_path / "cache"))
    return sources


def test_the_best_instruction_set_comes_first():
    assert isas.available()[-1] == "scalar"
    assert isas.select().name == isas.available()[0]


def test_an_unknown_instruction_set_lists_the_known_ones():
    with pytest.raises(InstructionSetError, match=r"'mmx' does not exist: choose one of amx, avx512, avx2, scalar"):
        isas.select("mmx")


def test_an_instruction_set_that_the_cpu_lacks_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(isas, "cpu_flags", lambda: frozenset({"avx2", "fma", "f16c"}))
    with pytest.raises(InstructionSetError, match=r"'avx512' cannot run on this CPU, which lacks avx512_bf16.*: choose one of avx2, scalar"):  # fmt: skip # noqa: E501
        isas.select("avx512")
    assert isas.select().name == "avx2"


def test_the_environment_can_name_the_instruction_set(monkeypatch):
    monkeypatch.setenv("CSA2_ISA", "scalar")
    assert build.best_isa.__wrapped__() == isas.select("scalar")
    monkeypatch.setenv("CSA2_ISA", "mmx")
    with pytest.raises(InstructionSetError, match="'mmx' does not exist"):
        build.best_isa.__wrapped__()


def test_a_library_is_built_once(tiny_sources):
    isa = isas.select("scalar")
    first = build.library_path(isa)
    written = first.stat().st_mtime_ns
    assert build.library_path(isa) == first
    assert first.stat().st_mtime_ns == written
    assert sorted(path.name for path in first.parent.iterdir()) == ["csa2_cpu_scalar.so", "lock"]


def test_sources_and_flags_make_another_library(tiny_sources):
    isa = isas.select("scalar")
    paths = {build.library_path(isa), build.library_path(isa, ("-DNAME",))}
    (tiny_sources / "module.cpp").write_text(TINY + "// changed\n")
    paths.add(build.library_path(isa))
    assert len(paths) == 3


def _build(folder: str, sources: str, queue: "multiprocessing.Queue[str]") -> None:
    import os

    os.environ["CSA2_CACHE_DIR"] = folder
    build.SOURCE_FOLDER = Path(sources)
    queue.put(str(build.library_path(isas.select("scalar"))))


def test_processes_that_build_at_once_end_with_one_library(tiny_sources, tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    children = [context.Process(target=_build, args=(str(tmp_path / "shared"), str(tiny_sources), queue)) for _ in range(3)]
    for child in children:
        child.start()
    paths = {queue.get(timeout=300) for _ in children}
    for child in children:
        child.join()
    assert len(paths) == 1
    assert Path(paths.pop()).exists()


def test_without_a_compiler_the_error_says_what_to_install(tiny_sources, monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(KernelBuildError, match=r"no C\+\+ compiler: '/no/such/compiler' does not run. Install one"):
        build.library_path(isas.select("scalar"))


def test_without_a_compiler_a_library_that_is_there_is_used(tiny_sources, monkeypatch):
    library = build.library_path(isas.select("scalar"))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert build.library_path(isas.select("scalar")) == library


def test_a_compiler_that_fails_shows_its_last_lines(tiny_sources):
    (tiny_sources / "module.cpp").write_text("#error this cannot be compiled\n")
    with pytest.raises(KernelBuildError, match=r"failed on the kernels for scalar(.|\n)*this cannot be compiled"):
        build.library_path(isas.select("scalar"))
    assert not list(build.cache_folder().rglob("*.so"))


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"CSA2_CACHE_DIR": "/a"}, "/a/kernels"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/sglang-csa2/kernels"),
        ({"HOME": "/c"}, "/c/.cache/sglang-csa2/kernels"),
    ],
)
def test_the_cache_folder_follows_the_environment(environment, folder, monkeypatch):
    for name in ("CSA2_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert build.cache_folder() == Path(folder)
