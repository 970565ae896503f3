"""Which pages are compressed how far: formats by role, and the order in which pressure demotes pages.

Pure functions of flat arrays, identical on every rank: no wall clock, no data content, ties broken by page id.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from csa2.facts import NOT_ASKED, PageFacts, Usage
from csa2.formats import FP8, PLAIN, FormatLadder
from csa2.value import Turnover, step_costs, worth_in_use


class DemotionRound(IntEnum):
    """Rounds of demotion under pressure, first to last. Within a round lower priorities go first, then lower prices.

    *Shared* pages are used by two requests or more, or pinned; *protected* ones are shared, or first in their sequence.
    *Idle* pages are read by no running request. A first page is never demoted beyond the guard of the ladder.
    """

    PRIVATE = 0
    """Idle private pages to the end of the ladder; those in use as far as their role: 4 bits, and beyond the warm window the
    format of the tail. Protected pages to the shared format, or FP8."""
    SHARED = 1
    """Idle protected pages: to 4 bits."""
    SHARED_END = 2
    """Idle protected pages: to the end of the ladder."""
    USED = 3
    """Pages that a running request reads, outside every hot window: to the end of the ladder."""
    HOT = 4
    """Full plain pages in the hot window of a running request: to FP8."""
    LAST = 5
    """Those to the end of the ladder, and pages beyond the cap of their request. After this round only open pages are
    plain."""


@dataclass(frozen=True)
class DemotionSteps:
    """Steps in the order in which they are taken. A page may appear more than once, each time with a smaller target."""

    pages: Tensor
    """(K,) int64"""
    source: Tensor
    """(K,) int64 format before the step, given the steps before it."""
    target: Tensor
    """(K,) int64 format after the step."""
    round: Tensor
    """(K,) int64 `DemotionRound` of the step."""


def sealed_format(
    facts: PageFacts, pages: Tensor, old: Tensor, tail: Tensor, ladder: FormatLadder, *, roomy: bool = False
) -> Tensor:
    """(n,) int64 format that full `pages` take while memory is not short, by role.

    Args:
        old: (n,) bool: beyond the warm window and not only beyond the hot one.
        tail: (n,) int64 format of each page if it is private and old.
        roomy: memory is free, so that pages of prompts wait in the shared format for others to share them.
    """
    target = torch.where(old, tail, tail.clamp(max=ladder.warm))
    target = torch.minimum(target, facts.cap[pages].long().clamp(min=ladder.warm))
    if ladder.shared is not None:
        shared = facts.shared[pages]
        target[shared] = ladder.shared
        if roomy:
            fresh = facts.prompt[pages] & ~shared
            target[fresh] = target[fresh].clamp(max=ladder.shared)
    asked = facts.asked[pages].long()
    target = torch.where(asked != NOT_ASKED, asked, target)
    # The attention sinks: 64 tokens that every later query reads; they cost one page and carry the most weight.
    target[facts.first[pages]] = PLAIN
    return target


def demotion_steps(
    facts: PageFacts,
    formats: Tensor,
    usage: Usage,
    page_size: int,
    ladder: FormatLadder,
    turnover: Turnover,
    tail: int,
    *,
    upto: DemotionRound = DemotionRound.LAST,
) -> DemotionSteps:
    """Everything that could be demoted, in order.

    Args:
        formats: (virtual pages,) int8 format of each page.
        tail: smallest format that old private pages get by their role.
        upto: the last round.
    """
    full = torch.nonzero((formats >= PLAIN) & (formats < ladder.end) & (facts.written >= page_size)).squeeze(-1)
    current = formats[full].long()
    rounds = _rounds(facts, full, current, usage, ladder, tail)
    allowed = rounds <= upto
    index, target = torch.nonzero(allowed, as_tuple=True)
    # A step starts where the page's step before it ended.
    stops = torch.where(allowed, torch.arange(len(ladder.layouts)), -1).cummax(1).values
    before = torch.cat((torch.full_like(current, -1)[:, None], stops[:, :-1]), 1)
    sources = torch.maximum(before, current[:, None])
    costs = step_costs(ladder)[sources, torch.arange(len(ladder.layouts))].where(allowed, 0)
    # No step of a page is cheaper than the one before it, whatever the sizes: they are taken in their order.
    price = (worth_in_use(facts, full, usage, turnover)[:, None] * costs.cummax(1).values)[index, target]
    order = torch.arange(index.numel())
    for key in (facts.last_use[full][index], price, facts.priority[full][index], rounds[index, target]):
        order = order[torch.sort(key[order], stable=True).indices]
    index, source, target = index[order], sources[index, target][order], target[order]
    return DemotionSteps(full[index], source, target, rounds[index, target])


_NEVER = len(DemotionRound)


def _rounds(facts: PageFacts, full: Tensor, current: Tensor, usage: Usage, ladder: FormatLadder, tail: int) -> Tensor:
    """(n, formats) int64 round in which each of the pages `full` (n,) goes to each format; `_NEVER` where it does not."""
    target = torch.arange(len(ladder.layouts))[None, :]
    first, shared = facts.first[full][:, None], facts.shared[full][:, None]
    protected = first | shared
    idle = (usage.users[full] == 0)[:, None]
    # Beyond its first step down a page is no longer what a running request reads as written.
    hot = (usage.hot[full] & (current == PLAIN))[:, None]
    gentle = _gentle(shared, ladder)
    role = torch.where(usage.warm[full], ladder.warm, max(ladder.warm, tail))[:, None]
    private_round = torch.where(idle | (target <= role), int(DemotionRound.PRIVATE), int(DemotionRound.USED))
    shared_round = torch.where(target <= ladder.warm, int(DemotionRound.SHARED), int(DemotionRound.SHARED_END))
    shared_round = torch.where(idle, shared_round, int(DemotionRound.USED))
    shared_round = torch.where(target == gentle, int(DemotionRound.PRIVATE), shared_round)
    rounds = torch.where(protected, shared_round, private_round)
    rounds = torch.where(hot, torch.where(target == FP8, int(DemotionRound.HOT), int(DemotionRound.LAST)), rounds)
    rounds = torch.where(target > facts.cap[full][:, None], int(DemotionRound.LAST), rounds)
    stops = torch.where(hot, FP8, torch.where(protected, gentle, ladder.warm))
    stop = (target == stops) | (target >= ladder.warm)
    floor = torch.where(first, ladder.guard, ladder.end)
    return torch.where(stop & (target > current[:, None]) & (target <= floor), rounds, _NEVER)


def _gentle(shared: Tensor, ladder: FormatLadder) -> Tensor:
    """Format of a protected page that gives up the model dtype: nothing below 4 bits, and in the model dtype it would save
    nothing."""
    shared_format = ladder.tail if ladder.shared is None else ladder.shared
    return torch.where(shared & (shared_format != PLAIN), min(shared_format, ladder.warm), FP8)
