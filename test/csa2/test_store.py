"""The page store against a dictionary: writing, sealing, demotion, and what pages hold afterwards."""

from dataclasses import dataclass

import pytest
import torch
from codec_bounds import entry_norm_bounds
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from csa2.capacity import ArenaPlan, plan_arena
from csa2.errors import ArenaFullError, IntegrityError
from csa2.formats import FP8, PLAIN, SMALL, UNMAPPED, FormatLadder, make_ladder, packing
from csa2.residency import PageFacts, demotion_steps
from csa2.store import CODEC_BATCH_PAGES, PageStore
from sgl_kernels.page_layout import PageGeometry
from sgl_kernels.paged_attention.plan import plan_pages
from sgl_kernels.paged_attention.reference import decode, plain_rows, write_plain

SIZE = 16
GEOMETRY = PageGeometry(2, 1, 32, SIZE, torch.bfloat16, (1,))
LADDER = make_ladder(GEOMETRY, "fp4")


def make_store(num_slabs: int = 5, slab_pages: int = 2, ladder: FormatLadder = LADDER, pages: int = 24) -> PageStore:
    slab = slab_pages * ladder.page_bytes[0]
    plan = ArenaPlan(slab, num_slabs, ladder.page_bytes, packing(slab, ladder.page_bytes))
    store = PageStore(ladder, plan, pages)
    store.arena.buffer[: plan.arena_bytes] = 0xFF  # NaN, wherever nobody has written
    store.shared_format = FP8
    return store


def some_tokens(n: int, seed: int) -> Tensor:
    """(n, 2, L, G, D) keys and values in the model dtype; now and then a token or a channel is a hundred times larger."""
    g = GEOMETRY
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, g.num_layers, g.num_kv_heads, g.head_dim, generator=random)
    x += torch.randn(1, 2, g.num_layers, g.num_kv_heads, g.head_dim, generator=random)
    if seed % 3 == 1 and n:
        x[seed % n] *= 100
    if seed % 3 == 2:
        x[..., seed % g.head_dim] *= 100
    return x.to(g.dtype)


def write(store: PageStore, page: int, first: int, tokens: Tensor) -> None:
    """Store (n, 2, L, G, D) `tokens` in slots `first`, ... of a page, as a forward pass does."""
    slots = torch.arange(first, first + len(tokens))
    store.record_writes(page * store.page_size + slots)
    layout = store.ladder.layouts[PLAIN]
    rows = plain_rows(store.arena.offsets[torch.full_like(slots, page)], slots, layout)
    for layer in range(layout.geometry.num_layers):
        write_plain(store.arena.buffer, rows, layout, layer, tokens[:, 0, layer], tokens[:, 1, layer])


def full_pages(store: PageStore, pages: list[int]) -> list[Tensor]:
    """Map and fill `pages`; their keys and values (2, L, G, S, D) in float64."""
    store.map_pages(torch.tensor(pages))
    contents = []
    for page in pages:
        tokens = some_tokens(SIZE, page)
        write(store, page, 0, tokens)
        contents.append(tokens.permute(1, 2, 3, 0, 4).double())
    return contents


def read_page(store: PageStore, page: int) -> Tensor:
    """(2, L, G, S, D) float64."""
    return torch.stack([x[0] for x in store.read(torch.tensor([page]))]).double()


def raw(store: PageStore, page: int) -> Tensor:
    return store.arena.read_pages(int(store.arena.formats[page]), torch.tensor([page]))[0]


def assert_near(store: PageStore, before: Tensor, after: Tensor, index: int) -> None:
    """`after` is `before` stored in format `index`, (2, L, G, S, D)."""
    bounds = entry_norm_bounds(before[:1], before[1:], store.ladder.layouts[index], store.basis)
    error = (after - before).norm(dim=-1)
    assert bool((error <= torch.cat(bounds)).all())


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
        counts, wanted = list(self.store.arena.counts), {}
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
        elif self.store.arena.plan.fits(counts):
            assert all(self.pages[page].format == SMALL for page in self.full())

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


def no_pages() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@pytest.mark.parametrize("index", [FP8, SMALL])
def test_a_sealed_page_reads_back_within_the_bound_of_its_format(index):
    store = make_store()
    store.shared_format = FP8
    contents = full_pages(store, [3, 9])
    store.facts.hits[torch.tensor([3, 9])] = 1 if index == FP8 else 0
    assert store.seal(torch.tensor([9, 3])) == 2
    for page, content in zip((3, 9), contents, strict=True):
        assert int(store.arena.formats[page]) == index
        assert_near(store, content, read_page(store, page), index)


def test_pages_of_all_formats_are_read_together():
    store = make_store()
    contents = full_pages(store, [1, 2, 3, 4])
    store.facts.hits[2], store.facts.first[4] = 1, True
    store.seal(torch.tensor([2, 3, 4]))
    assert store.arena.formats[1:5].tolist() == [PLAIN, FP8, SMALL, PLAIN]
    keys, values = store.read(torch.tensor([4, 3, 2, 1]))
    assert keys.shape == values.shape == (4, 2, 1, SIZE, 32)
    for row, page in enumerate((4, 3, 2, 1)):
        index = int(store.arena.formats[page])
        got = torch.stack((keys[row], values[row])).double()
        if index == PLAIN:
            assert torch.equal(got, contents[page - 1])
        else:
            assert_near(store, contents[page - 1], got, index)


def test_open_pages_are_not_sealed():
    store = make_store()
    store.map_pages(torch.tensor([1, 2]))
    write(store, 1, 0, some_tokens(SIZE - 1, 1))
    assert store.seal(torch.tensor([1, 2])) == 0
    assert store.arena.formats[1:3].tolist() == [PLAIN, PLAIN]


def test_more_pages_than_a_codec_batch_are_sealed():
    n = 2 * CODEC_BATCH_PAGES + 3
    store = make_store(num_slabs=n, slab_pages=1, pages=n + 2)
    contents = full_pages(store, list(range(1, n + 1)))
    assert store.seal(torch.arange(1, n + 1)) == n
    assert store.arena.counts == [0, 0, n]
    assert store.demotions_total == {"bf16->fp8": 0, "bf16->fp4": n, "fp8->fp4": 0}
    for page, content in enumerate(contents, 1):
        assert_near(store, content, read_page(store, page), SMALL)


def test_a_full_arena_is_sealed_through_states_that_fit():
    """No slab is free: the pages of whole slabs must leave together before the first smaller one finds a place."""
    store = make_store(num_slabs=4, slab_pages=4, pages=20)
    contents = full_pages(store, list(range(1, 17)))
    assert store.arena.used_slabs() == 4
    assert store.seal(torch.arange(1, 17)) == 16
    assert store.arena.counts == [0, 0, 16]
    store.check_integrity()
    for page, content in enumerate(contents, 1):
        assert_near(store, content, read_page(store, page), SMALL)


def test_pages_that_find_no_room_stay_plain():
    """One page of a slab of open pages: its small form would need a slab that is not there."""
    store = make_store(num_slabs=4, slab_pages=2)
    store.map_pages(torch.arange(1, 9))
    write(store, 1, 0, some_tokens(SIZE, 1))
    content = read_page(store, 1)
    assert store.seal(torch.tensor([1])) == 0
    assert int(store.arena.formats[1]) == PLAIN
    assert torch.equal(read_page(store, 1), content)
    assert not store.make_room(1, no_pages)
    store.check_integrity()


def test_make_room_takes_the_page_used_longest_ago_first_and_no_more_than_it_must():
    store = make_store(num_slabs=4, slab_pages=2)
    full_pages(store, list(range(1, 9)))
    store.facts.last_use[1:9] = torch.tensor([5, 3, 8, 1, 7, 2, 6, 4])
    # Of two plain pages a slab: three must go before what is left, and one more, fill three slabs beside the small ones.
    assert store.make_room(1, no_pages)
    assert [page for page in range(1, 9) if int(store.arena.formats[page]) == SMALL] == [2, 4, 6]
    assert store.demotions_total["bf16->fp4"] == 3
    assert store.make_room(2, no_pages)
    assert store.arena.counts == [4, 0, 4]


def test_hot_pages_go_last():
    store = make_store(num_slabs=4, slab_pages=2)
    full_pages(store, list(range(1, 9)))
    hot = torch.tensor([1, 2, 3])
    assert store.make_room(2, lambda: hot)
    assert store.arena.formats[1:4].tolist() == [PLAIN] * 3
    store.map_pages(torch.tensor([20, 21]))
    assert not store.make_room(6, lambda: hot)
    assert store.arena.formats[1:9].tolist() == [SMALL] * 8


def test_a_page_on_its_way_through_two_rungs_is_counted_once():
    store = make_store(num_slabs=4, slab_pages=2)
    full_pages(store, list(range(1, 9)))
    store.facts.first[1:9] = True
    assert store.make_room(4, no_pages)
    assert sum(store.demotions_total.values()) == sum(index != PLAIN for index in store.arena.formats[1:9].tolist())
    assert store.demotions_total["fp8->fp4"] == 0


def test_fp8_pages_go_to_4_bits_from_what_they_hold():
    store = make_store(num_slabs=4, slab_pages=2)
    contents = full_pages(store, [1, 2, 3])
    store.facts.hits[1:4] = 1
    store.seal(torch.tensor([1, 2, 3]))
    held = [read_page(store, page) for page in (1, 2, 3)]
    store.map_pages(torch.arange(10, 16))
    assert store.make_room(0, no_pages)
    assert not store.make_room(1, no_pages)
    assert store.demotions_total == {"bf16->fp8": 3, "bf16->fp4": 0, "fp8->fp4": 3}
    for page, first, second in zip((1, 2, 3), contents, held, strict=True):
        assert_near(store, first, second, FP8)
        assert_near(store, second, read_page(store, page), SMALL)


def test_cold_pages_are_full_plain_and_old():
    store = make_store()
    full_pages(store, [1, 2, 3, 4])
    store.map_pages(torch.tensor([5]))
    store.facts.last_use[1:6] = torch.tensor([0, 10, 4, 0, 0])
    store.seal(torch.tensor([4]))
    store.clock = 14
    assert store.cold_pages(10).tolist() == [1]
    assert store.cold_pages(9).tolist() == [1, 3]
    assert store.cold_pages(14).tolist() == []


def test_mapping_notes_the_time_and_forgets_the_former_owner():
    store = make_store()
    full_pages(store, [1])
    store.facts.hits[1], store.facts.first[1] = 4, True
    store.unmap_pages(torch.tensor([1]))
    store.clock = 7
    store.map_pages(torch.tensor([1]))
    fresh = PageFacts.empty(2)
    assert int(store.facts.last_use[1]) == 7
    assert int(store.facts.hits[1]) == int(fresh.hits[1])
    assert not store.facts.first[1]
    assert int(store.facts.written[1]) == 0


def test_nan_of_a_former_owner_does_not_reach_a_partly_written_page():
    """Stale NaN times a zero weight is NaN: a page is read as a whole, so it must be mapped clean."""
    ladder = make_ladder(PageGeometry(2, 1, 32, 64, torch.bfloat16, (1,)), "fp4")
    store = PageStore(ladder, plan_arena(8 * ladder.page_bytes[0], ladder.page_bytes), 10)
    store.arena.buffer[: store.arena.plan.arena_bytes] = 0xFF
    store.map_pages(torch.arange(1, 9))
    store.arena.write_pages(PLAIN, torch.arange(1, 9), torch.full((8, ladder.page_bytes[0]), 0xFF, dtype=torch.uint8))
    store.unmap_pages(torch.arange(1, 9))
    store.map_pages(torch.tensor([4]))
    tokens = some_tokens(3, 0)
    write(store, 4, 0, tokens)
    arena = store.arena
    plan = plan_pages(torch.tensor([[4]]), torch.tensor([3]), arena.formats, arena.offsets, ladder.layouts, 64)
    query = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(0))
    for layer in (0, 1):
        out = decode(query, arena.buffer, plan, layer, 1.0, store.basis)
        keys, values = tokens[:, 0, layer, 0].float(), tokens[:, 1, layer, 0].float()
        assert torch.allclose(out[0], torch.softmax(query[0] @ keys.T, -1) @ values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("written", {2: SIZE - 1}, "a compressed page is not full"),
        ("written", {1: SIZE + 1}, "a page has more writes than slots"),
        ("written", {7: 1}, "an unmapped page has writes"),
    ],
)
def test_damage_is_found(name, damage, message):
    store = make_store()
    full_pages(store, [1, 2])
    store.seal(torch.tensor([2]))
    store.check_integrity()
    for page, value in damage.items():
        getattr(store.facts, name)[page] = value
    with pytest.raises(IntegrityError, match=message):
        store.check_integrity()
