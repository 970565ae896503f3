"""The page store against a dictionary: whatever is written, sealed, demoted and given back."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from page_stores import SIZE, assert_near, make_store, raw, read_page, some_tokens, write
from torch import Tensor

from csa2.errors import ArenaFullError, IntegrityError
from csa2.formats import FP8, PLAIN, SMALL, UNMAPPED
from csa2.residency import demotion_steps


@dataclass
class Page:
    """What the model knows of a mapped page."""

    format: int
    written: int
    content: Tensor
    """As last written or read."""
    bytes: Tensor


class StoreMachine(RuleBasedStateMachine):
    """Pages are written, sealed, demoted and given back; after each step nothing has changed that must not."""

    def __init__(self) -> None:
        super().__init__()
        self.store = make_store()
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

    def full(self) -> list[int]:
        return [page for page, known in self.pages.items() if known.written == SIZE]

    def map_some(self, pages: list[int]) -> None:
        self.store.map_pages(torch.tensor(pages, dtype=torch.int64))
        for page in pages:
            nothing = torch.zeros(2, 2, 1, SIZE, 32, dtype=torch.float64)
            self.pages[page] = Page(PLAIN, 0, nothing, raw(self.store, page))
            assert not self.pages[page].bytes.any()

    def note_changes(self, may_change: list[int]) -> None:
        """Compare every page with what is known; only full pages of `may_change` may have gone down the ladder."""
        names = self.store.ladder.names
        for page, known in self.pages.items():
            index = int(self.store.arena.formats[page])
            if index == known.format:
                assert torch.equal(raw(self.store, page), known.bytes)
                continue
            assert page in may_change
            assert known.written == SIZE
            assert index > known.format
            content = read_page(self.store, page)
            assert_near(self.store, known.content, content, index)
            self.demotions[f"{names[known.format]}->{names[index]}"] += 1
            self.pages[page] = Page(index, SIZE, content, raw(self.store, page))

    @rule(data=st.data(), n=st.integers(1, 6))
    def map(self, data, n):
        pages = data.draw(st.permutations(self.free()))[:n]
        if self.store.arena.fits([len(pages), 0, 0]):
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
        known.content[:, :, :, known.written : known.written + n] = tokens.permute(1, 2, 3, 0, 4)
        known.written += n
        known.bytes = raw(self.store, page)
        assert torch.equal(read_page(self.store, page), known.content)

    @rule(data=st.data(), n=st.integers(1, SIZE))
    @precondition(lambda self: any(known.written < SIZE for known in self.pages.values()))
    def write(self, data, n):
        self.write_some(data.draw(st.sampled_from([p for p, known in self.pages.items() if known.written < SIZE])), n)
        self.note_changes([])

    @rule(n=st.integers(1, 10), last=st.integers(1, SIZE))
    def prefill(self, n, last):
        """Map and fill as many of `n` pages as fit, the last one with `last` tokens."""
        pages = self.free()[:n]
        while not self.store.arena.fits([len(pages), 0, 0]):
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

    @rule(data=st.data(), hits=st.integers(0, 3), first=st.booleans())
    @precondition(lambda self: self.pages)
    def learn(self, data, hits, first):
        pages = torch.tensor(data.draw(st.lists(st.sampled_from(sorted(self.pages)), unique=True)), dtype=torch.int64)
        self.store.facts.hits[pages] = hits
        self.store.facts.first[pages] = first
        self.store.clock += 1
        self.store.touch(pages)

    @rule(data=st.data(), shared=st.sampled_from([PLAIN, FP8, SMALL]))
    @precondition(lambda self: self.pages)
    def seal(self, data, shared):
        self.store.shared_format = shared
        chosen = self.some_pages(data)
        hits, first = self.store.facts.hits, self.store.facts.first
        goal = {
            page: PLAIN if first[page] else shared if hits[page] > 0 else SMALL
            for page in chosen
            if self.pages[page].format == PLAIN and self.pages[page].written == SIZE
        }
        before = sum(self.demotions.values())
        sealed = self.store.seal(torch.tensor([*chosen, *chosen[:2]], dtype=torch.int64))
        self.note_changes(list(goal))
        assert sum(self.demotions.values()) - before == sealed
        for page, index in goal.items():
            # To the format of its role or, for want of room, nowhere.
            assert self.pages[page].format in (PLAIN, index)

    @rule(data=st.data(), n=st.sampled_from([0, 1, 1, 2, 2, 3, 4, 6, 11]), shared=st.sampled_from([PLAIN, FP8, SMALL]))
    def make_room(self, data, n, shared):
        self.store.shared_format = shared
        hot = torch.tensor(self.some_pages(data), dtype=torch.int64)
        steps = demotion_steps(self.store.facts, self.store.arena.formats, hot, SIZE, shared)
        before = list(self.store.arena.counts)
        counts, wanted = list(before), {}
        fits = enough = self.store.arena.plan.fits([counts[0] + n, *counts[1:]])
        for page, source, target in zip(*(x.tolist() for x in (steps.pages, steps.source, steps.target)), strict=True):
            if enough:
                break
            counts[source] -= 1
            counts[target] += 1
            wanted[page] = target
            enough = self.store.arena.plan.fits([counts[0] + n, *counts[1:]])
        asked = []
        assert self.store.make_room(n, lambda: asked.append(1) or hot) == enough
        assert len(asked) == (not fits)
        self.note_changes(self.full())
        if enough:
            # As few steps as it takes, in their order.
            assert all(self.pages[page].format == target for page, target in wanted.items())
            assert self.demotions == self.store.demotions_total
            if n <= len(self.free()):
                self.map_some(self.free()[:n])
                self.note_changes([])
        else:
            # Falling short never leaves less room than there was.
            plan, now = self.store.arena.plan, self.store.arena.counts
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
        assert store.open_pages == sum(known.written < SIZE for known in self.pages.values())
        assert store.demotions_total == self.demotions
        for page in range(1, 24):
            known = self.pages.get(page)
            assert int(store.arena.formats[page]) == (known.format if known else UNMAPPED)
            assert int(store.facts.written[page]) == (known.written if known else 0)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(derandomize=True, deadline=None, max_examples=60, stateful_step_count=30)
