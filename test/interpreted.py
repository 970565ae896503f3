"""Triton kernels run by Triton's interpreter, on CPU tensors, in this process.

`TRITON_INTERPRET=1` would have to be set before triton is imported, which other tests do without it, and would reach every
process that they start. So functions made by `triton.jit` are replaced for as long as a test needs it: those of these
kernels and those of Triton's own library.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import triton.experimental.gluon  # noqa: F401  the interpreter imports it on its way, and would find functions replaced
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, _patch_lang, interpreter_builder
from triton.runtime.jit import JITFunction

# All modules with kernels, before functions are replaced in them.
import sgl_kernels.triton.attention
import sgl_kernels.triton.codec  # noqa: F401


class _Interpreted(InterpretedFunction):
    """A kernel or what it calls; the language is patched already. Patching it anew at each call takes half the time."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.rewrite()(*args, **kwargs)


WHERE = ("triton.language", "sgl_kernels.triton")


@contextmanager
def interpreted(*modules: str) -> Iterator[None]:
    """Inside, kernels run in the interpreter. It computes bfloat16 wrongly: use fp32 or fp16 operands.

    Args:
        modules: names of test modules with kernels of their own.
    """
    made: dict[int, _Interpreted] = {}
    replaced: list[tuple[ModuleType, str, JITFunction]] = []
    for name, module in list(sys.modules.items()):
        if not name.startswith(WHERE) and name not in modules:
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                replaced.append((module, attribute, value))
                setattr(module, attribute, made.setdefault(id(value), _Interpreted(value.fn)))
    language = _patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    options = interpreter_builder.options
    # Checks of integer overflow take a fifth of the time.
    interpreter_builder.options = replace(options, sanitize_overflow=False)
    try:
        yield
    finally:
        interpreter_builder.options = options
        language.restore()
        for module, attribute, value in replaced:
            setattr(module, attribute, value)
