"""Which pages are compressed how far: roles of pages and the order in which pressure demotes them.

Pure functions of flat arrays, identical on every rank: no wall clock, no data content, ties broken by page id.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from csa2.formats import FP8, PLAIN, SMALL


class DemotionRound(IntEnum):
    """Rounds of demotion under pressure, first to last. Within a round the page used longest ago goes first."""

    COLD_PRIVATE = 0
    """Plain pages outside every hot window that nobody shares: to the smallest format."""
    PROTECTED = 1
    """Plain pages that are shared or first in their sequence: to the shared format, or FP8."""
    SQUEEZE = 2
    """FP8 pages, the protected ones last: to the smallest format."""
    HOT = 3
    """Full plain pages in the hot window of a running request: to FP8."""
    LAST = 4
    """Those too to the smallest format. After this round only open pages are plain."""


@dataclass(frozen=True)
class PageFacts:
    """What is known of each virtual page, as flat arrays over virtual pages."""

    last_use: Tensor
    """int64 logical clock (forward passes) of the last read or write."""
    hits: Tensor
    """int32 requests that found the page in the radix tree."""
    first: Tensor
    """bool: first page of a sequence; attention sinks live there."""
    written: Tensor
    """int16 slots written since the page was mapped."""

    @classmethod
    def empty(cls, num_virtual_pages: int) -> "PageFacts":
        """Facts of pages that hold nothing."""
        return cls(
            last_use=torch.zeros(num_virtual_pages, dtype=torch.int64),
            hits=torch.zeros(num_virtual_pages, dtype=torch.int32),
            first=torch.zeros(num_virtual_pages, dtype=torch.bool),
            written=torch.zeros(num_virtual_pages, dtype=torch.int16),
        )

    def forget(self, pages: Tensor) -> None:
        """Reset the facts of `pages` that change hands."""
        self.last_use[pages] = 0
        self.hits[pages] = 0
        self.first[pages] = False
        self.written[pages] = 0


@dataclass(frozen=True)
class DemotionSteps:
    """Steps in the order in which they are taken. A page may appear more than once, each time with a smaller target."""

    pages: Tensor
    """(K,) int64"""
    source: Tensor
    """(K,) int64 format before the step, given the steps before it."""
    target: Tensor
    """(K,) int64 format after the step."""


def sealed_format(facts: PageFacts, pages: Tensor, shared_format: int) -> Tensor:
    """(n,) int64 format that full `pages` take when they leave the hot window: by role, while memory is not short."""
    target = torch.full_like(pages, SMALL)
    target[facts.hits[pages] > 0] = shared_format
    # The attention sinks: 64 tokens that every later query reads; they cost one page and carry the most weight.
    target[facts.first[pages]] = PLAIN
    return target


def demotion_steps(
    facts: PageFacts, formats: Tensor, hot: Tensor, page_size: int, shared_format: int, *, spare_hot: bool = False
) -> DemotionSteps:
    """Everything that could be demoted, in order.

    Args:
        formats: (virtual pages,) int8 format of each page.
        hot: (n,) int64 pages in the hot window of a request that is running now.
        shared_format: format of shared pages while memory is not short.
        spare_hot: leave out the rounds that touch hot windows.
    """
    full = torch.nonzero((formats >= PLAIN) & (formats < SMALL) & (facts.written >= page_size)).squeeze(-1)
    present = formats[full].long()
    is_hot = torch.isin(full, hot)
    shared = facts.hits[full] > 0
    protected = shared | facts.first[full]
    plain = present == PLAIN
    protected_target = torch.where(shared & (shared_format != PLAIN), shared_format, FP8)

    cold = plain & ~is_hot & ~protected
    guarded = plain & ~is_hot & protected
    warm = plain & is_hot & (not spare_hot)
    squeezable = (present == FP8) | (guarded & (protected_target == FP8))
    rounds = [
        (cold, DemotionRound.COLD_PRIVATE, present, torch.full_like(present, SMALL)),
        (guarded, DemotionRound.PROTECTED, present, protected_target),
        (squeezable, DemotionRound.SQUEEZE, torch.full_like(present, FP8), torch.full_like(present, SMALL)),
        (warm, DemotionRound.HOT, present, torch.full_like(present, FP8)),
        (warm, DemotionRound.LAST, torch.full_like(present, FP8), torch.full_like(present, SMALL)),
    ]
    pages, order, source, target = [], [], [], []
    for chosen, demotion_round, before, after in rounds:
        index = torch.nonzero(chosen).squeeze(-1)
        pages.append(full[index])
        # In the squeeze unprotected pages go before protected ones.
        late = protected[index] if demotion_round == DemotionRound.SQUEEZE else torch.zeros_like(index, dtype=torch.bool)
        order.append(int(demotion_round) * 2 + late.long())
        source.append(before[index])
        target.append(after[index])
    page = torch.cat(pages)
    by_page = torch.arange(page.numel())
    for key in (page, facts.last_use[page], torch.cat(order)):
        by_page = by_page[torch.sort(key[by_page], stable=True).indices]
    return DemotionSteps(page[by_page], torch.cat(source)[by_page], torch.cat(target)[by_page])
