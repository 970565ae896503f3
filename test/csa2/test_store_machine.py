"""The page store against a dictionary: whatever is written, sealed, demoted and given back."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from page_stores import (
    LADDERS,
    SIZE,
    Content,
    assert_near,
    assert_same,
    entries_of,
    make_store,
    raw,
    read_page,
    some_tokens,
    write,
)
from torch import Tensor

from csa2.controller import Mix, deal
from csa2.errors import ArenaFullError, IntegrityError
from csa2.facts import NO_CAP, Usage
from csa2.formats import PLAIN, UNMAPPED, FormatLadder
from csa2.residency import DemotionRound, demotion_steps


@dataclass
class Page:
    """What the model knows of a mapped page."""

    format: int
    written: int
    content: Content
    """As last written or read."""
    bytes: Tensor


class StoreMachine(RuleBasedStateMachine):
    """Pages are written, sealed, demoted and given back; after each step nothing has changed that must not."""

    LADDER: FormatLadder

    def __init__(self) -> None:
        super().__init__()
        self.store = make_store(ladder=self.LADDER)
        self.pages: dict[int, Page] = {}
        self.demotions = dict.fromkeys(self.store.demotions_total, 0)
        self.seed = 0

    def free(self) -> list[int]:
        return [page for page in range(1, 24) if page not in self.pages]

    def some_pages(self, data) -> list[int]:
        """Often all of them: a subset drawn page by page is rarely large."""
        known = sorted(self.pages)
        if not known or data.draw(st.booleans()):
            return known
        return data.draw(st.lists(st.sampled_from(known), unique=True))

    def plain(self, n: int) -> list[int]:
        """`n` plain pages and none of the others."""
        return [n, *[0] * self.LADDER.end]

    def draw_roles(self, data) -> None:
        """Formats of shared and of old pages: any that an option can name."""
        formats = range(self.LADDER.end + 1)
        shared = data.draw(st.sampled_from([None, *formats]), label="shared")
        tail = data.draw(st.sampled_from([*formats, self.LADDER.end]), label="tail")
        self.store.ladder = replace(self.LADDER, shared=shared, tail=tail)
        smaller = data.draw(st.sampled_from([tail, *range(tail, self.LADDER.end + 1)]), label="mixed with")
        self.store.tail = Mix(tail, smaller, data.draw(st.sampled_from([0.3, 1.0])))

    def role(self, page: int, *, old: bool, roomy: bool) -> int:
        """The format of a sealed page, as the rules say it."""
        ladder, facts = self.store.ladder, self.store.facts
        if facts.first[page]:
            return PLAIN
        if (facts.hits[page] > 0 or facts.pinned[page]) and ladder.shared is not None:
            return ladder.shared
        tail = int(deal(self.store.tail, facts.depth[[page]]))
        private = min(tail if old or tail < ladder.warm else ladder.warm, max(ladder.warm, int(facts.cap[page])))
        waits = roomy and facts.prompt[page] and ladder.shared is not None
        return min(private, ladder.shared) if waits else private

    def used(self, data) -> Usage:
        """Some pages in hot windows, some in warm ones, some read beyond."""
        pages = torch.tensor(self.some_pages(data), dtype=torch.int64)
        hot, warm = (
            torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(pages), max_size=len(pages)))).bool() for _ in "ab"
        )
        return Usage.of(pages, hot, warm, 24)

    def full(self) -> list[int]:
        return [page for page, known in self.pages.items() if known.written == SIZE]

    def map_some(self, pages: list[int]) -> None:
        self.store.map_pages(torch.tensor(pages, dtype=torch.int64))
        for page in pages:
            nothing = torch.zeros(2, 2, SIZE, 32, dtype=torch.float64)
            self.pages[page] = Page(PLAIN, 0, Content(nothing), raw(self.store, page))
            assert not self.pages[page].bytes.any()

    def note_changes(self, may_change: list[int]) -> None:
        """Compare every page with what is known; only full pages of `may_change` may have gone down the ladder, and the
        first ones of a sequence no further than they are guarded."""
        names = self.store.ladder.names
        for page, known in self.pages.items():
            index = int(self.store.arena.formats[page])
            if index == known.format:
                assert torch.equal(raw(self.store, page), known.bytes)
                continue
            assert page in may_change
            assert known.written == SIZE
            assert index > known.format
            assert index <= self.LADDER.guard or not self.store.facts.first[page]
            content = read_page(self.store, page)
            assert_near(self.store, known.content, content, index, int(self.store.facts.reader[page]))
            self.demotions[f"{names[known.format]}->{names[index]}"] += 1
            self.pages[page] = Page(index, SIZE, content, raw(self.store, page))

    @rule(data=st.data(), n=st.integers(1, 6))
    def map(self, data, n):
        pages = data.draw(st.permutations(self.free()))[:n]
        if self.store.arena.fits(self.plain(len(pages))):
            self.map_some(pages)
        else:
            with pytest.raises(ArenaFullError):
                self.store.map_pages(torch.tensor(pages))
        self.note_changes([])

    def write_some(self, page: int, n: int) -> None:
        known = self.pages[page]
        n = min(n, SIZE - known.written)
        self.seed += 1
        tokens = some_tokens(n, self.seed)
        write(self.store, page, known.written, tokens)
        known.content.entries[:, :, known.written : known.written + n] = entries_of(tokens)
        known.written += n
        known.bytes = raw(self.store, page)
        assert_same(read_page(self.store, page), known.content)

    @rule(data=st.data(), n=st.integers(1, SIZE))
    @precondition(lambda self: any(known.written < SIZE for known in self.pages.values()))
    def write(self, data, n):
        self.write_some(data.draw(st.sampled_from([p for p, known in self.pages.items() if known.written < SIZE])), n)
        self.note_changes([])

    @rule(n=st.integers(1, 10), last=st.integers(1, SIZE))
    def prefill(self, n, last):
        """Map and fill as many of `n` pages as fit, the last one with `last` tokens."""
        pages = self.free()[:n]
        while not self.store.arena.fits(self.plain(len(pages))):
            pages.pop()
        self.map_some(pages)
        for page in pages:
            self.write_some(page, last if page == pages[-1] else SIZE)
        self.note_changes([])

    @rule(data=st.data(), page=st.integers(1, 23), slot=st.integers(0, SIZE - 1))
    def write_where_one_must_not(self, data, page, slot):
        """Sealed and unmapped pages refuse; the padding page takes anything and stays empty."""
        state = self.pages[page].format if page in self.pages else UNMAPPED
        self.store.record_writes(torch.tensor([slot, slot]))
        if state != PLAIN:
            what = "an unmapped" if state == UNMAPPED else f"a {self.store.ladder.names[state]}"
            with pytest.raises(IntegrityError, match=f"^write to {what} page {page}: only plain pages take new tokens$"):
                self.store.record_writes(torch.tensor([slot, page * SIZE + slot]))
        self.note_changes([])

    @rule(
        data=st.data(),
        hits=st.integers(0, 3),
        first=st.booleans(),
        prompt=st.booleans(),
        pinned=st.sampled_from([False, False, True]),
        cap=st.sampled_from([NO_CAP, NO_CAP, 2]),
    )
    @precondition(lambda self: self.pages)
    def learn(self, data, hits, first, prompt, pinned, cap):
        pages = torch.tensor(data.draw(st.lists(st.sampled_from(sorted(self.pages)), unique=True)), dtype=torch.int64)
        self.store.facts.hits[pages] = hits
        self.store.facts.first[pages] = first
        self.store.facts.prompt[pages] = prompt
        self.store.pin(pages, pinned=pinned)
        self.store.facts.cap[pages] = cap
        self.store.clock += 1
        depth = pages * 7 % 5
        self.store.touch(pages, torch.full_like(pages, data.draw(st.integers(0, 3), label="slot")), depth)
        assert torch.equal(self.store.facts.depth[pages].long(), depth)

    @rule(slot=st.integers(0, 3), tokens=st.sampled_from([1, 3, 16, 40]), seed=st.integers(0, 99))
    def ask(self, slot, tokens, seed):
        """A request asks queries, by which the entries of the pages that it read last are weighted."""
        queries = torch.randn(2, tokens, 3, 32, generator=torch.Generator().manual_seed(seed))
        for layer, of_layer in enumerate(queries):
            self.store.samples.record_extend(slot, layer, of_layer, 0.2)
            self.store.samples.record_decode(slot, layer, of_layer[0], 0.2, 64 * seed)
        self.note_changes([])

    @rule(data=st.data())
    @precondition(lambda self: self.pages)
    def seal(self, data):
        self.draw_roles(data)
        chosen, old = self.some_pages(data), data.draw(st.lists(st.sampled_from(sorted(self.pages)), unique=True))
        roomy = data.draw(st.booleans(), label="roomy")
        goal = {page: self.role(page, old=page in old, roomy=roomy) for page in {*chosen, *old} & {*self.full()}}
        goal = {page: index for page, index in goal.items() if index > self.pages[page].format}
        before = {page: self.pages[page].format for page in goal}
        count = sum(self.demotions.values())
        sealed = self.store.seal(
            torch.tensor([*chosen, *chosen[:2]], dtype=torch.int64), torch.tensor(old, dtype=torch.int64), roomy=roomy
        )
        self.note_changes(list(goal))
        assert sum(self.demotions.values()) - count == sealed
        for page, index in goal.items():
            # To the format of its role or, for want of room, nowhere.
            assert self.pages[page].format in (before[page], index)

    @rule(data=st.data(), wanted=st.sampled_from([1, 20000, 10**9]), most=st.integers(1, 6))
    @precondition(lambda self: self.pages)
    def relieve(self, data, wanted, most):
        """Only pages in use and outside hot windows move, to their role, and no more than asked for."""
        self.draw_roles(data)
        usage = self.used(data)
        may = {
            page: self.role(page, old=not usage.warm[page], roomy=False)
            for page in self.full()
            if usage.users[page] and not usage.hot[page]
        }
        before, sizes = {page: self.pages[page].format for page in may}, self.LADDER.page_bytes
        done = self.store.relieve(usage, wanted, most)
        self.note_changes(list(may))
        moved = [page for page in may if self.pages[page].format != before[page]]
        assert done == len(moved) <= most
        assert all(self.pages[page].format == may[page] for page in moved)
        freed = sorted(sizes[before[page]] - sizes[may[page]] for page in moved)
        assert sum(freed[1:]) < wanted or not freed

    @rule(data=st.data(), n=st.sampled_from([0, 1, 1, 2, 2, 3, 4, 6, 11]), upto=st.sampled_from(list(DemotionRound)))
    def make_room(self, data, n, upto):
        self.draw_roles(data)
        usage = self.used(data)
        store, plan = self.store, self.store.arena.plan
        tail = max(store.tail.larger, store.tail.smaller)
        steps = demotion_steps(store.facts, store.arena.formats, usage, SIZE, store.ladder, store.turnover, tail, upto=upto)
        before = list(store.arena.counts)
        counts, wanted = list(before), {}
        fits = enough = plan.fits([counts[0] + n, *counts[1:]])
        for page, source, target in zip(*(x.tolist() for x in (steps.pages, steps.source, steps.target)), strict=True):
            if enough:
                break
            counts[source] -= 1
            counts[target] += 1
            wanted[page] = target
            enough = plan.fits([counts[0] + n, *counts[1:]])
        asked = []
        assert store.make_room(n, lambda: asked.append(1) or usage, upto) == enough
        assert len(asked) == (not fits)
        if upto < DemotionRound.HOT:
            self.note_changes([page for page in self.full() if not usage.hot[page] or self.pages[page].format > PLAIN])
        self.note_changes(self.full())
        if enough:
            # As few steps as it takes, in their order.
            assert all(self.pages[page].format == target for page, target in wanted.items())
            assert self.demotions == store.demotions_total
            if n <= len(self.free()):
                self.map_some(self.free()[:n])
                self.note_changes([])
        else:
            # Falling short never leaves less room than there was.
            now = store.arena.counts
            assert plan.slabs_needed([now[0] + n, *now[1:]]) <= plan.slabs_needed([before[0] + n, *before[1:]])

    @rule(data=st.data())
    @precondition(lambda self: self.pages)
    def unmap(self, data):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.pages)), unique=True, max_size=3))
        self.store.unmap_pages(torch.tensor(pages, dtype=torch.int64))
        for page in pages:
            del self.pages[page]
        self.note_changes([])

    @rule()
    @precondition(lambda self: len(self.pages) > 14)
    def clear(self):
        self.store.clear()
        self.pages.clear()

    @invariant()
    def adds_up(self):
        store = self.store
        store.check_integrity()
        assert store.mapped_pages == len(self.pages)
        shared = {page for page in self.pages if store.facts.hits[page] > 0 or store.facts.pinned[page]}
        live = sum(self.LADDER.page_bytes[self.pages[page].format] for page in shared)
        assert store.live_bytes(Usage.nobody(24)) == live
        assert store.open_pages == sum(known.written < SIZE for known in self.pages.values())
        assert store.demotions_total == self.demotions
        guarded = [page for page in self.pages if store.facts.first[page]]
        assert store.guarded_pages == (len(guarded) if self.LADDER.guard < self.LADDER.end else 0)
        for page in range(1, 24):
            known = self.pages.get(page)
            assert int(store.arena.formats[page]) == (known.format if known else UNMAPPED)
            assert int(store.facts.written[page]) == (known.written if known else 0)


@pytest.mark.parametrize(
    ("tail", "examples"), [("fp4", 40), ("k8v4", 15), ("csa2-2x", 15), ("csa2-4x", 30), ("csa2-8x", 30)]
)
def test_the_store_does_what_the_dictionary_says(tail, examples):
    machine = type("Machine", (StoreMachine,), {"LADDER": LADDERS[tail]})
    fixed = settings(derandomize=True, deadline=None, max_examples=examples, stateful_step_count=30)
    run_state_machine_as_test(machine, settings=fixed)
