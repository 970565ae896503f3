"""The page store: virtual pages with their bytes, formats and facts; sealing, demotion and the accounting of both."""

from collections.abc import Callable

import torch
from torch import Tensor

from csa2.arena import Arena
from csa2.capacity import ArenaPlan, PinnedPages
from csa2.codec.codec import PageCodec
from csa2.codec.queries import QuerySamples
from csa2.codec.sealing import CODEC_BATCH_PAGES, ReferenceSealer, Sealer, Wave, standing_from
from csa2.controller import Mix, deal
from csa2.errors import IntegrityError
from csa2.facts import NOT_ASKED, PageFacts, Usage
from csa2.formats import PLAIN, UNMAPPED, FormatLadder
from csa2.positions import check_positions, record_positions
from csa2.residency import DemotionRound, DemotionSteps, demotion_steps, sealed_format
from csa2.value import Turnover, step_costs, worth
from sgl_kernels.page_codec.reference import Entries


class PageStore:
    """Owns the arena and the facts of its pages.

    A page is mapped plain, is open until all its slots are written, and is full from then on. Only full pages are
    re-encoded, and only towards the end of the ladder.
    """

    def __init__(
        self, ladder: FormatLadder, plan: ArenaPlan, num_virtual_pages: int, codec: PageCodec, device: str = "cpu"
    ) -> None:
        self.ladder = ladder
        self.codec = codec.to(device)
        self._sealer: Sealer = ReferenceSealer(ladder.layouts, self.codec)
        self.arena = Arena(plan, num_virtual_pages, device)
        self.facts = PageFacts.empty(num_virtual_pages)
        self.page_size = ladder.geometry.page_size
        self.samples = QuerySamples(ladder.geometry.num_layers, ladder.geometry.num_kv_heads)
        self.protected_pages = 1
        """Pages at the beginning of a sequence that are never merged."""
        self.tail = Mix(ladder.tail, ladder.tail)
        """Formats that old private pages get."""
        self.clock = 0
        self._open_pages: int | None = None
        self._pinned: PinnedPages | None = None
        self.mapped_total = 0
        names = ladder.names
        self.demotions_total = {f"{a}->{b}": 0 for i, a in enumerate(names) for b in names[i + 1 :]}

    @property
    def open_pages(self) -> int:
        """Mapped pages that are not fully written and so cannot be compressed."""
        # Admission asks several times between two changes, and counting goes over the whole page table.
        if self._open_pages is None:
            is_open = (self.arena.formats[1:] == PLAIN) & (self.facts.written[1:] < self.page_size)
            self._open_pages = int(is_open.sum())
        return self._open_pages

    @property
    def guarded_pages(self) -> int:
        """Mapped pages that are never merged; 0 where no format merges."""
        plan = self.arena.plan
        return int(self.facts.first[1:].sum()) if plan.guard != plan.end else 0

    @property
    def pinned(self) -> PinnedPages:
        """Pages of pinned documents, which stay whatever happens."""
        if self._pinned is None:
            pages, plan = self.facts.pinned, self.arena.plan
            guarded = int((pages & self.facts.first).sum()) if plan.guard != plan.end else 0
            self._pinned = PinnedPages(int(pages.sum()) - guarded, guarded)
        return self._pinned

    def pin(self, pages: Tensor, *, pinned: bool = True) -> None:
        """Mark mapped `pages` as those of a pinned document, or no longer."""
        self._pinned = None
        self.facts.pinned[pages] = pinned

    def ask(self, pages: Tensor, index: int) -> None:
        """Give `pages` the format `index` as theirs; where two documents ask, the larger one counts."""
        before = self.facts.asked[pages]
        self.facts.asked[pages] = torch.where(before == NOT_ASKED, index, before.clamp(max=index)).to(torch.int8)

    @property
    def mapped_pages(self) -> int:
        """Pages in use, the padding page left out."""
        return sum(self.arena.counts)

    def seal_with(self, sealer: Sealer) -> None:
        """Let `sealer` re-encode pages from now on."""
        self._sealer = sealer

    def map_pages(self, pages: Tensor) -> None:
        """Give unmapped `pages` a plain place filled with zeros.

        Zeros, because a partly written page is read as a whole: stale bytes could be NaN, and NaN times a zero weight is
        NaN in another request.

        Raises:
            ArenaFullError: no room; call `make_room` first.
        """
        self._open_pages = None
        self.arena.allocate(pages, PLAIN)
        self.facts.forget(pages)
        self.mapped_total += pages.numel()
        self.facts.last_use[pages] = self.clock
        self.facts.turn[pages] = self.mapped_total
        self.arena.zero_pages(PLAIN, pages)

    def unmap_pages(self, pages: Tensor) -> None:
        """Give back mapped `pages`; their bytes are gone."""
        self._open_pages = self._pinned = None
        self.arena.release(pages)
        self.facts.forget(pages)

    def clear(self) -> None:
        """Unmap every page."""
        self._open_pages = self._pinned = None
        self.arena.clear()
        self.facts.forget(torch.arange(1, self.arena.formats.numel()))
        self.samples.clear()

    def record_writes(self, slots: Tensor, positions: Tensor | None = None) -> None:
        """Note that the virtual token `slots` (T,) of plain pages are written in this forward pass.

        Args:
            positions: (T,) int64 at which their keys are rotated; needed where the ladder separates them from their keys.

        Raises:
            IntegrityError: a slot lies in a page that is not mapped, or already compressed, or at a position that does not
                follow from where its page begins.
        """
        self._open_pages = None
        pages = slots // self.page_size
        if bool((self.arena.formats[pages] != PLAIN).any()):
            bad = pages[self.arena.formats[pages] != PLAIN][0]
            state = int(self.arena.formats[bad])
            what = "an unmapped" if state == UNMAPPED else f"a {self.ladder.names[state]}"
            raise IntegrityError(f"write to {what} page {int(bad)}: only plain pages take new tokens")
        self.facts.written.index_add_(0, pages, torch.ones_like(pages, dtype=torch.int16))
        self.facts.written[0] = 0
        if self.ladder.is_separated:
            record_positions(self.facts, slots, positions, self.page_size)

    def touch(self, pages: Tensor, readers: Tensor, depth: Tensor | None = None) -> None:
        """Note that `pages` (n,) are read in this forward pass by `readers` (n,), see `QuerySamples.readers`.

        Args:
            depth: (n,) int64 place of each page in the sequence of its reader.
        """
        self.facts.last_use[pages] = self.clock
        self.facts.turn[pages] = self.mapped_total
        self.facts.reader[pages] = readers
        if depth is not None:
            self.facts.depth[pages] = depth.to(torch.int32)

    def share(self, pages: Tensor) -> None:
        """Count one request more that uses `pages` (n,), none twice."""
        self.facts.hits[pages] += 1

    def live_bytes(self, usage: Usage) -> int:
        """Bytes of the pages that running requests read, that two requests or more have used, or that are pinned.

        What nobody asked for twice makes way by itself: it is demoted and evicted first.
        """
        live = (self.arena.formats >= PLAIN) & ((usage.users > 0) | self.facts.shared)
        live[0] = False
        sizes = torch.tensor(self.ladder.page_bytes)
        return int(sizes[self.arena.formats[live].long()].sum())

    def pinned_bytes(self) -> int:
        """Bytes that the pages of pinned documents take now."""
        sizes = torch.tensor(self.ladder.page_bytes)
        return int(sizes[self.arena.formats[self.facts.pinned].long()].sum())

    def seal(self, pages: Tensor, old: Tensor | None = None, *, roomy: bool = False) -> int:
        """Compress full `pages` that left the hot window, and `old` ones that left the warm window too, to the format of
        their role; the number compressed.

        Args:
            roomy: memory is free, see `sealed_format`.

        A page that has become smaller keeps what it has. One that finds no room for its smaller form stays as it is: it is
        among the first to go under pressure.
        """
        chosen = torch.unique(pages if old is None else torch.cat((pages, old)))
        chosen = chosen[(self.arena.formats[chosen] != UNMAPPED) & (self.facts.written[chosen] >= self.page_size)]
        is_old = torch.zeros_like(chosen, dtype=torch.bool) if old is None else torch.isin(chosen, old)
        target = self._role(chosen, is_old, roomy=roomy)
        smaller = target > self.arena.formats[chosen]
        return self._reencode(chosen[smaller], target[smaller])

    def relieve(self, usage: Usage, wanted_bytes: int, max_pages: int) -> int:
        """Bring pages that running requests read to the format of their role now, the cheapest steps first, until
        `wanted_bytes` are free or `max_pages` are re-encoded; the number re-encoded."""
        ready = (self.facts.written >= self.page_size) & (usage.users > 0) & ~usage.hot
        pages = torch.nonzero(ready & (self.arena.formats != UNMAPPED)).squeeze(-1)
        target = self._role(pages, ~usage.warm[pages])
        current = self.arena.formats[pages].long()
        smaller = target > current
        pages, target, current = pages[smaller], target[smaller], current[smaller]
        price = worth(self.facts, pages, self.turnover) * step_costs(self.ladder)[current, target]
        order = torch.sort(price, stable=True).indices
        sizes = torch.tensor(self.ladder.page_bytes)
        freed = (sizes[current] - sizes[target])[order].cumsum(0)
        take = min(int((freed < wanted_bytes).sum()) + 1, max_pages)
        chosen = order[:take].sort().values
        return self._reencode(pages[chosen], target[chosen])

    def disregard(self, num_pages: int) -> None:
        """Take back that `num_pages` pages were mapped, for the age of all others: nobody asked for what they held."""
        self.mapped_total -= num_pages
        self.facts.turn.clamp_(max=self.mapped_total)

    @property
    def turnover(self) -> Turnover:
        """How far the cache has turned over."""
        return Turnover(self.mapped_total, self.mapped_pages)

    def cold_pages(self, age: int) -> Tensor:
        """Plain full pages not used for `age` forward passes."""
        ready = (self.arena.formats == PLAIN) & (self.facts.written >= self.page_size)
        return torch.nonzero(ready & (self.facts.last_use < self.clock - age)).squeeze(-1)

    def make_room(self, num_pages: int, usage: Callable[[], Usage], upto: DemotionRound = DemotionRound.LAST) -> bool:
        """Demote as few pages as it takes until `num_pages` plain pages can be mapped.

        Args:
            usage: what running requests read; asked only when something must be demoted.
            upto: the last round, because something else can still go.

        Returns:
            Whether they fit now. If not, demotion has come as near to it as it can.
        """
        arena = self.arena
        if arena.fits([num_pages, *([0] * (len(arena.counts) - 1))]):
            return True
        steps = self._steps(usage(), upto)
        k = steps.pages.numel()
        formats = len(arena.counts)
        change = torch.zeros(k + 1, formats, dtype=torch.int64)
        change[0] = torch.tensor(arena.counts)
        change[0, PLAIN] += num_pages
        rows = torch.arange(1, k + 1)
        change[rows, steps.source] -= 1
        change[rows, steps.target] += 1
        counts = change.cumsum(0)
        taken = arena.plan.first_fit(counts)
        fits = taken >= 0
        if not fits:
            # As near as demotion gets. Not simply everything: a format that opens a slab of its own can leave less room.
            taken = arena.plan.tightest(counts)
        final = torch.full_like(arena.formats, UNMAPPED, dtype=torch.int64)
        # A page's later step overwrites its earlier one: each page is re-encoded once, to where it ends up.
        final.scatter_reduce_(0, steps.pages[:taken], steps.target[:taken], "amax")
        pages = torch.nonzero(final > PLAIN).squeeze(-1)
        self._reencode(pages, final[pages])
        return fits

    def read(self, pages: Tensor) -> Entries:
        """Entries of mapped `pages` (n,), all of one format, in the model's own basis; heads is L x G."""
        index = int(self.arena.formats[pages[0]])
        entries = self.codec.open(self.arena.read_pages(index, pages), self.ladder.layouts[index])
        if self.ladder.is_separated and index == PLAIN:
            entries = standing_from(entries, self.facts.position[pages])
        return entries

    def check_integrity(self) -> None:
        """Recompute the accounting from the page table.

        Raises:
            IntegrityError: names the first thing that does not add up.
        """
        self.arena.check_integrity()
        coded = self.arena.formats > PLAIN
        if bool((self.facts.written[coded] != self.page_size).any()):
            raise IntegrityError("a compressed page is not full")
        known, self._open_pages = self._open_pages, None
        if known not in (None, self.open_pages):
            raise IntegrityError(f"{self.open_pages} pages are open, {known} were counted")
        counted, self._pinned = self._pinned, None
        if counted not in (None, self.pinned):
            raise IntegrityError(f"{self.pinned} pages are pinned, {counted} were counted")
        if bool((self.facts.written > self.page_size).any()):
            raise IntegrityError("a page has more writes than slots")
        if bool((self.facts.written[self.arena.formats == UNMAPPED] != 0).any()):
            raise IntegrityError("an unmapped page has writes")
        if self.ladder.is_separated:
            check_positions(self.facts, self.arena, self.ladder)

    def _role(self, pages: Tensor, is_old: Tensor, *, roomy: bool = False) -> Tensor:
        tail = deal(self.tail, self.facts.depth[pages])
        return sealed_format(self.facts, pages, is_old, tail, self.ladder, roomy=roomy)

    def _steps(self, usage: Usage, upto: DemotionRound) -> DemotionSteps:
        return demotion_steps(
            self.facts,
            self.arena.formats,
            usage,
            self.page_size,
            self.ladder,
            self.turnover,
            max(self.tail.larger, self.tail.smaller),
            upto=upto,
        )

    def _reencode(self, pages: Tensor, target: Tensor) -> int:
        """Re-encode full `pages` (n,), each to its own `target` format, as far as slabs allow; the number re-encoded.

        Slabs are whole, so a state in between may need one more slab than there are even where the goal does not. Pages
        are therefore moved in waves that each end in a state that fits.
        """
        before = self.arena.formats[pages].long()
        counts = torch.zeros(pages.numel() + 1, len(self.arena.counts), dtype=torch.int64)
        counts[0] = torch.tensor(self.arena.counts)
        rows = torch.arange(1, pages.numel() + 1)
        counts[rows, before] -= 1
        counts[rows, target] += 1
        ends = torch.nonzero(self.arena.plan.fitting(counts.cumsum(0))).squeeze(-1).tolist()
        done = 0
        for i, end in enumerate(ends):
            is_last = i + 1 == len(ends)
            if end > done and (is_last or ends[i + 1] - done > CODEC_BATCH_PAGES):
                self._reencode_wave(pages[done:end], before[done:end], target[done:end])
                done = end
        return done

    def _reencode_wave(self, pages: Tensor, before: Tensor, target: Tensor) -> None:
        formats = len(self.ladder.layouts)
        moves = before * formats + target
        wave = Wave(before, self.arena.offsets[pages], target, self.facts.reader[pages], self.facts.position[pages])
        packed = self._sealer.seal(self.arena.buffer, wave, self.samples)
        # Release before allocating: the place of the smaller form may be the one that is freed.
        self.arena.release(pages)
        for index, data in packed.items():
            where = pages[target == index]
            self.arena.allocate(where, index)
            self.arena.write_pages(index, where, data)
        names = self.ladder.names
        steps = torch.bincount(moves, minlength=formats**2).tolist()
        for step, count in enumerate(steps):
            if count:
                self.demotions_total[f"{names[step // formats]}->{names[step % formats]}"] += count
