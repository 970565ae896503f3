"""What a batch reads, as device tensors of fixed shape: built once a step, shared by all layers.

All of it is tensor arithmetic without a look at any value, so that a CUDA graph can rebuild it from a page table and lengths
at fixed addresses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kernels.page_layout import ALIGNMENT

MAX_ARENA_BYTES = 2**31 * ALIGNMENT
"""Places of pages are int32."""


@dataclass(frozen=True)
class QueryBlocks:
    """Blocks of the new tokens of a batch, which lie one request after another."""

    spans: Tensor
    """(X, 3) int32: first token of a block in the batch, how many, and the first new token of its request."""
    owners: Tensor
    """(X,) int64 requests."""


@dataclass(frozen=True)
class BatchPlan:
    """The pages of a batch of B requests and the work on them. X blocks of columns, F formats, W = F x X x splits items."""

    pages: Tensor
    """(B x P,) int32 places of pages in the arena in units of 64 bytes; of each request in order of format, then depth."""
    lengths: Tensor
    """(B x P,) int32 valid tokens of each."""
    blocks: QueryBlocks
    items: Tensor
    """(F, X, splits, 4) int32: first token, tokens, first page and last + 1."""

    def to(self, device: torch.device) -> "BatchPlan":
        """The same on `device`."""
        blocks = QueryBlocks(self.blocks.spans.to(device), self.blocks.owners.to(device))
        return BatchPlan(self.pages.to(device), self.lengths.to(device), blocks, self.items.to(device))

    @property
    def splits(self) -> int:
        """Parts of the pages of one format that a request has."""
        return self.items.shape[2]


PROGRAMS_PER_MULTIPROCESSOR = 3
"""Decode programs that share a multiprocessor by their registers (`launch.REGISTERS`)."""
PART_PAGES = 8
"""Pages of a request that are not worth splitting: a part costs a merge, and the work that is done once a run of pages."""


def split_count(programs: int, pages: int, multiprocessors: int) -> int:
    """Parts into which the pages of a format are split: enough to fill the device, none too short to be worth it.

    Args:
        programs: blocks of queries x KV heads, which read the pages of one format without splitting.
        pages: those of the longest request.
        multiprocessors: of the device.
    """
    wanted = -(-multiprocessors * PROGRAMS_PER_MULTIPROCESSOR // max(programs, 1))
    return max(1, min(wanted, -(-pages // PART_PAGES)))


def query_blocks(new_tokens: Sequence[int], block_tokens: int, device: torch.device) -> QueryBlocks:
    """Blocks of at most `block_tokens` of the new tokens of each request."""
    spans, owners, token = [], [], 0
    for request, count in enumerate(new_tokens):
        for start in range(0, count, block_tokens):
            spans.append((token + start, min(block_tokens, count - start), token))
            owners.append(request)
        token += count
    table = torch.tensor(spans, dtype=torch.int32, device=device).view(-1, 3)
    return QueryBlocks(table, torch.tensor(owners, dtype=torch.int64, device=device))


def plan_batch(
    pages: Tensor,
    lengths: Tensor,
    formats: Tensor,
    offsets: Tensor,
    blocks: QueryBlocks,
    *,
    num_formats: int,
    page_size: int,
    splits: int,
) -> BatchPlan:
    """Look up the pages of a batch.

    Args:
        pages: (B, P) int64 virtual page of each request at each depth; anything at or beyond its length.
        lengths: (B,) int64 tokens to read of each request, 0 allowed.
        formats: (virtual pages,) int8 index into the ladder. An unmapped page (negative) is left out: see `check_mapped`.
        offsets: (virtual pages,) int64 byte offset in the arena, a multiple of 64.
        blocks: of the tokens that read.
        splits: parts into which the pages of a format are split.
    """
    batch, depth = pages.shape
    start = torch.arange(depth, device=pages.device) * page_size
    valid = (lengths[:, None] - start).clamp(0, page_size)
    known = pages.clamp(0, formats.numel() - 1)
    page_format = formats[known].long()
    kind = torch.where((valid > 0) & (page_format >= 0), page_format, num_formats)
    order = torch.argsort(kind, dim=1, stable=True)
    counts = (kind[:, :, None] == torch.arange(num_formats, device=pages.device)).sum(1)
    ends = counts.cumsum(1) + torch.arange(batch, device=pages.device)[:, None] * depth
    begins, ends = (ends - counts)[blocks.owners].T, ends[blocks.owners].T
    # (F, X, splits): equal parts, the first ones one page longer.
    part = torch.arange(splits + 1, device=pages.device)
    cuts = begins[..., None] + (part * (ends - begins)[..., None] + splits - 1) // splits
    of_block = blocks.spans[None, :, None, :2].expand(num_formats, -1, splits, -1)
    items = torch.cat((of_block, torch.stack((cuts[..., :-1], cuts[..., 1:]), -1).int()), -1)
    places = torch.gather(offsets[known] // ALIGNMENT, 1, order)
    return BatchPlan(places.flatten().int(), torch.gather(valid, 1, order).flatten().int(), blocks, items.contiguous())


def check_mapped(pages: Tensor, lengths: Tensor, formats: Tensor, page_size: int) -> None:
    """Refuse a batch that reads an unmapped page. It waits for the device, so it is no part of `plan_batch`.

    Raises:
        ValueError: a page with tokens is not mapped; they would silently be left out.
    """
    read = lengths[:, None] > torch.arange(pages.shape[1], device=pages.device) * page_size
    lost = read & (formats[pages.clamp(0, formats.numel() - 1)] < 0)
    if bool(lost.any()):
        raise ValueError(f"page {int(pages[lost][0])} is read but not mapped")
