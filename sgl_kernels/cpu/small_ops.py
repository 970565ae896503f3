"""The small operators of a decoder layer, compiled: RMSNorm, rotary embedding, SiLU-and-mul. fp32 inside, rounded once."""

from typing import Any

import torch
from torch import Tensor

from sgl_kernels.cpu import build

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class SmallOps:
    """The operators, for one instruction set."""

    def __init__(self, isa: str | None = None) -> None:
        """Raises KernelBuildError or InstructionSetError: see `build.load`."""
        self._module: Any = build.load(isa)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, *, round_before_weight: bool = False) -> Tensor:
        """(T, N) x / rms(x) * weight.

        Args:
            x: (T, N) with contiguous rows.
            weight: (N,).
            round_before_weight: round x / rms(x) to its dtype before the weight is applied.
        """
        out = torch.empty(x.shape, dtype=x.dtype)
        self._module.rms_norm(out, x, None, weight, epsilon, round_before_weight, torch.get_num_threads())
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, *, round_before_weight: bool = False
    ) -> None:
        """In place: `residual` becomes x + residual, and `x` the norm of that sum before it was rounded."""
        self._module.rms_norm(x, x, residual, weight, epsilon, round_before_weight, torch.get_num_threads())

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """(T, N): silu(x[:, :N]) * x[:, N:] of x (T, 2 N) with contiguous rows."""
        out = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype)
        self._module.silu_and_mul(out, x, torch.get_num_threads())
        return out

    def rotate(self, query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor, head_dim: int, *, neox: bool) -> None:
        """Rotary embedding in place.

        Args:
            query, key: (T, heads x D) with contiguous rows.
            cos_sin: (positions, R) cosines, then sines, of the R rotated channels of a head, R <= D.
            positions: (T,) int64.
            neox: rotate halves of the R channels into each other, else neighbours.
        """
        self._module.rotate(query, key, cos_sin, positions, head_dim, neox, torch.get_num_threads())
