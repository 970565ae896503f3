"""What is known of pages: flat arrays over virtual pages, and which of them running requests read.

All of it follows from what the scheduler does, in its order: no wall clock, no content. So every rank knows the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NO_CAP = 127
"""`PageFacts.cap` of pages whose request did not limit its compression."""

NOT_ASKED = -1
"""`PageFacts.asked` of pages for which nobody asked for a format."""

_EMPTY: dict[str, tuple[torch.dtype, int]] = {
    "last_use": (torch.int64, 0),
    "turn": (torch.int64, 0),
    "hits": (torch.int32, 0),
    "depth": (torch.int32, 0),
    "first": (torch.bool, False),
    "prompt": (torch.bool, False),
    "pinned": (torch.bool, False),
    "static": (torch.bool, False),
    "asked": (torch.int8, NOT_ASKED),
    "priority": (torch.int32, 0),
    "cap": (torch.int8, NO_CAP),
    "written": (torch.int16, 0),
    "reader": (torch.int64, -1),
    "position": (torch.int64, -1),
}
"""Dtype of each fact, and its value of a page that holds nothing."""


@dataclass(frozen=True)
class PageFacts:
    """Facts of each virtual page. Its format and its bytes are in the page table of the arena."""

    last_use: Tensor
    """int64 logical clock (forward passes) of the last read or write."""
    turn: Tensor
    """int64 pages that had been mapped since the start when the page was last used: an age in turnover of the cache."""
    hits: Tensor
    """int32 requests beyond the first that used the page: found it in the radix tree, or brought the same tokens."""
    depth: Tensor
    """int32 place of the page in its sequence, in pages."""
    first: Tensor
    """bool: first page of a sequence; attention sinks live there."""
    prompt: Tensor
    """bool: holds tokens of a prompt only, so that others may come to share it."""
    pinned: Tensor
    """bool: belongs to a pinned document; locked in the radix tree, so never evicted."""
    static: Tensor
    """bool: its request says that others will share it."""
    asked: Tensor
    """int8 format that a document asks for, an index into the ladder; `NOT_ASKED` where none does."""
    priority: Tensor
    """int32 highest priority of the requests that used it."""
    cap: Tensor
    """int8 smallest format that its request allows, an index into the ladder; `NO_CAP` for any."""
    written: Tensor
    """int16 slots written since the page was mapped."""
    reader: Tensor
    """int64 reader of the page, the last one, -1 if none; see `QuerySamples.readers`."""
    position: Tensor
    """int64 position of the page's first token in its sequence, -1 where nobody said."""

    @classmethod
    def empty(cls, num_virtual_pages: int) -> "PageFacts":
        """Facts of pages that hold nothing."""
        return cls(**{k: torch.full((num_virtual_pages,), fill, dtype=dtype) for k, (dtype, fill) in _EMPTY.items()})

    def forget(self, pages: Tensor) -> None:
        """Reset the facts of `pages` that change hands."""
        for name, (_, fill) in _EMPTY.items():
            getattr(self, name)[pages] = fill

    @property
    def shared(self) -> Tensor:
        """(pages,) bool: used by two requests or more, pinned, or expected to be shared."""
        return (self.hits > 0) | self.pinned | self.static


@dataclass(frozen=True)
class Usage:
    """Which pages the requests read that run now; made when a decision needs it."""

    users: Tensor
    """(virtual pages,) int64 running requests that read each page."""
    hot: Tensor
    """(virtual pages,) bool: in the hot window of a running request."""
    warm: Tensor
    """(virtual pages,) bool: in the warm window of a running request, which contains the hot one."""

    @classmethod
    def nobody(cls, num_virtual_pages: int) -> "Usage":
        """No request runs."""
        no = torch.zeros(num_virtual_pages, dtype=torch.bool)
        return cls(torch.zeros(num_virtual_pages, dtype=torch.int64), no, no)

    @classmethod
    def of(cls, pages: Tensor, is_hot: Tensor, is_warm: Tensor, num_virtual_pages: int) -> "Usage":
        """From the `pages` (n,) of running requests, one entry a request and page, and whether each is in a window."""
        hot = torch.zeros(num_virtual_pages, dtype=torch.bool)
        warm = torch.zeros_like(hot)
        hot[pages[is_hot]] = True
        warm[pages[is_hot | is_warm]] = True
        return cls(torch.bincount(pages, minlength=num_virtual_pages), hot, warm)
