"""Compiled forms of SGLang's small operators, registered for our CPU platform when compressed pages are compiled too.

UPSTREAM(sglang 0.5.23): `BaseFusedOp.register_oot_forward`, by exact class and dispatch key of the platform. An instance
looks there at its first call, so registering after the model is loaded is early enough. What an operator here cannot do
goes to `forward_native`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sgl_kernels.cpu.small_ops import DTYPES, SmallOps

_installed: SmallOps | None = None


def install() -> None:
    """Register the operators for the active out-of-tree platform. Once a process; other platforms keep their own."""
    global _installed
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.platforms import current_platform

    if _installed is not None or not current_platform.is_out_of_tree() or current_platform.device_type != "cpu":
        return
    _installed = SmallOps()
    key = current_platform.get_dispatch_key_name()
    for base, forward in ((RMSNorm, rms_norm), (SiluAndMul, silu_and_mul), (RotaryEmbedding, rotate)):
        for op in _same_operator(base):
            BaseFusedOp.register_oot_forward(op, forward, key)


def ops() -> SmallOps:
    """The compiled operators; `install` comes first."""
    if _installed is None:
        raise RuntimeError("csa2: compiled operators run before they were installed")
    return _installed


def rms_norm(
    self: Any,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    *rest: Any,
    **more: Any,
) -> Any:
    """`RMSNorm.forward`; with a residual both are overwritten, as SGLang's CUDA operator does."""
    plain = (
        post_residual_addition is None
        and not ((rest or more) and any(value is not None for value in (*rest, *more.values())))
        and self.variance_size_override is None
        and self.override_orig_dtype is None
        and not (residual is not None and (self.fp32_residual or residual.dtype != x.dtype or not residual.is_contiguous()))
        and x.shape[-1] == self.hidden_size
        and x.is_contiguous()
        and x.dtype in DTYPES
    )
    if not plain:
        return self.forward_native(x, residual, post_residual_addition, *rest, **more)
    early = self.cast_x_before_out_mul
    is_flat = x.dim() == 2  # a view costs as long as the norm of a token
    rows = x if is_flat else x.view(-1, self.hidden_size)
    if residual is None:
        out = ops().rms_norm(rows, self.weight, self.variance_epsilon, round_before_weight=early)
        return out if is_flat else out.view(x.shape)
    sums = residual if residual.dim() == 2 else residual.view(rows.shape)
    ops().add_rms_norm(rows, sums, self.weight, self.variance_epsilon, round_before_weight=early)
    return x, residual


def silu_and_mul(self: Any, x: Tensor) -> Tensor:
    """`SiluAndMul.forward`."""
    if x.dtype not in DTYPES or not x.is_contiguous():
        native: Tensor = self.forward_native(x)
        return native
    if x.dim() == 2:
        return ops().silu_and_mul(x)
    out = ops().silu_and_mul(x.view(-1, x.shape[-1]))
    return out.view(*x.shape[:-1], out.shape[-1])


def rotate(
    self: Any,
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    offsets: Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> Any:
    """`RotaryEmbedding.forward`; query and key are overwritten, as SGLang's CUDA operator does."""
    plain = (
        key is not None
        and offsets is None
        and fused_set_kv_buffer_arg is None
        and positions.dtype == torch.int64
        and positions.dim() == 1
        and query.dim() == 2
        and key.dim() == 2
        and query.stride(1) == 1
        and key.stride(1) == 1
        and query.dtype in DTYPES
        and query.dtype == key.dtype
        and self.cos_sin_cache.dtype in DTYPES
        and not hasattr(self, "sin_cos_cache")
    )
    if not plain or key is None:
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    ops().rotate(query, key, self.cos_sin_cache, positions.contiguous(), self.head_size, neox=self.is_neox_style)
    return query, key


def _same_operator(base: type) -> Iterator[type]:
    """`base` and those of its subclasses that compute the same: they inherit `forward_native`."""
    native: Callable[..., Any] = base.forward_native  # type: ignore[attr-defined]
    pending = [base]
    while pending:
        found = pending.pop()
        pending.extend(found.__subclasses__())
        if found.forward_native is native:  # type: ignore[attr-defined]
            yield found
