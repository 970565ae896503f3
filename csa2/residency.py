"""Which pages are compressed how far: roles of pages and the order in which pressure demotes them.

Pure functions of flat arrays, identical on every rank: no wall clock, no data content, ties broken by page id.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from csa2.formats import FP8, PLAIN, FormatLadder


class DemotionRound(IntEnum):
    """Rounds of demotion under pressure, first to last. Within a round the page used longest ago goes first."""

    COLD_PRIVATE = 0
    """Pages outside every hot window that nobody shares: to 4 bits."""
    PROTECTED = 1
    """Plain pages that are shared or first in their sequence: to the shared format, or FP8."""
    SHRINK = 2
    """Private pages: to the smallest format."""
    SQUEEZE = 3
    """Protected pages: to 4 bits."""
    SHRINK_PROTECTED = 4
    """Protected pages: to the smallest format, those first in their sequence only as far as nothing is merged."""
    HOT = 5
    """Full plain pages in the hot window of a running request: to FP8."""
    LAST = 6
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
    reader: Tensor
    """int64 reader of the page, the last one, -1 if none; see `QuerySamples.readers`."""
    position: Tensor
    """int64 position of the page's first token in its sequence, -1 where nobody said."""

    @classmethod
    def empty(cls, num_virtual_pages: int) -> "PageFacts":
        """Facts of pages that hold nothing."""
        return cls(
            last_use=torch.zeros(num_virtual_pages, dtype=torch.int64),
            hits=torch.zeros(num_virtual_pages, dtype=torch.int32),
            first=torch.zeros(num_virtual_pages, dtype=torch.bool),
            written=torch.zeros(num_virtual_pages, dtype=torch.int16),
            reader=torch.full((num_virtual_pages,), -1, dtype=torch.int64),
            position=torch.full((num_virtual_pages,), -1, dtype=torch.int64),
        )

    def forget(self, pages: Tensor) -> None:
        """Reset the facts of `pages` that change hands."""
        self.last_use[pages] = 0
        self.hits[pages] = 0
        self.first[pages] = False
        self.written[pages] = 0
        self.reader[pages] = -1
        self.position[pages] = -1


@dataclass(frozen=True)
class DemotionSteps:
    """Steps in the order in which they are taken. A page may appear more than once, each time with a smaller target."""

    pages: Tensor
    """(K,) int64"""
    source: Tensor
    """(K,) int64 format before the step, given the steps before it."""
    target: Tensor
    """(K,) int64 format after the step."""


def sealed_format(facts: PageFacts, pages: Tensor, old: Tensor, ladder: FormatLadder) -> Tensor:
    """(n,) int64 format that full `pages` take while memory is not short, by role.

    Args:
        old: (n,) bool: beyond the warm window and not only beyond the hot one.
    """
    target = torch.full_like(pages, min(ladder.warm, ladder.tail))
    target[old] = ladder.tail
    if ladder.shared is not None:
        target[facts.hits[pages] > 0] = ladder.shared
    # The attention sinks: 64 tokens that every later query reads; they cost one page and carry the most weight.
    target[facts.first[pages]] = PLAIN
    return target


def demotion_steps(
    facts: PageFacts, formats: Tensor, hot: Tensor, page_size: int, ladder: FormatLadder, *, spare_hot: bool = False
) -> DemotionSteps:
    """Everything that could be demoted, in order.

    Args:
        formats: (virtual pages,) int8 format of each page.
        hot: (n,) int64 pages in the hot window of a request that is running now.
        ladder: the formats and their roles.
        spare_hot: leave out the rounds that touch hot windows.
    """
    full = torch.nonzero((formats >= PLAIN) & (formats < ladder.end) & (facts.written >= page_size)).squeeze(-1)
    current = formats[full].long()
    # Beyond its first step down a page is no longer what a running request reads as written.
    is_hot = torch.isin(full, hot) & (current == PLAIN)
    shared = facts.hits[full] > 0
    protected = shared | facts.first[full]
    floor = torch.where(facts.first[full], ladder.guard, ladder.end)
    shared_format = ladder.tail if ladder.shared is None else ladder.shared
    protected_format = torch.where(shared & (shared_format != PLAIN), min(shared_format, ladder.warm), FP8)
    rounds = [
        (~is_hot & ~protected, torch.full_like(current, ladder.warm)),
        (~is_hot & protected & (current == PLAIN), protected_format),
        (~is_hot & ~protected, floor),
        (~is_hot & protected, torch.full_like(current, ladder.warm)),
        (~is_hot & protected, floor),
        (is_hot & (not spare_hot), torch.full_like(current, FP8)),
        (is_hot & (not spare_hot), floor),
    ]
    pages, order, source, target = [], [], [], []
    for demotion_round, (chosen, after) in zip(DemotionRound, rounds, strict=True):
        index = torch.nonzero(chosen & (after > current)).squeeze(-1)
        pages.append(full[index])
        order.append(torch.full_like(index, int(demotion_round)))
        source.append(current[index])
        target.append(after[index])
        current[index] = after[index]
    page = torch.cat(pages)
    by_page = torch.arange(page.numel())
    for key in (page, facts.last_use[page], torch.cat(order)):
        by_page = by_page[torch.sort(key[by_page], stable=True).indices]
    return DemotionSteps(page[by_page], torch.cat(source)[by_page], torch.cat(target)[by_page])
