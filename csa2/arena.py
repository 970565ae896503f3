"""The arena: one byte buffer cut into slabs, and the page table that says where each virtual page lies."""

import torch
from torch import Tensor

from csa2.capacity import ArenaPlan
from csa2.errors import ArenaFullError, IntegrityError
from csa2.formats import PLAIN, UNMAPPED

_WORD = torch.int64
_WORD_BYTES = 8


class Arena:
    """Places pages in slabs. A slab holds pages of one format and is free again when its last page goes.

    The page table is two arrays over virtual pages: `formats` (int8, -1 if unmapped) and `offsets` (int64 bytes). They
    and the buffer always agree: compaction moves bytes and table together.
    """

    def __init__(self, plan: ArenaPlan, num_virtual_pages: int, device: torch.device | str = "cpu") -> None:
        self.plan = plan
        # One plain page beyond the slabs: the padding page, where padded tokens write. It never moves.
        self.buffer = torch.empty(plan.arena_bytes + plan.page_bytes[PLAIN], dtype=torch.uint8, device=device)
        self.buffer[plan.arena_bytes :].zero_()
        self.formats = torch.full((num_virtual_pages,), UNMAPPED, dtype=torch.int8)
        self.offsets = torch.zeros(num_virtual_pages, dtype=torch.int64)
        self.slab_format = torch.full((plan.num_slabs,), UNMAPPED, dtype=torch.int8)
        self.slot_page = torch.full((plan.num_slabs, max(plan.pages_per_slab)), -1, dtype=torch.int64)
        self.counts = [0] * len(plan.page_bytes)
        """Mapped pages of each format, the padding page left out."""
        self.moved_pages_total = 0
        self.formats[0] = PLAIN
        self.offsets[0] = plan.arena_bytes

    def fits(self, added: list[int]) -> bool:
        """Whether `added[f]` more pages of each format f would fit (negative numbers give pages back)."""
        return self.plan.fits([have + more for have, more in zip(self.counts, added, strict=True)])

    def allocate(self, pages: Tensor, format_index: int) -> None:
        """Give each of the unmapped virtual `pages` (n,) a place of `format_index`, neighbours where possible.

        Bytes of the place are whatever was there before.

        Raises:
            ArenaFullError: there is no room even after compaction; nothing has changed then.
            IntegrityError: a page is mapped already.
        """
        n = pages.numel()
        if n == 0:
            return
        if bool((self.formats[pages] != UNMAPPED).any()):
            raise IntegrityError("a page that is mapped already would get a second place")
        per_slab = self.plan.pages_per_slab[format_index]
        added = [0] * len(self.counts)
        added[format_index] = n
        if not self.fits(added):
            raise ArenaFullError(
                f"the arena has no room for {n} pages of {self.plan.page_bytes[format_index]} bytes: "
                f"{self.plan.num_slabs} slabs, pages by format {self.counts}"
            )
        slabs = self._slabs_with_room(format_index, n)
        slab, slot = torch.nonzero(self.slot_page[slabs, :per_slab] < 0, as_tuple=True)
        slab, slot = slabs[slab[:n]], slot[:n]
        self.slot_page[slab, slot] = pages
        self.formats[pages] = format_index
        self.offsets[pages] = slab * self.plan.slab_bytes + slot * self.plan.page_bytes[format_index]
        self.counts[format_index] += n

    def release(self, pages: Tensor) -> None:
        """Give back the places of mapped `pages` (n,), none twice.

        Raises:
            IntegrityError: a page is not mapped; nothing has changed then.
        """
        if pages.numel() == 0:
            return
        page_format = self.formats[pages].long()
        if bool((page_format == UNMAPPED).any()):
            raise IntegrityError("a page that is not mapped would be given back")
        offsets = self.offsets[pages]
        slab = offsets // self.plan.slab_bytes
        size = torch.tensor(self.plan.page_bytes)[page_format]
        self.slot_page[slab, (offsets % self.plan.slab_bytes) // size] = -1
        self.formats[pages] = UNMAPPED
        for index, count in enumerate(torch.bincount(page_format, minlength=len(self.counts)).tolist()):
            self.counts[index] -= count
        touched = torch.unique(slab)
        emptied = touched[(self.slot_page[touched] < 0).all(-1)]
        self.slab_format[emptied] = UNMAPPED

    def clear(self) -> None:
        """Unmap everything but the padding page."""
        self.formats[1:] = UNMAPPED
        self.slab_format.fill_(UNMAPPED)
        self.slot_page.fill_(-1)
        self.counts = [0] * len(self.counts)

    def read_pages(self, format_index: int, pages: Tensor) -> Tensor:
        """(n, page_bytes) uint8 copy of the bytes of mapped `pages`, all of one format."""
        view = self._slot_view(format_index)
        slab, slot = self._places(format_index, pages)
        return view[slab, slot].view(torch.uint8)

    def write_pages(self, format_index: int, pages: Tensor, data: Tensor) -> None:
        """Store (n, page_bytes) uint8 `data` in the places of `pages`, all of one format."""
        view = self._slot_view(format_index)
        view[self._places(format_index, pages)] = data.view(_WORD)

    def zero_pages(self, format_index: int, pages: Tensor) -> None:
        """Fill the places of `pages` with zero bytes."""
        view = self._slot_view(format_index)
        view[self._places(format_index, pages)] = 0

    def used_slabs(self) -> int:
        """Slabs that hold at least one page."""
        return int((self.slab_format != UNMAPPED).sum())

    def check_integrity(self) -> None:
        """Recompute everything from the page table.

        Raises:
            IntegrityError: names the first thing that does not add up.
        """
        mapped = torch.nonzero(self.formats[1:] != UNMAPPED).squeeze(-1) + 1
        page_format = self.formats[mapped].long()
        counted = torch.bincount(page_format, minlength=len(self.counts)).tolist()
        if counted != self.counts:
            raise IntegrityError(f"pages by format: the table has {counted}, the counters say {self.counts}")
        slab = self.offsets[mapped] // self.plan.slab_bytes
        size = torch.tensor(self.plan.page_bytes)[page_format]
        slot = (self.offsets[mapped] % self.plan.slab_bytes) // size
        if bool((self.offsets[mapped] != slab * self.plan.slab_bytes + slot * size).any()):
            raise IntegrityError("a page does not start on a slot of its slab")
        if bool((self.slab_format[slab] != page_format).any()):
            raise IntegrityError("a page lies in a slab of another format")
        if bool((self.slot_page[slab, slot] != mapped).any()):
            raise IntegrityError("a slot does not point back at its page")
        if int((self.slot_page >= 0).sum()) != mapped.numel():
            raise IntegrityError("a slot is taken that no page owns")
        holds = torch.zeros_like(self.slab_format, dtype=torch.bool)
        holds[slab] = True
        if not torch.equal(holds, self.slab_format != UNMAPPED):
            raise IntegrityError("an empty slab keeps a format")

    def _places(self, format_index: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        offsets = self.offsets[pages]
        size = self.plan.page_bytes[format_index]
        return offsets // self.plan.slab_bytes, (offsets % self.plan.slab_bytes) // size

    def _slot_view(self, format_index: int) -> Tensor:
        """(slabs, slots, page words) view of the whole buffer as if all of it had this format."""
        plan = self.plan
        size = plan.page_bytes[format_index] // _WORD_BYTES
        return self.buffer.view(_WORD).as_strided(
            (plan.num_slabs, plan.pages_per_slab[format_index], size), (plan.slab_bytes // _WORD_BYTES, size, 1)
        )

    def _slabs_with_room(self, format_index: int, n: int) -> Tensor:
        """Slabs of the format whose free slots, with newly opened slabs, take `n` pages; in address order."""
        per_slab = self.plan.pages_per_slab[format_index]
        own = self._slabs_of(format_index)
        free_slots = int((self.slot_page[own, :per_slab] < 0).sum())
        missing = -(-(n - free_slots) // per_slab)
        if missing > 0:
            free = torch.nonzero(self.slab_format == UNMAPPED).squeeze(-1)
            if free.numel() < missing:
                self._compact()
                own = self._slabs_of(format_index)
                free = torch.nonzero(self.slab_format == UNMAPPED).squeeze(-1)
                free_slots = int((self.slot_page[own, :per_slab] < 0).sum())
                missing = max(0, -(-(n - free_slots) // per_slab))
            opened = free[:missing]
            self.slab_format[opened] = format_index
            own = torch.cat((own, opened)).sort().values
        return own

    def _slabs_of(self, format_index: int) -> Tensor:
        return torch.nonzero(self.slab_format == format_index).squeeze(-1)

    def _compact(self) -> None:
        """Move pages out of sparse slabs until each format fills as few slabs as it needs."""
        for index, per_slab in enumerate(self.plan.pages_per_slab):
            own = self._slabs_of(index)
            needed = -(-self.counts[index] // per_slab)
            if own.numel() <= needed:
                continue
            taken = (self.slot_page[own, :per_slab] >= 0).sum(-1)
            # Stable, so that every rank moves the same pages.
            fullest = own[torch.sort(taken, descending=True, stable=True).indices]
            keep, give = fullest[:needed].sort().values, fullest[needed:].sort().values
            self._move(index, give, keep)
            self.slab_format[give] = UNMAPPED

    def _move(self, format_index: int, give: Tensor, keep: Tensor) -> None:
        per_slab = self.plan.pages_per_slab[format_index]
        from_slab, from_slot = torch.nonzero(self.slot_page[give, :per_slab] >= 0, as_tuple=True)
        from_slab = give[from_slab]
        n = from_slab.numel()
        to_slab, to_slot = torch.nonzero(self.slot_page[keep, :per_slab] < 0, as_tuple=True)
        to_slab, to_slot = keep[to_slab[:n]], to_slot[:n]
        view = self._slot_view(format_index)
        view[to_slab, to_slot] = view[from_slab, from_slot]
        pages = self.slot_page[from_slab, from_slot]
        self.slot_page[to_slab, to_slot] = pages
        self.slot_page[from_slab, from_slot] = -1
        self.offsets[pages] = to_slab * self.plan.slab_bytes + to_slot * self.plan.page_bytes[format_index]
        self.moved_pages_total += n
