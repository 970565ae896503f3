"""Who computes on compressed pages: what `--csa2-impl` comes to on this machine."""

import functools
from dataclasses import dataclass

from csa2.options import Impl, RopeVariant


@dataclass(frozen=True)
class Implementation:
    """An implementation and why it was chosen."""

    name: str
    """ "cpu" or "reference"."""
    detail: str
    """The instruction set of compiled code, or why there is none."""
    fallback: bool = False
    """Whether something faster was wanted and could not be had."""


@functools.cache
def resolve_impl(impl: Impl, rope: RopeVariant = "rotated") -> Implementation:
    """What `impl` means here for pages of variant `rope`.

    Compiles the kernels when they are chosen and not compiled yet (about 20 s, once). "auto" is compiled code, and the
    torch reference where that cannot be compiled or does not read the pages; then `fallback` is set and the caller has to
    say so.

    Raises:
        KernelBuildError: "cpu" was asked for and cannot be compiled.
        InstructionSetError: the environment names an instruction set that this CPU lacks.
    """
    if impl == "reference":
        return Implementation("reference", "torch")
    if rope == "separated":
        return Implementation("reference", "compiled code does not read --csa2-rope separated", fallback=True)
    # Here, because it imports torch and the options are also read where nothing is computed.
    from sgl_kernels.cpu import build
    from sgl_kernels.errors import KernelBuildError

    try:
        return Implementation("cpu", build.best_isa().name)
    except KernelBuildError as error:
        if impl != "auto":
            raise
        return Implementation("reference", str(error), fallback=True)


def fallback_warning(implementation: Implementation) -> str:
    """The line to log for an implementation that is a fallback."""
    return (
        f"csa2: attention is computed by the torch reference, several times slower than compiled code: "
        f"{implementation.detail.splitlines()[0]}. --csa2-impl reference chooses it without this warning"
    )
