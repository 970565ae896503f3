"""A CUDA graph as this machine can have one: operators and kernel launches are recorded with their tensors and run again.

Like a captured graph it knows addresses and no Python: what the host decided while it was recorded stays as it was, and what
lies at the addresses is read anew.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

_FROM_NOWHERE = ("empty", "new_empty", "empty_strided", "empty_like")


class HostReadError(Exception):
    """Something that is recorded reads a value of a tensor, or brings one from the host."""


class RecordedGraph:
    """What ran inside `record`."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    @contextmanager
    def record(self) -> Iterator[None]:
        """Run what is inside, and keep it."""
        launch = GridExecutor.__call__
        steps = self._steps

        def recorded_launch(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
            def again() -> None:
                launch(executor, *args, **kwargs)

            with _disable_current_modes():
                again()
            steps.append(again)

        GridExecutor.__call__ = recorded_launch
        try:
            with _Recorder(steps):
                yield
        finally:
            GridExecutor.__call__ = launch

    def replay(self) -> None:
        """Run it again."""
        for step in self._steps:
            step()


class _Recorder(TorchDispatchMode):
    def __init__(self, steps: list[Callable[[], object]]) -> None:
        super().__init__()
        self._steps = steps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and keep how to run it again, with its result where it is now."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "item", "lift_fresh"):
            raise HostReadError(f"{name} in a graph")
        result = func(*args, **kwargs)
        aliases = any(returned.alias_info is not None for returned in func._schema.returns)
        writes = func._schema.is_mutable
        if name in _FROM_NOWHERE or (aliases and not writes):
            return result

        def again() -> None:
            anew = func(*args, **kwargs)
            if not writes:
                _copy(result, anew)

        self._steps.append(again)
        return result


def _copy(old: Any, new: Any) -> None:
    if isinstance(old, Tensor):
        old.copy_(new)
    elif isinstance(old, list | tuple):
        for a, b in zip(old, new, strict=True):
            _copy(a, b)


def poison(*tensors: Tensor) -> None:
    """Overwrite what was computed, so that a replay that does not compute it anew is seen."""
    for tensor in tensors:
        tensor.fill_(torch.nan)
