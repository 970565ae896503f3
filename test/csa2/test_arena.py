"""The arena against a dictionary: places, bytes, accounting, compaction."""

from itertools import product

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from csa2.arena import Arena
from csa2.capacity import ArenaPlan
from csa2.errors import ArenaFullError, IntegrityError

PAGE_BYTES = (64, 40, 24)
PLAN = ArenaPlan(slab_bytes=128, num_slabs=7, page_bytes=PAGE_BYTES, pages_per_slab=(2, 3, 5), guard=2)
PAGES = 48
FORMATS = range(3)


def room_for(counts: list[int], plan: ArenaPlan) -> bool:
    """Whether some way to give slabs to formats holds `counts`: every way is tried."""
    slabs = range(plan.num_slabs + 1)
    return any(
        sum(split) <= plan.num_slabs
        and all(n * per >= count for n, per, count in zip(split, plan.pages_per_slab, counts, strict=True))
        for split in product(slabs, repeat=len(counts))
    )


def state_of(arena: Arena) -> list[torch.Tensor]:
    """Everything an arena knows, copied."""
    numbers = torch.tensor([*arena.counts, arena.moved_pages_total])
    parts = (arena.buffer, arena.formats, arena.offsets, arena.slab_format, arena.slot_page, numbers)
    return [part.clone() for part in parts]


class ArenaMachine(RuleBasedStateMachine):
    """Pages come, change and go; a dictionary says what each holds."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(PLAN, PAGES)
        self.arena.buffer[: PLAN.arena_bytes] = 0xEE
        self.model: dict[int, tuple[int, bytes]] = {}

    def counts(self) -> list[int]:
        return [sum(index == f for index, _ in self.model.values()) for f in FORMATS]

    def fill(self, pages: list[int], index: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        data = torch.randint(0, 256, (len(pages), PAGE_BYTES[index]), generator=random).to(torch.uint8)
        self.arena.write_pages(index, torch.tensor(pages), data)
        for page, row in zip(pages, data, strict=True):
            self.model[page] = index, bytes(row.tolist())

    @rule(data=st.data(), index=st.sampled_from(FORMATS), n=st.integers(0, 12), seed=st.integers(0, 999))
    def allocate(self, data, index, n, seed):
        free = [page for page in range(1, PAGES) if page not in self.model]
        pages = data.draw(st.permutations(free))[:n]
        wanted = self.counts()
        wanted[index] += len(pages)
        before, places = state_of(self.arena), self.arena.offsets.clone()
        assert self.arena.fits([len(pages) if f == index else 0 for f in FORMATS]) == room_for(wanted, PLAN)
        if not room_for(wanted, PLAN):
            with pytest.raises(ArenaFullError, match=f"no room for {len(pages)} pages of {PAGE_BYTES[index]} bytes"):
                self.arena.allocate(torch.tensor(pages), index)
            assert all(torch.equal(x, y) for x, y in zip(before, state_of(self.arena), strict=True))
            return
        moved = self.arena.moved_pages_total
        self.arena.allocate(torch.tensor(pages, dtype=torch.int64), index)
        stayed = torch.tensor([*self.model, 0])
        changed = int((self.arena.offsets[stayed] != places[stayed]).sum())
        assert self.arena.moved_pages_total - moved == changed
        if pages:
            self.fill(pages, index, seed)

    @rule(data=st.data())
    @precondition(lambda self: self.model)
    def release(self, data):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True))
        self.arena.release(torch.tensor(pages, dtype=torch.int64))
        for page in pages:
            del self.model[page]

    @rule(data=st.data(), seed=st.integers(0, 999))
    @precondition(lambda self: self.model)
    def rewrite(self, data, seed):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True, min_size=1))
        for index in FORMATS:
            chosen = [page for page in pages if self.model[page][0] == index]
            if chosen:
                self.fill(chosen, index, seed)

    @rule(data=st.data())
    @precondition(lambda self: self.model)
    def zero(self, data):
        page = data.draw(st.sampled_from(sorted(self.model)))
        index = self.model[page][0]
        self.arena.zero_pages(index, torch.tensor([page]))
        self.model[page] = index, bytes(PAGE_BYTES[index])

    @rule()
    def clear(self):
        self.arena.clear()
        self.model.clear()

    @rule(added=st.lists(st.integers(-12, 12), min_size=3, max_size=3))
    def ask(self, added):
        have = self.counts()
        after = [max(0, n + more) for n, more in zip(have, added, strict=True)]
        more = [new - old for new, old in zip(after, have, strict=True)]
        assert self.arena.fits(more) == room_for(after, PLAN)

    @invariant()
    def adds_up(self):
        self.arena.check_integrity()
        assert self.arena.counts == self.counts()
        assert self.arena.used_slabs() <= PLAN.num_slabs
        assert int(self.arena.formats[0]) == 0
        assert int(self.arena.offsets[0]) == PLAN.arena_bytes
        mapped = (torch.nonzero(self.arena.formats[1:] >= 0).squeeze(-1) + 1).tolist()
        assert mapped == sorted(self.model)

    @invariant()
    def no_two_pages_overlap(self):
        owner = torch.zeros(PLAN.arena_bytes, dtype=torch.int64)
        for page, (index, _) in self.model.items():
            start = int(self.arena.offsets[page])
            place = owner[start : start + PAGE_BYTES[index]]
            assert place.numel() == PAGE_BYTES[index]
            assert not place.any()
            place.fill_(page)

    @invariant()
    def every_page_holds_its_bytes(self):
        for index in FORMATS:
            pages = sorted(page for page, (f, _) in self.model.items() if f == index)
            read = self.arena.read_pages(index, torch.tensor(pages, dtype=torch.int64))
            for page, row in zip(pages, read, strict=True):
                start = int(self.arena.offsets[page])
                assert bytes(row.tolist()) == self.model[page][1]
                assert torch.equal(row, self.arena.buffer[start : start + PAGE_BYTES[index]])


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(derandomize=True, deadline=None, max_examples=40, stateful_step_count=30)


def filled(*spec: tuple[int, int]) -> tuple[Arena, list[torch.Tensor]]:
    """An arena with `n` pages of each (format, n), numbered from 1; each page holds its own number."""
    arena, groups, first = Arena(PLAN, PAGES), [], 1
    for index, n in spec:
        pages = torch.arange(first, first + n)
        arena.allocate(pages, index)
        arena.write_pages(index, pages, pages.to(torch.uint8)[:, None].expand(n, PAGE_BYTES[index]).contiguous())
        groups.append(pages)
        first += n
    return arena, groups


def test_pages_of_one_call_are_neighbours():
    arena, (pages,) = filled((0, 6))
    assert arena.offsets[pages].tolist() == [0, 64, 128, 192, 256, 320]
    arena, (pages,) = filled((2, 6))
    assert arena.offsets[pages].tolist() == [0, 24, 48, 72, 96, 128]


def test_a_slab_is_free_again_when_its_last_page_goes():
    arena, (pages,) = filled((2, 10))
    assert arena.used_slabs() == 2
    arena.release(pages[:5])
    assert arena.used_slabs() == 1
    arena.allocate(torch.tensor([40]), 1)
    assert int(arena.offsets[40]) == 0


def test_compaction_gathers_sparse_slabs_and_moves_bytes_with_the_table():
    """Fourteen plain pages in seven slabs, every second one gone: seven 4-bit pages need slabs that only moving frees."""
    arena, (pages,) = filled((0, 14))
    arena.release(pages[::2])
    assert arena.used_slabs() == 7
    arena.allocate(torch.arange(20, 35), 2)
    arena.check_integrity()
    assert arena.used_slabs() == 7
    assert arena.moved_pages_total == 3
    kept = pages[1::2]
    assert torch.equal(arena.read_pages(0, kept), kept.to(torch.uint8)[:, None].expand(7, 64))


def test_compaction_keeps_fuller_slabs_where_they_are():
    arena, (pages,) = filled((2, 35))
    # Slabs of five: keep 1, 5, 1, 4, 1, 1, 1 pages.
    gone = [n for slab, keep in enumerate([1, 5, 1, 4, 1, 1, 1]) for n in range(5 * slab + keep, 5 * slab + 5)]
    arena.release(pages[gone])
    full = pages[[*range(5, 10), *range(15, 19)]]
    places = arena.offsets[full].clone()
    arena.allocate(torch.arange(36, 44), 0)
    arena.check_integrity()
    assert torch.equal(arena.offsets[full], places)
    assert arena.moved_pages_total == 4


def test_nothing_moves_while_slabs_are_free():
    arena, (pages,) = filled((0, 12))
    arena.release(pages[::2])
    arena.allocate(torch.tensor([20]), 1)
    assert arena.moved_pages_total == 0


def test_the_padding_page_lies_behind_the_slabs_and_survives_everything():
    arena, (pages,) = filled((0, 14))
    padding = torch.zeros(1, dtype=torch.int64)
    data = torch.arange(64, dtype=torch.uint8)
    arena.buffer[PLAN.arena_bytes :] = data
    arena.release(pages[::2])
    arena.allocate(torch.arange(20, 35), 2)
    arena.clear()
    assert int(arena.offsets[padding]) == PLAN.arena_bytes
    assert torch.equal(arena.buffer[PLAN.arena_bytes :], data)
    assert arena.buffer.numel() == PLAN.arena_bytes + PAGE_BYTES[0]
    assert arena.counts == [0, 0, 0]


def test_a_full_arena_says_what_it_holds():
    arena, _ = filled((0, 4), (1, 3), (2, 20))
    with pytest.raises(ArenaFullError) as caught:
        arena.allocate(torch.tensor([40, 41]), 0)
    assert str(caught.value) == "the arena has no room for 2 pages of 64 bytes: 7 slabs, pages by format [4, 3, 20]"


def break_counts(arena: Arena) -> None:
    arena.counts[1] += 1


def break_offset(arena: Arena) -> None:
    arena.offsets[1] += 8


def break_format(arena: Arena) -> None:
    arena.slab_format[0] = 1


def break_slot(arena: Arena) -> None:
    arena.slot_page[0, 0] = 2


def break_free_slot(arena: Arena) -> None:
    arena.slot_page[1, 1] = 9


def break_empty_slab(arena: Arena) -> None:
    arena.slab_format[5] = 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_counts, r"pages by format: the table has \[3, 0, 4\], the counters say \[3, 1, 4\]"),
        (break_offset, "does not start on a slot"),
        (break_format, "slab of another format"),
        (break_slot, "does not point back"),
        (break_free_slot, "a slot is taken that no page owns"),
        (break_empty_slab, "an empty slab keeps a format"),
    ],
)
def test_damage_is_found(damage, message):
    arena, _ = filled((0, 3), (2, 4))
    arena.check_integrity()
    damage(arena)
    with pytest.raises(IntegrityError, match=message):
        arena.check_integrity()
