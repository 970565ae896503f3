"""Splitting the pages of a batch by format: against a loop."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kernels.page_layout import PageGeometry, coded_layout, plain_layout
from sgl_kernels.paged_attention.plan import PagePlan, plan_pages

GEOMETRY = PageGeometry(1, 1, 32, 64, torch.bfloat16)
LAYOUTS = (
    plain_layout("bf16", GEOMETRY),
    coded_layout("fp8", "e4m3", "e4m3", GEOMETRY),
    coded_layout("fp4", "e2m1", "e2m1", GEOMETRY),
)
fixed = settings(derandomize=True, deadline=None, max_examples=150)


@st.composite
def batches(draw):
    """Lengths, page table (with rubbish beyond each length), formats and offsets of the virtual pages, page size."""
    page_size = draw(st.sampled_from([1, 4, 64]))
    lengths = draw(st.lists(st.integers(0, 5 * page_size), min_size=1, max_size=6))
    columns = -(-max(lengths) // page_size) + draw(st.integers(0, 2))
    used = [-(-length // page_size) for length in lengths]
    numbers = draw(st.permutations(range(1, sum(used) + 4)))
    formats = draw(st.lists(st.sampled_from([0, 1, 2]), min_size=len(numbers) + 1, max_size=len(numbers) + 1))
    table, taken = [], 0
    for count in used:
        # Beyond the length there may be anything, unmapped pages too.
        rubbish = draw(st.lists(st.integers(0, len(numbers)), min_size=columns - count, max_size=columns - count))
        table.append([*numbers[taken : taken + count], *rubbish])
        taken += count
    for page in numbers[taken:]:
        formats[page] = -1
    return (
        torch.tensor(lengths),
        torch.tensor(table, dtype=torch.int64).view(len(lengths), columns),
        torch.tensor(formats, dtype=torch.int8),
        torch.arange(len(formats)) * 512 + 7,
        page_size,
    )


def by_hand(lengths, table, formats, offsets, page_size):
    """Format -> list of (request, offset, valid entries) in the order in which a loop meets them."""
    parts: dict[int, list[tuple[int, int, int]]] = {}
    for request, length in enumerate(lengths.tolist()):
        for depth in range(-(-length // page_size)):
            page = int(table[request, depth])
            valid = min(page_size, length - depth * page_size)
            parts.setdefault(int(formats[page]), []).append((request, int(offsets[page]), valid))
    return parts


def rows(plan: PagePlan) -> dict[int, list[tuple[int, int, int]]]:
    return {
        LAYOUTS.index(part.layout): list(zip(part.owner.tolist(), part.offsets.tolist(), part.lengths.tolist(), strict=True))
        for part in plan.parts
    }


@fixed
@given(batches())
def test_every_page_is_in_exactly_one_part_in_order(batch):
    lengths, table, formats, offsets, page_size = batch
    before = [x.clone() for x in (lengths, table, formats, offsets)]
    plan = plan_pages(table, lengths, formats, offsets, LAYOUTS, page_size)
    assert plan.batch_size == len(lengths)
    assert rows(plan) == by_hand(*batch)
    assert all(torch.equal(x, y) for x, y in zip((lengths, table, formats, offsets), before, strict=True))
    for part in plan.parts:
        assert part.owner.dtype == part.offsets.dtype == part.lengths.dtype == torch.int64


def test_the_last_page_of_a_request_may_be_partial():
    table = torch.tensor([[1, 2, 3]])
    for length, valid in ((1, [1]), (63, [63]), (64, [64]), (65, [64, 1]), (128, [64, 64]), (129, [64, 64, 1])):
        plan = plan_pages(table, torch.tensor([length]), torch.zeros(4, dtype=torch.int8), torch.arange(4), LAYOUTS, 64)
        assert plan.parts[0].lengths.tolist() == valid
        assert plan.parts[0].offsets.tolist() == [1, 2, 3][: len(valid)]


def test_formats_that_nobody_reads_give_no_part():
    formats = torch.tensor([0, 2, 2], dtype=torch.int8)
    plan = plan_pages(torch.tensor([[1, 2]]), torch.tensor([100]), formats, torch.arange(3), LAYOUTS, 64)
    assert [part.layout.name for part in plan.parts] == ["fp4"]


def test_requests_without_tokens_read_nothing():
    plan = plan_pages(
        torch.zeros(3, 0, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int8),
        torch.zeros(1, dtype=torch.int64),
        LAYOUTS,
        64,
    )
    assert (plan.batch_size, plan.parts) == (3, ())


def test_a_page_shared_by_two_requests_is_read_by_both():
    table = torch.tensor([[1, 2], [1, 3]])
    formats = torch.tensor([0, 1, 0, 0], dtype=torch.int8)
    plan = plan_pages(table, torch.tensor([70, 128]), formats, torch.arange(4) * 100, LAYOUTS, 64)
    assert rows(plan) == {0: [(0, 200, 6), (1, 300, 64)], 1: [(0, 100, 64), (1, 100, 64)]}
