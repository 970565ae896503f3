"""Queries in the bases in which pages are stored."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_kernels.page_codec.reference import CodecBases

LOG2_E = 1.4426950408889634


class FoldedQueries:
    """The queries of one layer times softmax scale and log2(e), (T, H, D) fp32, in every basis that is asked for."""

    def __init__(self, query: Tensor, scale: float, bases: CodecBases, first_row: int, num_kv_heads: int) -> None:
        """Fold nothing yet.

        Args:
            query: (T, H, D) any float dtype, rotated.
            scale: softmax scale.
            first_row: of the layer in one set of reduced bases.
        """
        self._bases, self._row, self._groups = bases, first_row, num_kv_heads
        self._made = {"model": query.float().mul(scale * LOG2_E).contiguous()}

    def model(self) -> Tensor:
        """In the model's own basis."""
        return self._made["model"]

    def flat(self) -> Tensor:
        """In the flat basis."""
        if "flat" not in self._made:
            self._made["flat"] = self._made["model"] @ self._bases.flat
        return self._made["flat"]

    def reduced(self, first_basis: int) -> Tensor:
        """In the reduced bases from row `first_basis` of all of them on; the channels that these lack are zero."""
        name = f"reduced {first_basis}"
        if name not in self._made:
            if self._bases.reduced is None:
                raise ValueError("a layout with reduced keys needs the reduced bases of the model")
            start = first_basis + self._row
            columns = self._bases.reduced[start : start + self._groups]
            model = self._made["model"]
            grouped = model.view(model.shape[0], self._groups, -1, model.shape[-1])
            folded = torch.einsum("tgrd,gdc->tgrc", grouped, columns).flatten(1, 2)
            self._made[name] = F.pad(folded, (0, model.shape[-1] - folded.shape[-1])).contiguous()
        return self._made[name]
