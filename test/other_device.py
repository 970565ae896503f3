"""A pretended device: tensors on it are ordinary ones that must not meet those of the host, as on a GPU.

`PretendedDevice` is a mode of torch functions. Inside, `torch.empty(..., device=DEVICE)` and `tensor.to(DEVICE)` give
tensors "on the device"; what is computed from them is there too; `cpu()`, `tolist()` and the like bring them back. A
function called with tensors of both sides raises MixedDevicesError, where CUDA would.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("privateuseone", 0)
OURS = ("csa2", "sgl_kernels", "sglang_csa2")
"""Packages whose calls are checked: SGLang itself runs on the host here."""

_TO_HOST = {Tensor.cpu, Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__}
_TO_HOST |= {Tensor.__index__, Tensor.__len__}
# An index may be on the host, a value to copy too; a plain number is no tensor at all.
_ALLOWED = {Tensor.copy_, Tensor.__getitem__, Tensor.__setitem__}


class MixedDevicesError(Exception):
    """Tensors of host and device met."""


class DeviceTensor(Tensor):
    """A tensor on the pretended device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What happens where no mode is active: the same."""
        with torch._C.DisableTorchFunction():
            return _call(func, args, kwargs or {})


class PretendedDevice(TorchFunctionMode):
    """Inside, there is a device `DEVICE`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` as the device would."""
        with torch._C.DisableTorchFunction():
            return _call(func, args, kwargs or {})


def on_device(tensor: Tensor) -> Tensor:
    """`tensor`, its memory included, as if it lay on the device."""
    return tensor.as_subclass(DeviceTensor)


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = list(_tensors((args, kwargs)))
    there = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
    if there and getattr(func, "__self__", None) is Tensor.device:
        return DEVICE
    target = _target(func, args, kwargs)
    if there and func not in _ALLOWED and target is None:
        _check(func, tensors)
    if there and func is Tensor.__setitem__ and isinstance(args[2], Tensor):
        _check(func, [args[0], args[2]])
    if there and func is Tensor.__getitem__ and not isinstance(args[0], DeviceTensor) and _caller() in OURS:
        raise MixedDevicesError("a tensor of the host is indexed by one of the device")
    result = func(*map(_host, args), **{name: _host(value) for name, value in kwargs.items()})
    if target is not None:
        there = target == DEVICE
    return _wrapped(result, there=there and func not in _TO_HOST)


def _target(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The device that a call names."""
    if func is Tensor.cpu:
        return torch.device("cpu")
    named = kwargs.get("device")
    if named is None and func is Tensor.to:
        named = next((value for value in args[1:] if isinstance(value, torch.device | str)), None)
    return None if named is None else torch.device(named)


def _check(func: Any, tensors: list[Tensor]) -> None:
    sides = {isinstance(tensor, DeviceTensor) for tensor in tensors if tensor.dim() > 0}
    if len(sides) == 2 and _caller() in OURS:
        raise MixedDevicesError(f"{getattr(func, '__name__', func)} is called with tensors of host and device")


def _caller() -> str:
    """The package that calls torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        package = frame.f_globals.get("__name__", "").split(".")[0]
        if package not in ("torch", __name__):
            return str(package)
        frame = frame.f_back
    return ""


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _host(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) and value == DEVICE else value


def _wrapped(value: Any, *, there: bool) -> Any:
    if isinstance(value, Tensor):
        if there == isinstance(value, DeviceTensor):
            return value
        return value.as_subclass(DeviceTensor if there else Tensor)
    if type(value) in (list, tuple):
        return type(value)(_wrapped(part, there=there) for part in value)
    if isinstance(value, tuple):  # the named ones of torch
        return type(value)([_wrapped(part, there=there) for part in value])
    return value
