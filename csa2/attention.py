"""Attention over the pages of a store: the torch reference and compiled code, behind one interface."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from csa2.codec.sealing import CompiledSealer
from csa2.store import PageStore
from sgl_kernels.page_layout import PageLayout
from sgl_kernels.paged_attention import reference
from sgl_kernels.paged_attention.cpu import BatchPlan, CpuAttention
from sgl_kernels.paged_attention.plan import PagePlan, plan_pages

Write = Callable[[Tensor, Tensor, PageLayout, int, Tensor, Tensor], None]
"""Stores new tokens in plain pages, see `reference.write_plain`."""


class Attention(Protocol):
    """One implementation, bound to the pages of a store."""

    write: Write

    def plan(self, pages: Tensor, lengths: Tensor, new: Tensor) -> Any:
        """What one forward pass reads, shared by all layers.

        Args:
            pages: (B, P) int64 virtual page of each request at each depth, on the host like all arguments.
            lengths: (B,) int64 tokens of each request, new ones included.
            new: (B,) int64 new tokens of each request, which lie one after another in the batch.
        """

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, plan: Any, layer: int, scale: float) -> Tensor:
        """(T, H, D) in the dtype of `query` (T, H, D): attention of the new tokens.

        Args:
            keys, values: (T, G, D) of the new tokens, already written to their pages.
        """


def make_attention(store: PageStore, name: str, query_heads: int) -> Attention:
    """The implementation `name`, "reference", "cpu" or "cuda"; compiled ones seal the pages of `store` from then on too.

    Args:
        query_heads: H of every layer.
    """
    if name == "cuda":
        # Here, because it imports Triton, which compiles nothing and needs none where nobody asks for it.
        from csa2.cuda_attention import CudaAttention

        return CudaAttention(store, query_heads)
    return ReferenceAttention(store) if name == "reference" else CompiledAttention(store)


class CompiledAttention:
    """One call of compiled code per layer for the whole batch; new tokens are read beside the pages, not from them."""

    def __init__(self, store: PageStore) -> None:
        self.store = store
        self.kernels = CpuAttention(store.ladder.layouts, store.codec.bases)
        self.kernels.advise(store.arena.buffer)
        self.write: Write = self.kernels.write_plain
        store.seal_with(CompiledSealer(store.ladder.layouts, store.codec))

    def plan(self, pages: Tensor, lengths: Tensor, new: Tensor) -> BatchPlan:
        """See `Attention.plan`."""
        arena = self.store.arena
        return self.kernels.plan(pages, lengths - new, new, arena.formats, arena.offsets)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, plan: BatchPlan, layer: int, scale: float) -> Tensor:
        """See `Attention.attend`."""
        return self.kernels.attend(query, keys, values, self.store.arena.buffer, plan, layer, scale)


@dataclass(frozen=True)
class ExtendRow:
    """One request with more than one new token."""

    start: int
    """First of its tokens in the batch."""
    end: int
    prefix: PagePlan


@dataclass(frozen=True)
class ReferencePlan:
    """What one forward pass reads."""

    decode: PagePlan | None
    """Requests with one new token: read whole, new token included."""
    decode_tokens: Tensor
    """(B,) int64 index of their token in the batch."""
    extend: tuple[ExtendRow, ...]


class ReferenceAttention:
    """The torch reference, request by request."""

    def __init__(self, store: PageStore) -> None:
        self.store = store
        self.write: Write = reference.write_plain

    def plan(self, pages: Tensor, lengths: Tensor, new: Tensor) -> ReferencePlan:
        """See `Attention.plan`."""
        ends = new.cumsum(0)
        single = torch.nonzero(new == 1).squeeze(-1)
        decode = self._pages(pages[single], lengths[single]) if single.numel() else None
        rows = []
        for row in torch.nonzero(new > 1).squeeze(-1).tolist():
            prefix = self._pages(pages[row : row + 1], (lengths - new)[row : row + 1])
            rows.append(ExtendRow(int(ends[row] - new[row]), int(ends[row]), prefix))
        return ReferencePlan(decode, (ends - 1)[single], tuple(rows))

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, plan: ReferencePlan, layer: int, scale: float) -> Tensor:
        """See `Attention.attend`."""
        arena, bases = self.store.arena.buffer, self.store.codec.bases
        out = torch.zeros_like(query)
        if plan.decode is not None:
            one = reference.decode(query[plan.decode_tokens], arena, plan.decode, layer, scale, bases)
            out[plan.decode_tokens] = one.to(out.dtype)
        for row in plan.extend:
            part = slice(row.start, row.end)
            out[part] = reference.extend(query[part], keys[part], values[part], arena, row.prefix, layer, scale, bases)
        return out

    def _pages(self, pages: Tensor, lengths: Tensor) -> PagePlan:
        arena = self.store.arena
        return plan_pages(pages, lengths, arena.formats, arena.offsets, self.store.ladder.layouts, self.store.page_size)
