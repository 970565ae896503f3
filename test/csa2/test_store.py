"""The page store: roles, demotion under pressure, the codec in batches, and what is refused."""

import pytest
import torch
from page_stores import (
    CODEC,
    LADDERS,
    SIZE,
    SMALL,
    Content,
    assert_near,
    assert_same,
    full_pages,
    hot,
    idle,
    make_store,
    read_page,
    some_tokens,
    write,
)
from torch import Tensor

from csa2.capacity import plan_arena
from csa2.controller import Mix
from csa2.errors import IntegrityError
from csa2.facts import PageFacts
from csa2.formats import FP8, PLAIN, make_ladder
from csa2.store import CODEC_BATCH_PAGES, PageStore
from sgl_kernels.page_layout import PageGeometry
from sgl_kernels.paged_attention.plan import plan_pages
from sgl_kernels.paged_attention.reference import decode


def no_pages() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@pytest.mark.parametrize("index", [FP8, SMALL])
def test_a_sealed_page_reads_back_within_the_bound_of_its_format(index):
    store = make_store()
    contents = full_pages(store, [3, 9])
    store.facts.hits[torch.tensor([3, 9])] = 1 if index == FP8 else 0
    assert store.seal(torch.tensor([9, 3])) == 2
    for page, content in zip((3, 9), contents, strict=True):
        assert int(store.arena.formats[page]) == index
        assert_near(store, content, read_page(store, page), index)


@pytest.mark.parametrize("tail", LADDERS)
def test_pages_of_one_format_are_read_together(tail):
    """In the order asked for, and as each alone."""
    ladder = LADDERS[tail]
    store = make_store(num_slabs=12, ladder=ladder)
    for index in range(len(ladder.layouts)):
        pages = [3 * index + 1, 3 * index + 2]
        contents = full_pages(store, pages)
        store.tail = Mix(index, index)
        assert store.seal(no_pages(), torch.tensor(pages)) == (2 if index else 0)
        entries = store.read(torch.tensor(pages[::-1]))
        layout = ladder.layouts[index]
        assert entries.keys.shape == entries.values.shape == (2, 2, layout.entries, 32)
        assert (entries.bias is None) == (not layout.is_merged)
        for row, page in enumerate(pages[::-1]):
            bias = None if entries.bias is None else entries.bias[row].double()
            got = Content(torch.stack((entries.keys[row], entries.values[row])).double(), bias)
            if index == PLAIN:
                assert_same(contents[1 - row], got)
            else:
                assert_near(store, contents[1 - row], got, index)
                alone = read_page(store, page)
                # Products of another shape may be added up in another order.
                assert torch.allclose(got.entries, alone.entries, rtol=1e-5, atol=1e-4)


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
    assert_same(read_page(store, 1), content)
    assert not store.make_room(1, lambda: idle(store))
    store.check_integrity()


def test_make_room_takes_the_page_used_longest_ago_first_and_no_more_than_it_must():
    store = make_store(num_slabs=4, slab_pages=2)
    full_pages(store, list(range(1, 9)))
    store.facts.last_use[1:9] = torch.tensor([5, 3, 8, 1, 7, 2, 6, 4])
    # Of two plain pages a slab: three must go before what is left, and one more, fill three slabs beside the small ones.
    assert store.make_room(1, lambda: idle(store))
    assert [page for page in range(1, 9) if int(store.arena.formats[page]) == SMALL] == [2, 4, 6]
    assert store.demotions_total["bf16->fp4"] == 3
    assert store.make_room(2, lambda: idle(store))
    assert store.arena.counts == [4, 0, 4]


def test_hot_pages_go_last():
    store = make_store(num_slabs=4, slab_pages=2)
    full_pages(store, list(range(1, 9)))
    usage = hot(store, torch.tensor([1, 2, 3]))
    assert store.make_room(2, lambda: usage)
    assert store.arena.formats[1:4].tolist() == [PLAIN] * 3
    store.map_pages(torch.tensor([20, 21]))
    assert not store.make_room(6, lambda: usage)
    assert store.arena.formats[1:9].tolist() == [SMALL] * 8


def test_a_page_on_its_way_through_two_rungs_is_counted_once():
    store = make_store(num_slabs=4, slab_pages=2)
    full_pages(store, list(range(1, 9)))
    store.facts.first[1:9] = True
    assert store.make_room(4, lambda: idle(store))
    assert sum(store.demotions_total.values()) == sum(index != PLAIN for index in store.arena.formats[1:9].tolist())
    assert store.demotions_total["fp8->fp4"] == 0


def test_fp8_pages_go_to_4_bits_from_what_they_hold():
    store = make_store(num_slabs=4, slab_pages=2)
    contents = full_pages(store, [1, 2, 3])
    store.facts.hits[1:4] = 1
    store.seal(torch.tensor([1, 2, 3]))
    held = [read_page(store, page) for page in (1, 2, 3)]
    store.map_pages(torch.arange(10, 16))
    assert store.make_room(0, lambda: idle(store))
    assert not store.make_room(1, lambda: idle(store))
    assert store.demotions_total == {"bf16->fp8": 3, "bf16->fp4": 0, "fp8->fp4": 3}
    for page, first, second in zip((1, 2, 3), contents, held, strict=True):
        assert_near(store, first, second, FP8)
        assert_near(store, second, read_page(store, page), SMALL)


@pytest.mark.parametrize("tail", ["csa2-2x", "csa2-4x", "csa2-8x"])
def test_pages_behind_the_warm_window_go_to_the_tail(tail):
    """From what they hold by then, each by its role."""
    ladder = LADDERS[tail]
    store = make_store(num_slabs=8, ladder=ladder)
    contents = full_pages(store, [1, 2, 3, 4, 5])
    store.facts.hits[3], store.facts.first[4] = 1, True
    assert store.seal(torch.tensor([1, 2, 3, 4]), torch.tensor([2, 5])) == 4
    assert store.arena.formats[1:6].tolist() == [ladder.warm, ladder.tail, FP8, PLAIN, ladder.tail]
    for page in (1, 2, 3, 5):
        assert_near(store, contents[page - 1], read_page(store, page), int(store.arena.formats[page]))
    warm = read_page(store, 1)
    assert store.seal(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3, 4])) == 1
    assert store.arena.formats[1:5].tolist() == [ladder.tail, ladder.tail, FP8, PLAIN]
    assert_near(store, warm, read_page(store, 1), ladder.tail)
    store.check_integrity()


def test_a_page_that_became_smaller_keeps_what_it_has():
    """Bytes do not come back: neither its role nor a second seal makes a page larger."""
    store = make_store(num_slabs=8, ladder=LADDERS["csa2-4x"])
    full_pages(store, [1, 2])
    store.seal(no_pages(), torch.tensor([1, 2]))
    store.facts.hits[1], store.facts.first[2] = 1, True
    held = [read_page(store, page) for page in (1, 2)]
    assert store.seal(torch.tensor([1, 2]), torch.tensor([1, 2])) == 0
    for page, before in zip((1, 2), held, strict=True):
        assert_same(before, read_page(store, page))


@pytest.mark.parametrize("tail", LADDERS)
def test_pressure_stops_at_the_guard_for_first_pages_and_at_the_end_for_others(tail):
    ladder = LADDERS[tail]
    store = make_store(num_slabs=5, ladder=ladder)
    contents = full_pages(store, list(range(1, 9)))
    store.facts.first[torch.tensor([1, 5])] = True
    store.facts.hits[torch.tensor([5, 6])] = 1
    assert store.guarded_pages == (2 if ladder.guard != ladder.end else 0)
    assert not store.make_room(11, lambda: hot(store, torch.tensor([1, 2, 3])))
    # As far as it gets: everything at the end, or what needs no more slabs.
    goal = [ladder.guard, ladder.end, ladder.end, ladder.end] * 2
    assert store.arena.formats[1:9].tolist() == goal
    for page in range(1, 9):
        assert_near(store, contents[page - 1], read_page(store, page), goal[page - 1])
    store.unmap_pages(torch.tensor([1, 2]))
    assert store.guarded_pages == (1 if ladder.guard != ladder.end else 0)
    store.check_integrity()


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
    store = PageStore(ladder, plan_arena(8 * ladder.page_bytes[0], ladder.page_bytes), 10, CODEC)
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
        out = decode(query, arena.buffer, plan, layer, 1.0, store.codec.bases)
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


def test_pinned_pages_are_counted_with_the_first_ones_apart():
    store = make_store(num_slabs=12, ladder=LADDERS["csa2-8x"])
    pages = torch.tensor([1, 2, 3, 4])
    full_pages(store, pages.tolist())
    store.facts.first[torch.tensor([1, 4])] = True
    assert (store.pinned.sealed, store.pinned.guarded) == (0, 0)
    store.pin(pages[:3])
    assert (store.pinned.sealed, store.pinned.guarded, store.pinned.total) == (2, 1, 3)
    store.check_integrity()
    store.pin(pages[:2], pinned=False)
    assert store.pinned.total == 1
    store.unmap_pages(pages[2:])
    assert store.pinned.total == 0
    store.pin(pages[:1])
    assert store.pinned.total == 1
    store.facts.pinned[2] = True
    with pytest.raises(IntegrityError, match="pages are pinned"):
        store.check_integrity()
    store.clear()
    assert store.pinned.total == 0


def test_where_two_documents_ask_the_larger_format_counts():
    store = make_store(ladder=LADDERS["csa2-8x"])
    pages = torch.tensor([1, 2, 3])
    full_pages(store, pages.tolist())
    store.ask(pages[:2], SMALL)
    store.ask(pages[1:], FP8)
    store.ask(pages[1:2], SMALL)
    assert store.facts.asked[pages].tolist() == [SMALL, FP8, FP8]
