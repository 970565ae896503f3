"""Who computes on compressed pages: what `--csa2-impl` comes to on this machine."""

import functools
import os
from dataclasses import dataclass

from csa2.errors import OptionError
from csa2.options import Impl, RopeVariant

INTERPRETER = "Triton's interpreter"
"""The detail of "cuda" where it runs on the CPU, for tests."""


@dataclass(frozen=True)
class Implementation:
    """An implementation and why it was chosen."""

    name: str
    """ "cpu", "cuda" or "reference"."""
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
        OptionError: "cuda" was asked for and there is no CUDA device, nor Triton's interpreter in its place.
        KernelBuildError: "cpu" was asked for and cannot be compiled.
        InstructionSetError: the environment names an instruction set that this CPU lacks.
    """
    if impl == "reference":
        return Implementation("reference", "torch")
    if impl == "cuda":
        return Implementation("cuda", _cuda_detail())
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


def _cuda_detail() -> str:
    import torch

    if os.environ.get("TRITON_INTERPRET") == "1":
        return INTERPRETER
    if not torch.cuda.is_available():
        raise OptionError(
            "--csa2-impl cuda needs a CUDA device, and torch sees none: leave the option out, or set TRITON_INTERPRET=1 to "
            "run its kernels in Triton's interpreter, which is thousands of times slower and for tests only"
        )
    return str(torch.cuda.get_device_name())


def fallback_warning(implementation: Implementation) -> str:
    """The line to log for an implementation that is a fallback."""
    return (
        f"csa2: attention is computed by the torch reference, several times slower than compiled code: "
        f"{implementation.detail.splitlines()[0]}. --csa2-impl reference chooses it without this warning"
    )
