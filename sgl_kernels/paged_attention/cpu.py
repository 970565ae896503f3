"""Attention over compressed pages on the CPU, compiled: one call per layer for a whole batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sgl_kernels.cpu import build
from sgl_kernels.cpu.tables import basis_tables, piece_table
from sgl_kernels.page_codec.reference import CodecBases
from sgl_kernels.page_layout import PageLayout
from sgl_kernels.paged_attention import reference


@dataclass(frozen=True)
class BatchPlan:
    """What one forward pass reads, shared by all layers."""

    requests: Tensor
    """(B, 4) int64: first and last + 1 of its new tokens in the batch, first and last + 1 of its rows of `pages`."""
    pages: Tensor
    """(N, 3) int64: format, byte offset and valid entries of each page before the new tokens; coded pages first."""


class CpuAttention:
    """The kernels, bound to the layouts of one model."""

    def __init__(self, layouts: Sequence[PageLayout], bases: CodecBases, isa: str | None = None) -> None:
        """Compile what is not compiled yet.

        Args:
            layouts: the formats in ladder order, the plain one first.
            bases: those with which pages are sealed.
            isa: an instruction set, or None for the best of this CPU.

        Raises:
            KernelLayoutError: see `piece_table`.
            KernelBuildError, InstructionSetError: see `build.load`.
        """
        self._pieces = piece_table(layouts, bases)
        self._module: Any = build.load(isa)
        self._flat, self._reduced = basis_tables(bases)
        self._page_size = layouts[0].geometry.page_size

    def advise(self, arena: Tensor) -> None:
        """Ask the system for huge pages behind `arena` (bytes,): pages are read all over it, and the TLB is small."""
        self._module.advise_huge_pages(arena)

    def write_plain(self, arena: Tensor, rows: Tensor, layout: PageLayout, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store new tokens in plain pages: as `reference.write_plain`, for keys and values of the dtype of the pages."""
        g = layout.geometry
        if keys.dtype != g.dtype or values.dtype != g.dtype:
            reference.write_plain(arena, rows, layout, layer, keys, values)
            return
        head_rows = g.num_kv_heads * g.page_size
        self._module.write_rows(arena, rows, keys, values, layer * 2 * head_rows, g.page_size, head_rows)

    def plan(self, pages: Tensor, cached: Tensor, new: Tensor, formats: Tensor, offsets: Tensor) -> BatchPlan:
        """Look up the pages of a batch.

        Args:
            pages: (B, P) int64 virtual page of each request at each depth; anything beyond its cached tokens.
            cached: (B,) int64 tokens before the new ones, 0 allowed.
            new: (B,) int64 new tokens of each request, which lie one after another in the batch.
            formats: (virtual pages,) int8 index into the layouts, negative if unmapped.
            offsets: (virtual pages,) int64 byte offset in the arena.

        Raises:
            ValueError: a page with cached tokens is not mapped; they would silently be left out.
        """
        depth = torch.arange(pages.shape[1]) * self._page_size
        remaining = cached[:, None] - depth[None, :]
        owner, position = torch.nonzero(remaining > 0, as_tuple=True)
        page = pages[owner, position]
        page_format = formats[page].long()
        if page.numel() and int(page_format.min()) < 0:
            raise ValueError(f"page {int(page[page_format < 0][0])} is read but not mapped")
        valid = remaining[owner, position].clamp_(max=self._page_size)
        table = torch.stack((page_format, offsets[page], valid), -1)
        # Coded pages first, each format together: their values are turned back into the model's basis once.
        count = self._pieces.shape[1]
        order = torch.argsort(owner * count + torch.where(page_format == 0, count - 1, page_format - 1), stable=True)
        ends = new.cumsum(0)
        page_ends = torch.bincount(owner, minlength=pages.shape[0]).cumsum(0)
        begins = torch.cat((page_ends.new_zeros(1), page_ends[:-1]))
        return BatchPlan(torch.stack((ends - new, ends, begins, page_ends), -1).contiguous(), table[order].contiguous())

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        arena: Tensor,
        plan: BatchPlan,
        layer: int,
        scale: float,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attention of the new tokens of a batch over their pages and, causally, over themselves.

        Args:
            query: (T, H, D), rotated; the heads of a token contiguous.
            keys, values: (T, G, D) of the same tokens, likewise.
            arena: (bytes,) uint8.
            scale: softmax scale.
            lse: (T, H) fp32, written with the natural log-sum-exp when given.

        Returns:
            (T, H, D) in the dtype of `query`. Products of bf16 are exact, sums are in fp32.
        """
        out = torch.zeros(query.shape, dtype=query.dtype)
        self._module.extend(
            out,
            query,
            keys,
            values,
            arena,
            plan.requests,
            plan.pages,
            self._pieces[layer],
            self._flat,
            self._reduced,
            lse,
            scale,
            torch.get_num_threads(),
        )
        return out
