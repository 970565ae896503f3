"""Sealing and demotion by the Triton kernels, in the interpreter: bounds derived from the number formats, and the merges of
the torch codec.

Codes are those of the torch codec except where fp32 decides: sums are taken in another order and quotients are products with
a reciprocal, each a few units of 2^-24 off, so what lies on the border of two codes to that accuracy may get the other one.
A mean or scale that moves so takes its codes along. Hence few bytes differ, and the errors stay within those of the format.
"""

import math
from dataclasses import replace

import pytest
import torch
from hard_pages import BUDGETS, DIMS, DTYPES, PAGE_SIZES, UNEVEN, geometry, hard_pages
from interpreted import interpreted
from other_device import DEVICE, PretendedDevice, on_device
from page_stores import LADDERS, assert_near, full_pages, make_store, read_page
from sealed_pages import TARGETS, Samples, model, plain_pages, random_scorer, reencoded, some_queries, undecided_heads
from torch import Tensor

from csa2.codec.codec import PageCodec
from csa2.codec.sealing import ReferenceSealer, Wave
from csa2.codec.triton_sealing import TritonSealer
from sgl_kernels.errors import KernelLayoutError
from sgl_kernels.page_layout import PageLayout

CHAINS = [
    ("fp8", "k8v4", "int4", "csa2-4x", "csa2-8x"),
    (BUDGETS, "csa2-2x", UNEVEN),
    ("fp4", "csa2-8x"),
]
"""From a plain page on."""


def sealed(
    codec: PageCodec, layouts: list[PageLayout], source: int, data: Tensor, target: int, queries: Tensor | None
) -> Tensor:
    with interpreted():
        return reencoded(TritonSealer(layouts, codec), layouts, source, data, target, queries)


@pytest.mark.parametrize("name", TARGETS)
def test_hard_pages_are_within_the_bounds(name):
    turn = TARGETS.index(name)
    # Every head dim and page size occurs; half of the formats have 64 or 128 channels.
    dim = (64, 128)[turn // 2 % 2] if turn % 2 else DIMS[turn // 2 * 2 % len(DIMS)]
    g = geometry(dim, 1, DTYPES[turn % 3], PAGE_SIZES[turn % 3])
    codec, layouts = model(g, name)
    keys, values = (torch.stack(list(hard_pages(layouts[0], seed).values())) for seed in (1, 2))
    values = values.roll(1, 0)
    data, queries = plain_pages(keys, values, g), some_queries(len(keys), g)
    packed = sealed(codec, layouts, 0, data, 1, queries)
    undecided_heads(codec, codec.open(data, layouts[0]), layouts[1], queries, packed)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TARGETS)
def test_hard_pages_on_a_device(name):
    g = geometry(128, 3)
    codec, layouts = model(g, name)
    keys, values = (torch.stack(list(hard_pages(layouts[0], seed).values())) for seed in (1, 2))
    data, queries = plain_pages(keys, values.roll(1, 0), g), some_queries(len(keys), g)
    page = torch.arange(len(data))
    wave = Wave(torch.zeros_like(page), page * data.shape[1], torch.ones_like(page), page)
    sealer = TritonSealer(layouts, codec.to("cuda"))
    packed = sealer.seal(data.view(-1).cuda(), wave, Samples(queries.cuda()))[1]
    undecided_heads(codec, codec.open(data, layouts[0]), layouts[1], queries, packed.cpu())
    # Nothing depends on the order of atomics.
    assert torch.equal(packed, sealer.seal(data.view(-1).cuda(), wave, Samples(queries.cuda()))[1])


@pytest.mark.parametrize("name", ["fp8", "fp4", "csa2-4x"])
def test_a_broken_token_counts_as_the_reference_counts_it(name):
    """NaN and infinity are 0, and what is too large saturates."""
    g = geometry(64, 1, torch.float32, 32)
    codec, layouts = model(g, name)
    broken = (math.nan, math.inf, -math.inf, 3e38)
    keys, values = torch.randn(2, 5, 2 * g.num_kv_heads, 32, 64, generator=torch.Generator().manual_seed(5))
    for x in (keys, values):
        for page, number in enumerate(broken):
            x[page, :, 11, 7] = number
            x[page, :, 12 + page] = number
    data, queries = plain_pages(keys, values, g), some_queries(5, g)
    packed = sealed(codec, layouts, 0, data, 1, queries)
    undecided_heads(codec, codec.open(data, layouts[0]), layouts[1], queries, packed)
    opened = codec.open(packed, layouts[1])
    assert bool(opened.keys.isfinite().all())
    assert bool(opened.values.isfinite().all())
    # Another page does not notice.
    assert torch.equal(packed[4:], sealed(codec, layouts, 0, data[4:], 1, queries[4:]))


@pytest.mark.parametrize("chain", CHAINS, ids="-".join)
def test_chains_of_demotions(chain):
    """Each step is the one that the torch codec makes from the same page."""
    g = geometry(64, 3 if UNEVEN in chain else 1)
    codec, layouts = model(g, *chain)
    heads = 2 * g.num_kv_heads
    tokens = torch.randn(2, 2, heads, 64, 64, generator=torch.Generator().manual_seed(3))
    shift = torch.randn(2, 2, heads, 1, 64, generator=torch.Generator().manual_seed(4))
    keys, values = tokens + tokens.roll(1, -2) + shift
    data, queries = plain_pages(keys, values, g), some_queries(2, g)
    queries[1] = 0
    for source in range(len(layouts) - 1):
        arguments = layouts, source, data, source + 1, queries
        packed = sealed(codec, *arguments)
        wanted = reencoded(ReferenceSealer(layouts, codec), *arguments)
        held = codec.open(data, layouts[source])
        # Of 4 or 12 pieces; two scores may be equal but for rounding, and then any of the two entries may stay.
        assert undecided_heads(codec, held, layouts[source + 1], queries, packed) <= 1
        # What was coded before is often 0 or, without a mean, equal to another: codes of two bits change sign at 0.
        assert float((packed != wanted).float().mean()) < (0.05 if source else 0.005)
        data = packed


def test_scores_are_corrected_as_the_reference_corrects_them():
    g = geometry(64, 1, torch.bfloat16, 32)
    codec, layouts = model(g, "csa2-4x")
    trained = replace(codec, scorer=random_scorer(2, 64, 16))
    data, queries = (
        plain_pages(*torch.randn(2, 3, 2, 32, 64, generator=torch.Generator().manual_seed(3)), g),
        some_queries(3, g),
    )
    packed = sealed(trained, layouts, 0, data, 1, queries)
    assert undecided_heads(trained, codec.open(data, layouts[0]), layouts[1], queries, packed) <= 1
    asked = queries.flatten(1).any(-1)
    assert float((packed != sealed(codec, layouts, 0, data, 1, queries))[asked].float().mean()) > 0.1


def test_a_wave_of_many_moves_is_the_same_as_each_alone():
    """In whatever order, however few pages fit into the workspace, and wherever they lie."""
    g = geometry(64, 1, torch.bfloat16, 32)
    codec, layouts = model(g, "fp4", "csa2-4x")
    data = plain_pages(*torch.randn(2, 2, 2, 32, 64, generator=torch.Generator().manual_seed(7)), g)
    queries = some_queries(2, g)
    held = [data, codec.seal(codec.open(data, layouts[0]), layouts[1])]
    moves = [(0, 1, 2), (1, 1, 2), (0, 1, 1), (0, 0, 2)]
    sizes = torch.tensor([held[s].shape[1] for s, _, _ in moves])
    arena = torch.cat([held[s][page] for s, page, _ in moves])
    source, page, target = torch.tensor(moves).unbind(-1)
    wave = Wave(source, sizes.cumsum(0) - sizes, target, page)
    with interpreted(), PretendedDevice():
        # The wave is on the host; a tensor of it that met one of the device would raise.
        sealer = TritonSealer(layouts, codec.to(DEVICE), workspace_bytes=1)
        packed = sealer.seal(on_device(arena), wave, Samples(on_device(queries)))
        packed = {index: pages.cpu() for index, pages in packed.items()}
    for index, got in packed.items():
        of_format = [move for move in moves if move[2] == index]
        for row, (s, p, t) in zip(got, of_format, strict=True):
            assert torch.equal(row, sealed(codec, layouts, s, held[s][p : p + 1], t, queries[p : p + 1])[0])


@pytest.mark.parametrize("tail", ["k8v4", "csa2-2x"])
def test_a_store_that_seals_with_it(tail):
    ladder = LADDERS[tail]
    store = make_store(num_slabs=8, ladder=ladder)
    store.seal_with(TritonSealer(ladder.layouts, store.codec))
    contents = full_pages(store, [1, 2])
    with interpreted():
        assert store.seal(torch.empty(0, dtype=torch.int64), torch.tensor([1, 2])) == 2
    store.check_integrity()
    for page in (1, 2):
        assert_near(store, contents[page - 1], read_page(store, page), ladder.tail, -1)


@pytest.mark.parametrize(("source", "target"), [(0, 0), (1, 0), (2, 1)])
def test_moves_that_are_no_demotion_are_refused(source, target):
    g = geometry(64)
    codec, layouts = model(g, "fp4", "csa2-4x")
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="cannot be sealed to"):
        TritonSealer(layouts, codec).seal(
            torch.zeros(1 << 20, dtype=torch.uint8), Wave(one + source, one, one + target, one - 1), Samples(None)
        )


@pytest.mark.parametrize(("size", "separated", "named"), [(48, False, "48 entries"), (64, True, "separated")])
def test_layouts_that_the_kernels_do_not_take_are_refused(size, separated, named):
    codec, layouts = model(geometry(64, 1, torch.bfloat16, size), "fp4")
    layouts[1] = replace(layouts[1], is_separated=separated)
    with pytest.raises(KernelLayoutError, match=named):
        TritonSealer(layouts, codec)
