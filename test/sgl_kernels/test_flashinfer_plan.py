"""Plans for FlashInfer against a loop, and the layers of the arena that their page ids count."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_scenes import make_scene

from sgl_kernels.errors import KernelLayoutError, PlanError
from sgl_kernels.flashinfer.plan import DenseFormat, FlashInferPlan, dense_formats, plan_dense
from sgl_kernels.flashinfer.views import KV_LAYOUT, bias_slab, layer_view
from sgl_kernels.page_layout import PageGeometry, PageLayout, coded_layout, plain_layout
from sgl_kernels.paged_attention.reference import open_plain

SIZE = 16
GEOMETRY = PageGeometry(2, 3, 32, SIZE, torch.bfloat16)


def rows(name: str, dtype: torch.dtype, entries: int = SIZE) -> PageLayout:
    return plain_layout(name, PageGeometry(2, 3, 32, entries, dtype))


DENSE = torch.float8_e4m3fn
PLAIN, E4M3 = rows("bf16", torch.bfloat16), rows("e4m3", DENSE)
CODED = coded_layout("fp8", "e4m3", "e4m3", GEOMETRY)
MERGED = DenseFormat(3, rows("e4m3-2x", DENSE, SIZE // 2), merge=2)
FORMATS = (DenseFormat(0, PLAIN), DenseFormat(2, E4M3), MERGED)
BYTES = (PLAIN.page_bytes, CODED.page_bytes, E4M3.page_bytes, MERGED.layout.page_bytes)
fixed = settings(derandomize=True, deadline=None, max_examples=200)


@st.composite
def batches(draw):
    """Page table with rubbish beyond each length, lengths, formats and offsets of virtual pages. Only a page of bare rows is
    partial, or one of codes; never one of merged entries."""
    lengths = draw(st.lists(st.integers(0, 5 * SIZE), min_size=1, max_size=6))
    depth = -(-max(lengths) // SIZE) + draw(st.integers(0, 2))
    used = [-(-length // SIZE) for length in lengths]
    count = sum(used) + 4
    numbers = draw(st.permutations(range(1, count)))
    formats = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    table, taken = torch.zeros(len(lengths), depth, dtype=torch.int64), 0
    for request, (length, pages) in enumerate(zip(lengths, used, strict=True)):
        table[request, :pages] = torch.tensor(numbers[taken : taken + pages], dtype=torch.int64)
        table[request, pages:] = draw(st.integers(0, count - 1))
        if length % SIZE and formats[numbers[taken + pages - 1]] == 3:
            formats[numbers[taken + pages - 1]] = draw(st.integers(0, 2))
        taken += pages
    for page in numbers[taken:]:
        formats[page] = -1
    slots = draw(st.permutations(range(count)))
    offsets = [slot * BYTES[max(kind, 0)] for slot, kind in zip(slots, formats, strict=True)]
    return table, torch.tensor(lengths), torch.tensor(formats, dtype=torch.int8), torch.tensor(offsets)


def by_hand(table, lengths, formats, offsets):
    """Format -> request -> [(page id, entries)], and format -> pages of the others."""
    parts: dict[int, list[list[tuple[int, int]]]] = {one.index: [[] for _ in lengths] for one in FORMATS}
    rest: dict[int, int] = {}
    for request, length in enumerate(lengths.tolist()):
        for depth in range(-(-length // SIZE)):
            page = int(table[request, depth])
            kind, valid = int(formats[page]), min(SIZE, length - depth * SIZE)
            if kind in parts:
                merge = 2 if kind == 3 else 1
                parts[kind][request].append((int(offsets[page]) // BYTES[kind], valid // merge))
            else:
                rest[kind] = rest.get(kind, 0) + 1
    return parts, rest


def read(plan: FlashInferPlan) -> dict[int, list[list[tuple[int, int]]]]:
    """As FlashInfer reads a plan: every page full but the last one of a request."""
    parts = {}
    for part in plan.parts:
        assert part.indptr.dtype == part.indices.dtype == part.last_page_len.dtype == torch.int32
        requests = []
        for b in range(plan.batch_size):
            ids = part.indices[part.indptr[b] : part.indptr[b + 1]].tolist()
            counts = [part.format.entries] * (len(ids) - 1) + [int(part.last_page_len[b])]
            requests.append(list(zip(ids, counts, strict=False)))
            assert ids or counts == [0]
        assert int(part.indptr[-1]) == part.num_pages
        parts[part.format.index] = requests
    return parts


@fixed
@given(batches())
def test_every_page_is_in_exactly_one_part_in_order(batch):
    before = [x.clone() for x in batch]
    plan = plan_dense(*batch, FORMATS, SIZE)
    parts, rest = by_hand(*batch)
    assert (read(plan), plan.rest) == (parts, rest)
    assert all(torch.equal(x, y) for x, y in zip(batch, before, strict=True))


@fixed
@given(batches())
def test_flashinfer_counts_the_same_entries(batch):
    page = pytest.importorskip("flashinfer.page")
    parts = by_hand(*batch)[0]
    for part in plan_dense(*batch, FORMATS, SIZE).parts:
        counted = page.get_seq_lens(part.indptr, part.last_page_len, part.format.entries)
        assert counted.tolist() == [sum(n for _, n in request) for request in parts[part.format.index]]


@pytest.mark.parametrize(("length", "last"), [(0, 0), (1, 1), (15, 15), (16, 16), (17, 1), (32, 16), (33, 1)])
def test_the_last_page_may_be_partial(length, last):
    table, formats = torch.tensor([[1, 2, 3]]), torch.zeros(4, dtype=torch.int8)
    offsets = torch.arange(4) * PLAIN.page_bytes
    part = plan_dense(table, torch.tensor([length]), formats, offsets, FORMATS, SIZE).parts[0]
    assert part.indices.tolist() == [1, 2, 3][: -(-length // SIZE)]
    assert part.last_page_len.tolist() == [last]


def test_a_batch_without_pages_has_empty_parts():
    none = torch.zeros(0, dtype=torch.int64)
    plan = plan_dense(
        torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), none.to(torch.int8), none, FORMATS, SIZE
    )
    assert [part.indptr.tolist() for part in plan.parts] == [[0, 0, 0]] * 3
    assert [part.num_pages for part in plan.parts] == [0, 0, 0]
    assert plan.rest == {}


def one_page(index: int, offset: int, length: int = SIZE, dense=FORMATS, size: int = SIZE) -> FlashInferPlan:
    formats = torch.tensor([index], dtype=torch.int8)
    return plan_dense(torch.tensor([[0]]), torch.tensor([length]), formats, torch.tensor([offset]), dense, size)


def test_page_ids_end_where_int32_does():
    step = E4M3.page_bytes
    assert one_page(2, (2**31 - 1) * step).parts[1].indices.tolist() == [2**31 - 1]
    with pytest.raises(PlanError, match="page id 2147483648 of format 'e4m3': FlashInfer takes ids up to 2147483647"):
        one_page(2, 2**31 * step)


def test_what_cannot_be_planned_is_named():
    with pytest.raises(PlanError, match="page 0 is read but not mapped"):
        one_page(-1, 0)
    with pytest.raises(PlanError, match=r"lies at byte 100, which is no multiple of its 12288 bytes"):
        one_page(0, 100)
    with pytest.raises(PlanError, match=r"merged entries \('e4m3-2x'\) has 7 of 16 tokens"):
        one_page(3, 0, 7)
    with pytest.raises(PlanError, match=r"8 entries of 2 tokens, and pages have 32 tokens"):
        one_page(3, 0, 32, (MERGED,), 32)


def test_formats_that_flashinfer_does_not_read_are_refused_or_left_out():
    with pytest.raises(KernelLayoutError, match="'fp8' holds codes, means and scales"):
        DenseFormat(1, CODED)
    with pytest.raises(KernelLayoutError, match=r"'fp32' holds torch\.float32"):
        DenseFormat(0, rows("fp32", torch.float32))
    assert [one.index for one in dense_formats((PLAIN, CODED, E4M3))] == [0, 2]
    assert dense_formats((rows("fp32", torch.float32), CODED)) == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_page_ids_find_the_rows_of_every_layer(dtype):
    """One plan: the views of all layers hold at its ids what the reference opens at the pages' offsets."""
    scene = make_scene([5 * 64 + 1, 64, 130], (64, 2, 4, dtype))
    (dense,) = dense_formats(scene.layouts)
    plan = plan_dense(scene.table, scene.lengths, scene.formats, scene.offsets, (dense,), 64)
    part = plan.parts[0]
    assert part.num_pages
    for layer in range(2):
        view = layer_view(scene.arena, dense, layer)
        keys, values = open_plain(scene.arena, part.indices.long() * dense.layout.page_bytes, dense.layout, layer)
        found = view[part.indices.long()].view(torch.uint8)
        assert torch.equal(found, torch.stack((keys, values), 1).view(torch.uint8))


@pytest.mark.parametrize("dense", FORMATS, ids=lambda one: one.layout.name)
def test_flashinfer_takes_the_views_as_they_are(dense):
    utils = pytest.importorskip("flashinfer.utils")
    arena = torch.zeros(5 * PLAIN.page_bytes + 64, dtype=torch.uint8)
    for layer in range(2):
        view = layer_view(arena, dense, layer)
        assert view.shape[0] == arena.numel() // dense.layout.page_bytes
        keys, values = utils._unpack_paged_kv_cache(view, KV_LAYOUT)
        assert keys.shape == (view.shape[0], 3, dense.entries, 32)
        assert keys.stride() == values.stride()
        assert keys.stride(-1) == 1
        for half in (keys, values):
            assert half.untyped_storage().data_ptr() == arena.data_ptr()
            assert half.data_ptr() % 16 == 0
            assert all(stride * half.element_size() % 16 == 0 for stride in half.stride()[:-1])
        last = (view.shape[0] - 1) * dense.layout.page_bytes + dense.layout.layer_range(layer)[0]
        assert keys[-1].data_ptr() == arena.data_ptr() + last


def test_a_view_of_a_part_of_a_buffer_stays_in_it():
    buffer = torch.zeros(3 * PLAIN.page_bytes, dtype=torch.uint8)
    view = layer_view(buffer[PLAIN.page_bytes :], FORMATS[0], 1)
    assert view.data_ptr() == buffer.data_ptr() + PLAIN.page_bytes + PLAIN.page_bytes // 2
    assert view.shape[0] == 2


def test_rows_that_flashinfer_cannot_address_are_refused():
    odd = DenseFormat(0, plain_layout("odd", PageGeometry(1, 1, 20, 16, torch.bfloat16)))
    with pytest.raises(KernelLayoutError, match="rows of 40 bytes"):
        layer_view(torch.zeros(4096, dtype=torch.uint8), odd, 0)
    huge = DenseFormat(0, plain_layout("huge", PageGeometry(1 << 20, 8, 128, 64, torch.bfloat16)))
    with pytest.raises(KernelLayoutError, match="FlashInfer takes 4294967295"):
        layer_view(torch.zeros(64, dtype=torch.uint8), huge, 0)


def test_biases_lie_at_the_page_ids():
    slab = bias_slab(5 * PLAIN.page_bytes + 64, MERGED, "cpu")
    assert slab.shape == (20, 2, 3, SIZE // 2)
    assert slab.dtype == torch.uint8
