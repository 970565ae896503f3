"""What FlashInfer reads of a batch: page ids of each request, format by format.

Pure arithmetic on host tensors, once a step; all layers share the result, because a page has the same place in all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kernels.errors import KernelLayoutError, PlanError
from sgl_kernels.page_layout import PageLayout

DENSE_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
"""Of rows that FlashInfer reads as they lie."""
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class DenseFormat:
    """A format whose pages are rows of keys and values and nothing else.

    Raises:
        KernelLayoutError: pages with codes, or rows of a dtype that FlashInfer does not read.
    """

    index: int
    """Its place in the ladder."""
    layout: PageLayout
    """Plain; the page size of its geometry is the number of entries of a page."""
    merge: int = 1
    """Tokens of an entry. From 2 on entries have biases, which lie outside the page."""

    def __post_init__(self) -> None:
        name = self.layout.name
        if not self.layout.is_plain:
            raise KernelLayoutError(
                f"format {name!r} holds codes, means and scales, and FlashInfer reads bare rows: leave it to Triton"
            )
        if self.layout.geometry.dtype not in DENSE_DTYPES:
            raise KernelLayoutError(
                f"format {name!r} holds {self.layout.geometry.dtype}, and FlashInfer reads bfloat16, float16 and "
                f"float8_e4m3fn: leave it to the Triton kernels"
            )

    @property
    def entries(self) -> int:
        """E: entries of a page, which FlashInfer calls its page size."""
        return self.layout.geometry.page_size

    @property
    def is_biased(self) -> bool:
        """Whether its pages need the attention of `variant`."""
        return self.merge > 1


@dataclass(frozen=True)
class SubPlan:
    """The pages of one dense format that a batch of B requests reads, N in all. All tensors int32, on the host."""

    format: DenseFormat
    indptr: Tensor
    """(B + 1,): pages of request b are `indices[indptr[b] : indptr[b + 1]]`."""
    indices: Tensor
    """(N,): byte offsets of pages over the bytes of a page, which count the pages of `views.layer_view`."""
    last_page_len: Tensor
    """(B,): entries of the last page of each request; 0 where it has none."""

    @property
    def num_pages(self) -> int:
        """N."""
        return self.indices.numel()


@dataclass(frozen=True)
class FlashInferPlan:
    """A batch, split: each page that it reads is in one of `parts` or counted in `rest`."""

    batch_size: int
    parts: tuple[SubPlan, ...]
    """One for each dense format, in ladder order; some may have no pages."""
    rest: dict[int, int]
    """Pages of each other format that the batch reads: what the Triton kernels are to be asked for."""


def dense_formats(layouts: Sequence[PageLayout]) -> tuple[DenseFormat, ...]:
    """The formats of a ladder that FlashInfer can read."""
    readable = (layout.is_plain and layout.geometry.dtype in DENSE_DTYPES for layout in layouts)
    return tuple(DenseFormat(i, layouts[i]) for i, dense in enumerate(readable) if dense)


def plan_dense(
    pages: Tensor, lengths: Tensor, formats: Tensor, offsets: Tensor, dense: Sequence[DenseFormat], page_size: int
) -> FlashInferPlan:
    """Split the pages of a batch by format.

    Args:
        pages: (B, P) int64 virtual page of each request at each depth; anything at or beyond its length.
        lengths: (B,) int64 tokens to read of each request, 0 allowed.
        formats: (virtual pages,) int8 index into the ladder, negative if unmapped.
        offsets: (virtual pages,) int64 byte offset in the arena.
        dense: the formats that FlashInfer reads.
        page_size: tokens of a page.

    Raises:
        PlanError: a page below the length of its request is not mapped; a dense page does not lie at a multiple of its
            bytes, or too far back for int32 ids, or there are too many; a page of merged entries is partial.
    """
    batch, depth = pages.shape
    remaining = lengths[:, None] - torch.arange(depth) * page_size
    owner, position = torch.nonzero(remaining > 0, as_tuple=True)
    page = pages[owner, position]
    page_format = formats[page]
    if bool((page_format < 0).any()):
        raise PlanError(f"page {int(page[page_format < 0][0])} is read but not mapped: map it, or shorten its request")
    valid = remaining[owner, position].clamp(max=page_size)
    parts = []
    for one in dense:
        chosen = torch.nonzero(page_format == one.index).squeeze(-1)
        parts.append(_sub_plan(one, owner[chosen], offsets[page[chosen]], valid[chosen], batch, page_size))
    counts = torch.bincount(page_format, minlength=1).tolist()
    taken = {one.index for one in dense}
    rest = {index: count for index, count in enumerate(counts) if count and index not in taken}
    return FlashInferPlan(batch, tuple(parts), rest)


def _sub_plan(one: DenseFormat, owner: Tensor, offsets: Tensor, valid: Tensor, batch: int, page_size: int) -> SubPlan:
    """Of N pages ordered by request and depth: their owners, byte offsets and valid tokens (N,)."""
    name, page_bytes = one.layout.name, one.layout.page_bytes
    if one.entries * one.merge != page_size:
        raise PlanError(
            f"pages of format {name!r} have {one.entries} entries of {one.merge} tokens, and pages have {page_size} tokens: "
            f"build its layout with {page_size // one.merge} entries"
        )
    ids = offsets // page_bytes
    if bool((ids * page_bytes != offsets).any()):
        stray = int(offsets[ids * page_bytes != offsets][0])
        raise PlanError(
            f"a page of format {name!r} lies at byte {stray}, which is no multiple of its {page_bytes} bytes: slabs must be "
            f"multiples of its pages"
        )
    if ids.numel() > INT32_MAX:
        raise PlanError(f"{ids.numel()} pages of format {name!r} in a batch: FlashInfer counts up to {INT32_MAX}; split it")
    if ids.numel() and int(ids.max()) > INT32_MAX:
        raise PlanError(
            f"page id {int(ids.max())} of format {name!r}: FlashInfer takes ids up to {INT32_MAX}; use larger pages"
        )
    if one.is_biased and bool((valid < page_size).any()):
        partial = int(valid[valid < page_size][0])
        raise PlanError(
            f"a page of merged entries ({name!r}) has {partial} of {page_size} tokens: only full pages are merged"
        )
    indptr = torch.zeros(batch + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(owner, minlength=batch), 0, out=indptr[1:])
    last = torch.zeros(batch, dtype=torch.int64)
    present = indptr[1:] > indptr[:-1]
    # Only the last page of a request can be partial, and depth orders the pages of a sub-plan too.
    last[present] = valid[indptr[1:][present] - 1] // one.merge
    return SubPlan(one, indptr.int(), ids.int(), last.int())
