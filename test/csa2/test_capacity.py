"""What fits into an arena: against brute force and against a real arena."""

from itertools import product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from csa2.arena import Arena
from csa2.capacity import MIN_PLAIN_PAGES, ArenaPlan, plan_arena
from csa2.errors import OptionError
from csa2.formats import MERGE, even_heads, make_ladder, packing
from sgl_kernels.page_layout import KeyClass, PageGeometry

fixed = settings(derandomize=True, deadline=None, max_examples=200)


def make_plan(per_slab: tuple[int, ...], num_slabs: int, guard: int | None = None) -> ArenaPlan:
    """Plan with pages of 8-byte words: `per_slab[f]` pages of format f a slab."""
    slab = 64 * per_slab[0]
    page_bytes = tuple(slab // n // 8 * 8 for n in per_slab)
    return ArenaPlan(slab, num_slabs, page_bytes, per_slab, len(per_slab) - 1 if guard is None else guard)


@st.composite
def plans(draw):
    """Two to four formats, the first page of a sequence guarded at any but the plain one."""
    per_slab = [draw(st.integers(1, 3))]
    for _ in range(draw(st.integers(1, 3))):
        per_slab.append(per_slab[-1] + draw(st.integers(0, 3)))
    return make_plan(tuple(per_slab), draw(st.integers(1, 6)), draw(st.integers(1, len(per_slab) - 1)))


@st.composite
def plans_and_rows(draw, max_rows):
    """A plan and numbers of pages in each of its formats."""
    plan = draw(plans())
    most = (12, 16, 20, 24)
    row = st.tuples(*(st.integers(0, most[f]) for f in range(len(plan.page_bytes))))
    return plan, draw(st.lists(row, min_size=1, max_size=max_rows))


def some_split_holds(plan: ArenaPlan, wanted: tuple[int, ...]) -> bool:
    return any(
        sum(split) <= plan.num_slabs
        and all(slabs * per >= n for slabs, per, n in zip(split, plan.pages_per_slab, wanted, strict=True))
        for split in product(range(plan.num_slabs + 1), repeat=len(wanted))
    )


@fixed
@given(plans_and_rows(1))
def test_fits_is_what_trying_every_split_says(case):
    plan, (wanted,) = case
    assert plan.fits(wanted) == some_split_holds(plan, wanted)


@fixed
@given(plans_and_rows(8))
def test_the_tensor_forms_agree_with_fits(case):
    plan, rows = case
    expected = [plan.fits(row) for row in rows]
    table = torch.tensor(rows)
    assert plan.fitting(table).tolist() == expected
    assert plan.first_fit(table) == (expected.index(True) if True in expected else -1)


def test_the_tightest_row_is_the_last_that_needs_fewest_slabs():
    plan = make_plan((1, 2, 3), 2)
    table = torch.tensor([[3, 0, 0], [2, 0, 0], [1, 0, 2], [1, 1, 0]])
    needed = [plan.slabs_needed(row) for row in table.tolist()]
    assert plan.tightest(table) == max(i for i, n in enumerate(needed) if n == min(needed))


def test_first_fit_of_no_rows():
    assert make_plan((1, 2, 3), 2).first_fit(torch.empty(0, 3, dtype=torch.int64)) == -1


@settings(fixed, max_examples=60)
@given(plans_and_rows(1), st.randoms(use_true_random=False))
def test_what_fits_can_be_placed_in_any_order_and_nothing_else_can(case, random):
    plan, (wanted,) = case
    arena = Arena(plan, sum(wanted) + 2)
    order = [index for index, n in enumerate(wanted) for _ in range(n)]
    random.shuffle(order)
    placed = [0] * len(wanted)
    for page, index in enumerate(order, 1):
        one = [int(f == index) for f in range(len(wanted))]
        fits = some_split_holds(plan, tuple(a + b for a, b in zip(placed, one, strict=True)))
        assert arena.fits(one) == fits
        if fits:
            arena.allocate(torch.tensor([page]), index)
            placed[index] += 1
    arena.check_integrity()
    assert (placed == list(wanted)) == plan.fits(wanted)


def mix(plan: ArenaPlan, plain: int, small: int, guarded: int) -> tuple[int, ...]:
    """Pages of each format; where the guarded ones go as far as all others, they are among the small ones."""
    counts = [0] * len(plan.page_bytes)
    counts[0], counts[plan.end] = plain, small
    if plan.guard != plan.end:
        counts[plan.guard] = guarded
    return tuple(counts)


@fixed
@given(plans(), st.integers(0, 20), st.integers(0, 12))
def test_room_beside_plain_and_guarded_pages_is_exact(plan, plain, guarded):
    room = plan.small_room(plain, guarded)
    assume(plan.fits(mix(plan, plain, 0, guarded)))
    assert room >= 0
    assert plan.fits(mix(plan, plain, room, guarded))
    assert not plan.fits(mix(plan, plain, room + 1, guarded))


@fixed
@given(plans(), st.integers(0, 30), st.integers(0, 12))
def test_room_beside_small_and_guarded_pages_is_exact(plan, small, guarded):
    room = plan.plain_room(small, guarded)
    assume(plan.fits(mix(plan, 0, small, guarded)))
    assert room >= 0
    assert plan.fits(mix(plan, room, small, guarded))
    assert not plan.fits(mix(plan, room + 1, small, guarded))


@fixed
@given(plans(), st.integers(0, 60), st.integers(0, 12))
def test_room_is_negative_where_what_is_there_does_not_fit(plan, pages, guarded):
    assert (plan.small_room(pages, guarded) < 0) == (not plan.fits(mix(plan, pages, 0, guarded)))
    assert (plan.plain_room(pages, guarded) < 0) == (not plan.fits(mix(plan, 0, pages, guarded)))


@settings(fixed, max_examples=60)
@given(plans(), st.integers(0, 8), st.integers(0, 6), st.randoms(use_true_random=False))
def test_what_is_promised_can_be_placed(plan, plain, guarded, random):
    """Guarded pages and the pages that fit beside them, in an arena where many were placed and given back before."""
    room = plan.small_room(plain, guarded)
    assume(room >= 0)
    counts = mix(plan, plain, room, guarded)
    arena = Arena(plan, sum(counts) + plan.max_pages + 1)
    crowd = list(range(sum(counts) + 1, sum(counts) + plan.max_pages + 1))
    arena.allocate(torch.tensor(crowd), plan.end)
    random.shuffle(crowd)
    order = [index for index, n in enumerate(counts) for _ in range(n)]
    random.shuffle(order)
    for page, index in enumerate(order, 1):
        while not arena.fits([int(f == index) for f in range(len(counts))]):
            arena.release(torch.tensor([crowd.pop()]))
        arena.allocate(torch.tensor([page]), index)
    arena.check_integrity()
    if crowd:
        arena.release(torch.tensor(crowd))
    assert tuple(arena.counts) == counts


def test_max_pages_is_an_arena_of_the_smallest():
    plan = make_plan((2, 3, 7), 5)
    assert plan.max_pages == 35 == plan.small_room(0, 0) == plan.small_room(0, 9)
    assert plan.end == plan.guard == 2
    assert plan.arena_bytes == 5 * 128
    assert plan.fits((0, 0, 35))
    assert not plan.fits((0, 0, 36))


GEOMETRIES = [
    PageGeometry(30, 3, 64, 64, torch.bfloat16),
    PageGeometry(30, 3, 64, 64, torch.bfloat16, (0, 4)),
    PageGeometry(1, 1, 32, 64, torch.float32),
    PageGeometry(16, 8, 128, 64, torch.bfloat16),
    PageGeometry(2, 1, 80, 64, torch.float16),
    PageGeometry(3, 2, 256, 64, torch.bfloat16, (1,)),
]
CLASSES = (KeyClass("int4", 8), KeyClass("lloyd2", 16))
LADDERS = [
    make_ladder(
        g,
        "fp4",
        tail,
        reduced={tail: even_heads(tail, (CLASSES,) * (g.num_layers * g.num_kv_heads), g)} if tail in MERGE else {},
    )
    for g in GEOMETRIES
    for tail in (None, "k8v4", *MERGE)
]
PAGE_BYTES = [ladder.page_bytes for ladder in LADDERS]


@fixed
@given(st.sampled_from(PAGE_BYTES), st.integers(4, 5000), st.floats(0, 0.999))
def test_a_plan_is_made_of_whole_pages(page_bytes, pages, part):
    arena_bytes = int((pages + part) * page_bytes[0])
    plan = plan_arena(arena_bytes, page_bytes)
    assert plan.page_bytes == page_bytes
    assert plan.slab_bytes % page_bytes[0] == 0
    assert plan.pages_per_slab == packing(plan.slab_bytes, page_bytes)
    assert plan.pages_per_slab[0] * page_bytes[0] == plan.slab_bytes
    assert plan.num_slabs >= 4
    # Less than a slab is left over.
    assert plan.arena_bytes <= arena_bytes < plan.arena_bytes + plan.slab_bytes + page_bytes[0]
    assert list(plan.pages_per_slab) == sorted(plan.pages_per_slab)
    assert plan.guard == plan.end == len(page_bytes) - 1
    assert plan.max_pages >= plan.num_slabs * plan.pages_per_slab[0]


@fixed
@given(st.sampled_from(PAGE_BYTES), st.integers(4, 5000))
def test_a_plan_wastes_little(page_bytes, pages):
    """Its own goal: no other slab size keeps more coded pages when each format has a slab that is part-filled."""

    def kept(slab_pages: int) -> int:
        per_slab = packing(slab_pages * page_bytes[0], page_bytes)
        slabs = max(pages // slab_pages - len(page_bytes), 1)
        return slabs * sum(per_slab[1:])

    plan = plan_arena(pages * page_bytes[0], page_bytes)
    chosen = plan.pages_per_slab[0]
    sizes = range(1, min(32, pages // 4) + 1)
    assert chosen in sizes
    assert kept(chosen) == max(kept(size) for size in sizes)


@pytest.mark.parametrize("page_bytes", PAGE_BYTES, ids=str)
def test_more_bytes_keep_more_pages_beside_part_filled_slabs(page_bytes):
    """What the plan maximises grows with the arena; `max_pages` itself may step back by a slab of another size."""
    before = 0
    for pages in range(4, 400):
        plan = plan_arena(pages * page_bytes[0], page_bytes)
        kept = max(plan.num_slabs - len(page_bytes), 1) * sum(plan.pages_per_slab[1:])
        assert kept >= before
        before = kept


@pytest.mark.parametrize("page_bytes", PAGE_BYTES, ids=str)
def test_an_arena_below_four_pages_is_refused(page_bytes):
    smallest = MIN_PLAIN_PAGES * page_bytes[0]
    assert plan_arena(smallest, page_bytes).num_slabs == 4
    with pytest.raises(OptionError) as caught:
        plan_arena(smallest - 1, page_bytes)
    message = str(caught.value)
    assert message.startswith(f"an arena of {smallest - 1} bytes (")
    assert f"one page of tokens takes {page_bytes[0]} bytes and at least 4 are needed" in message
    assert message.endswith(f"Set --csa2-arena-size to {smallest} or more")
    assert "\n" not in message


@pytest.mark.parametrize("ladder", LADDERS, ids=lambda ladder: ladder.names[-1])
def test_a_plan_knows_how_far_first_pages_go(ladder):
    plan = plan_arena(100 * ladder.page_bytes[0], ladder.page_bytes, ladder.guard)
    assert plan.guard == ladder.guard
    assert plan.end == ladder.end
    assert (plan.guard == plan.end) == (ladder.names[-1] not in ("csa2-4x", "csa2-8x"))
