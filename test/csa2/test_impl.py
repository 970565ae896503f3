"""What --csa2-impl comes to: compiled code, and a fallback that is announced."""

import pytest

from csa2.impl import fallback_warning, resolve_impl
from sgl_kernels.cpu import build
from sgl_kernels.errors import KernelBuildError


@pytest.fixture
def no_compiler(monkeypatch):
    def fail():
        raise KernelBuildError("no C++ compiler: 'c++' does not run")

    monkeypatch.setattr(build, "best_isa", fail)
    resolve_impl.cache_clear()
    yield
    resolve_impl.cache_clear()


def test_the_reference_needs_no_compiler(no_compiler):
    chosen = resolve_impl("reference")
    assert (chosen.name, chosen.fallback) == ("reference", False)


def test_auto_without_a_compiler_is_the_reference_and_says_so(no_compiler):
    chosen = resolve_impl("auto")
    assert (chosen.name, chosen.fallback) == ("reference", True)
    assert "no C++ compiler" in chosen.detail
    message = fallback_warning(chosen)
    assert "no C++ compiler" in message
    assert "--csa2-impl reference" in message


def test_cpu_without_a_compiler_is_an_error(no_compiler):
    with pytest.raises(KernelBuildError, match="no C\\+\\+ compiler"):
        resolve_impl("cpu")


@pytest.mark.parametrize("impl", ["auto", "cpu"])
def test_with_a_compiler_it_is_compiled_code(impl):
    chosen = resolve_impl(impl)
    assert (chosen.name, chosen.detail, chosen.fallback) == ("cpu", build.best_isa().name, False)


def test_separated_keys_take_the_reference_and_say_so():
    assert resolve_impl("reference", "separated") == resolve_impl("reference")
    chosen = resolve_impl("auto", "separated")
    assert (chosen.name, chosen.fallback) == ("reference", True)
    assert "--csa2-rope separated" in fallback_warning(chosen)
