"""Which pages a batch reads: built once per step from the page table and shared by all layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kernels.page_layout import PageLayout


@dataclass(frozen=True)
class FormatPages:
    """The pages of one format that a batch reads, N in all, ordered by request and then by depth."""

    layout: PageLayout
    owner: Tensor
    """(N,) int64: index of the request in the batch."""
    offsets: Tensor
    """(N,) int64: byte offset of each page in the arena."""
    lengths: Tensor
    """(N,) int64: valid tokens of each page, 1..S; fewer than S only in a plain page."""

    def between(self, start: int, end: int) -> "FormatPages":
        """Pages start..end - 1 of these."""
        return FormatPages(self.layout, self.owner[start:end], self.offsets[start:end], self.lengths[start:end])


@dataclass(frozen=True)
class PagePlan:
    """The pages of a batch, split by format. Every page below its request's length is in exactly one part."""

    batch_size: int
    parts: tuple[FormatPages, ...]


def plan_pages(
    pages: Tensor, lengths: Tensor, formats: Tensor, offsets: Tensor, layouts: Sequence[PageLayout], page_size: int
) -> PagePlan:
    """Split the pages of a batch by format.

    Args:
        pages: (B, P) int64 virtual page of each request at each depth; anything at or beyond its length.
        lengths: (B,) int64 tokens to read of each request, 0 allowed.
        formats: (virtual pages,) int8 index into `layouts`, negative if unmapped.
        offsets: (virtual pages,) int64 byte offset in the arena.
        layouts: the formats.

    Raises:
        ValueError: a page below the length of its request is not mapped; its tokens would silently be left out.
    """
    depth = torch.arange(pages.shape[1], device=pages.device)
    remaining = lengths[:, None] - depth[None, :] * page_size
    owner, position = torch.nonzero(remaining > 0, as_tuple=True)
    page = pages[owner, position]
    valid = remaining[owner, position].clamp(max=page_size)
    page_format = formats[page]
    if bool((page_format < 0).any()):
        raise ValueError(f"page {int(page[page_format < 0][0])} is read but not mapped")
    parts = []
    for index, layout in enumerate(layouts):
        chosen = torch.nonzero(page_format == index).squeeze(-1)
        if chosen.numel():
            parts.append(FormatPages(layout, owner[chosen], offsets[page[chosen]], valid[chosen]))
    return PagePlan(pages.shape[0], tuple(parts))
