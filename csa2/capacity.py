"""Byte accounting in slabs: what fits into an arena, exactly.

A slab holds pages of one format, and compaction can always gather the pages of a format into as few slabs as they need.
So a mix of pages fits if and only if the slabs needed, rounded up per format, do not exceed the slabs there are. All
admission decisions use this one rule; nothing here touches memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from csa2.errors import OptionError
from csa2.formats import PLAIN, packing
from csa2.units import format_bytes

MIN_PLAIN_PAGES = 4
"""The smallest arena: one page being written, one being filled by a prompt, and a slab of sealed pages beside them."""
_MAX_SLAB_PAGES = 32


@dataclass(frozen=True)
class PinnedPages:
    """Pages that stay whatever happens, as small as they get."""

    sealed: int = 0
    """In the smallest format."""
    guarded: int = 0
    """Of those the first ones of sequences, where the smallest format is not for them."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.sealed + self.guarded


NOTHING_PINNED = PinnedPages()


@dataclass(frozen=True)
class ArenaPlan:
    """How an arena is cut: slab size, number of slabs, pages per slab by format."""

    slab_bytes: int
    num_slabs: int
    page_bytes: tuple[int, ...]
    pages_per_slab: tuple[int, ...]
    guard: int
    """Format beyond which the first page of a sequence is not demoted."""

    @property
    def end(self) -> int:
        """Index of the smallest format."""
        return len(self.page_bytes) - 1

    @property
    def arena_bytes(self) -> int:
        """Bytes in all slabs."""
        return self.slab_bytes * self.num_slabs

    @property
    def max_pages(self) -> int:
        """Most pages the arena can hold: all in the smallest format."""
        return self.num_slabs * self.pages_per_slab[self.end]

    def slabs_needed(self, counts: Sequence[int]) -> int:
        """Slabs for `counts[f]` pages of each format f, after compaction."""
        return sum(-(-n // per_slab) for n, per_slab in zip(counts, self.pages_per_slab, strict=True))

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether `counts[f]` pages of each format f fit together."""
        return self.slabs_needed(counts) <= self.num_slabs

    def fitting(self, counts: Tensor) -> Tensor:
        """(K,) bool: which rows of `counts` (K, formats) int64 fit."""
        return self._slabs(counts) <= self.num_slabs

    def first_fit(self, counts: Tensor) -> int:
        """Index of the first row of `counts` (K, formats) int64 that fits, or -1."""
        rows = torch.nonzero(self.fitting(counts))
        return int(rows[0]) if rows.numel() else -1

    def tightest(self, counts: Tensor) -> int:
        """Index of the last row of `counts` (K, formats) int64 that needs the fewest slabs."""
        slabs = self._slabs(counts)
        return int(torch.nonzero(slabs == slabs.min())[-1])

    def _slabs(self, counts: Tensor) -> Tensor:
        per_slab = torch.tensor(self.pages_per_slab)
        return ((counts + per_slab - 1) // per_slab).sum(-1)

    def small_room(self, plain_pages: int, guarded_pages: int) -> int:
        """Pages of the smallest format that fit beside `plain_pages` being written and `guarded_pages` first of a sequence
        (negative: none, and more)."""
        free = self.num_slabs - self._slabs_of(PLAIN, plain_pages) - self._guarded_slabs(guarded_pages)
        return free * self.pages_per_slab[self.end]

    def plain_room(self, small_pages: int, guarded_pages: int) -> int:
        """Pages being written that fit beside `small_pages` of the smallest format and `guarded_pages`."""
        free = self.num_slabs - self._slabs_of(self.end, small_pages) - self._guarded_slabs(guarded_pages)
        return free * self.pages_per_slab[PLAIN]

    def _slabs_of(self, index: int, pages: int) -> int:
        return -(-pages // self.pages_per_slab[index])

    def _guarded_slabs(self, pages: int) -> int:
        """Slabs of guarded pages, which share those of the smallest format where both are the same."""
        return self._slabs_of(self.guard, pages) if self.guard != self.end else 0


def plan_arena(arena_bytes: int, page_bytes: Sequence[int], guard: int | None = None) -> ArenaPlan:
    """Cut `arena_bytes` into slabs.

    The slab is a multiple of the plain page, so that plain pages form one uniform strided tensor. Larger slabs pack coded
    pages with less waste; more slabs lose less to one part-filled slab per format. The size that holds most coded pages
    with a slab per format part-filled wins.

    Args:
        guard: smallest format of the first page of a sequence; None is the smallest of all.

    Raises:
        OptionError: the arena is too small to serve a request.
    """
    plain = page_bytes[PLAIN]
    total = arena_bytes // plain
    if total < MIN_PLAIN_PAGES:
        raise OptionError(
            f"an arena of {arena_bytes} bytes ({format_bytes(arena_bytes)}) is too small for this model: one page of tokens "
            f"takes {plain} bytes and at least {MIN_PLAIN_PAGES} are needed. Set --csa2-arena-size to "
            f"{MIN_PLAIN_PAGES * plain} or more"
        )

    def held(slab_pages: int) -> tuple[int, int]:
        per_slab = packing(slab_pages * plain, page_bytes)
        full_slabs = max(total // slab_pages - len(page_bytes), 1 if total >= slab_pages else 0)
        return full_slabs * sum(per_slab[PLAIN + 1 :]), -slab_pages

    # At least four slabs: a page being written, one format for sealed pages, and room to move.
    best = max(range(1, min(_MAX_SLAB_PAGES, total // MIN_PLAIN_PAGES) + 1), key=held)
    slab_bytes = best * plain
    end = len(page_bytes) - 1
    return ArenaPlan(
        slab_bytes, total // best, tuple(page_bytes), packing(slab_bytes, page_bytes), end if guard is None else guard
    )
