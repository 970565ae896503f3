"""Compiled sealing and demotion, for every instruction set of this CPU: bounds derived from the number formats, and the
merges of the torch reference."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hard_pages import DIMS, DTYPES, PAGE_SIZES, UNEVEN, geometry, hard_pages
from page_stores import LADDERS, SIZE, assert_near, full_pages, make_store, read_page
from sealed_pages import (
    DEMOTIONS,
    TARGETS,
    Samples,
    model,
    plain_pages,
    random_scorer,
    reencoded,
    some_queries,
    undecided_heads,
)

from csa2.calibrate.scorer_training import Network
from csa2.codec.scorer import SCALARS, Scorer
from csa2.codec.sealing import CompiledSealer, ReferenceSealer, Wave
from sgl_kernels.cpu import isa as isas

ISAS = isas.available()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("dim", DIMS)
def test_hard_pages_are_within_the_bounds(dim, name, isa):
    # A Latin square: every pair of dim, format, dtype and page size occurs.
    turn = DIMS.index(dim) + TARGETS.index(name)
    g = geometry(dim, 1 + turn % 3, DTYPES[turn % 3], PAGE_SIZES[turn // 3 % 3])
    codec, layouts = model(g, name)
    keys, values = (torch.stack(list(hard_pages(layouts[0], seed).values())) for seed in (1, 2))
    values = values.roll(1, 0)
    data = plain_pages(keys, values, g)
    queries = some_queries(len(keys), g)
    for asked in (queries, None):
        packed = reencoded(CompiledSealer(layouts, codec, isa), layouts, 0, data, 1, asked)
        undecided_heads(codec, codec.open(data, layouts[0]), layouts[1], asked, packed)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, 3e38], ids=str)
def test_a_broken_token_counts_as_the_reference_counts_it(broken, name, isa):
    g = geometry(64, 3, torch.float32)
    codec, layouts = model(g, name)
    keys, values = torch.randn(2, 3, 6, 64, 64, generator=torch.Generator().manual_seed(5))
    for x in (keys, values):
        x[0, :, 11, 7] = broken
        x[1, :, 12] = broken
    data = plain_pages(keys, values, g)
    packed = reencoded(CompiledSealer(layouts, codec, isa), layouts, 0, data, 1, some_queries(3, g))
    undecided_heads(codec, codec.open(data, layouts[0]), layouts[1], some_queries(3, g), packed)
    # Another page does not notice.
    alone = reencoded(CompiledSealer(layouts, codec, isa), layouts, 0, data[2:], 1, some_queries(3, g)[2:])
    assert torch.equal(packed[2:], alone)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("before", "name"), DEMOTIONS)
def test_from_every_format_to_every_smaller_one(before, name, isa):
    """Nearly all bytes are those of the reference: others are numbers on the border between two codes, and merges that two
    roundings decide."""
    order = ("plain", *TARGETS)
    g = geometry(64, 3)
    codec, layouts = model(g, *TARGETS)
    source, target = order.index(before), order.index(name)
    tokens = torch.randn(2, 4, 6, 64, 64, generator=torch.Generator().manual_seed(3))
    keys, values = tokens + tokens.roll(1, -2) + torch.randn(2, 4, 6, 1, 64, generator=torch.Generator().manual_seed(4))
    data = plain_pages(keys, values, g)
    if source:
        data = codec.seal(codec.open(data, layouts[0]), layouts[source], some_queries(4, g, seed=1))
    queries = some_queries(4, g)
    packed, wanted = (
        reencoded(sealer, layouts, source, data, target, queries)
        for sealer in (CompiledSealer(layouts, codec, isa), ReferenceSealer(layouts, codec))
    )
    # Of 24 pieces.
    assert undecided_heads(codec, codec.open(data, layouts[source]), layouts[target], queries, packed) <= 2
    # Codes of two bits change sign at 0, and what was coded before is often 0 or, without a mean, equal to another.
    assert float((packed != wanted).float().mean()) < (0.05 if source else 0.005)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dim", "page_size", "units"), [(64, 64, 16), (64, 32, 0), (80, 128, 3), (128, 64, 64)])
@pytest.mark.parametrize("before", ["plain", "fp8"])
def test_scores_are_corrected_as_the_reference_corrects_them(before, dim, page_size, units, isa):
    order = ["plain", "fp8", "csa2-4x"]
    g = geometry(dim, 2, torch.bfloat16, page_size)
    codec, layouts = model(g, *order[1:])
    trained = replace(codec, scorer=random_scorer(g.num_layers * g.num_kv_heads, dim, units))
    heads = g.num_layers * g.num_kv_heads
    tokens = torch.randn(2, 6, heads, page_size, dim, generator=torch.Generator().manual_seed(3))
    data, queries = plain_pages(*tokens, g), some_queries(6, g)
    source = order.index(before)
    if source:
        data = codec.seal(codec.open(data, layouts[0]), layouts[source], queries)
    sealers = CompiledSealer(layouts, trained, isa), ReferenceSealer(layouts, trained), CompiledSealer(layouts, codec, isa)
    packed, wanted, free = (reencoded(sealer, layouts, source, data, 2, queries) for sealer in sealers)
    # Two pivots of a page may change places where two scores are equal but for rounding.
    assert undecided_heads(trained, codec.open(data, layouts[source]), layouts[2], queries, packed) <= 1
    assert float((packed != wanted).float().mean()) < (0.05 if source else 0.005)
    asked = queries.flatten(1).any(-1)
    assert float((packed != free)[asked].float().mean()) > 0.1
    assert torch.equal(packed[~asked], free[~asked])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["csa2-4x", "csa2-8x"])
def test_an_untrained_network_changes_no_byte(name, isa):
    g = geometry(64)
    codec, layouts = model(g, name)
    heads = g.num_layers * g.num_kv_heads
    network = Network(heads, 2 * 64 + SCALARS, 16, torch.Generator().manual_seed(0))
    scorer = Scorer(network.weights, network.offsets, network.outer).map(torch.Tensor.detach)
    data, queries = plain_pages(*torch.randn(2, 6, heads, 64, 64), g), some_queries(6, g)
    for kind in (partial(CompiledSealer, isa=isa), ReferenceSealer):
        untrained, free = (
            reencoded(kind(layouts, with_or_without), layouts, 0, data, 1, queries)
            for with_or_without in (replace(codec, scorer=scorer), codec)
        )
        assert torch.equal(untrained, free)


def test_too_many_hidden_units_are_refused():
    g = geometry(64)
    codec, layouts = model(g, "csa2-4x")
    with pytest.raises(ValueError, match="65 hidden units"):
        CompiledSealer(layouts, replace(codec, scorer=random_scorer(g.num_layers * g.num_kv_heads, 64, 65)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["csa2-4x", "csa2-8x", UNEVEN])
def test_equal_entries_are_merged_without_loss(name, isa):
    """Eight different tokens, eight times each: ties everywhere, and whichever way they go no group is a bad one."""
    g = geometry(64, 3, torch.float32)
    codec, layouts = model(g, name)
    keys, values = torch.randn(2, 2, 6, 8, 64, generator=torch.Generator().manual_seed(6)).repeat(1, 1, 1, 8, 1)
    data = plain_pages(keys, values, g)
    for queries in (some_queries(2, g), None):
        packed = reencoded(CompiledSealer(layouts, codec, isa), layouts, 0, data, 1, queries)
        undecided_heads(codec, codec.open(data, layouts[0]), layouts[1], queries, packed)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_wave_of_many_moves_is_the_same_as_each_alone(threads, isa):
    """Whatever the number of threads, and in whatever order."""
    g = geometry(64, 2)
    codec, layouts = model(g, "fp8", "fp4", "csa2-4x")
    tokens = torch.randn(2, 2, 4, 64, 64, generator=torch.Generator().manual_seed(7))
    data, queries = plain_pages(*tokens, g), some_queries(2, g)
    held = [data, *(codec.seal(codec.open(data, layouts[0]), layout) for layout in layouts[1:])]
    moves = [(s, page, t) for t in (3, 1, 2) for s in range(t) for page in (1, 0)]
    sealer = CompiledSealer(layouts, codec, isa)
    sizes = torch.tensor([held[s].shape[1] for s, _, _ in moves])
    arena = torch.cat([held[s][page] for s, page, _ in moves])
    source, page, target = torch.tensor(moves).unbind(-1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        packed = sealer.seal(arena, Wave(source, sizes.cumsum(0) - sizes, target, page), Samples(queries))
    finally:
        torch.set_num_threads(before)
    for index, got in packed.items():
        of_format = [move for move in moves if move[2] == index]
        for row, (s, p, t) in zip(got, of_format, strict=True):
            assert torch.equal(row, reencoded(sealer, layouts, s, held[s][p : p + 1], t, queries[p : p + 1])[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tail", LADDERS)
def test_a_store_that_seals_with_it(tail, isa):
    ladder = LADDERS[tail]
    store = make_store(num_slabs=8, ladder=ladder)
    store.seal_with(CompiledSealer(ladder.layouts, store.codec, isa))
    contents = full_pages(store, [1, 2, 3, 4])
    for layer in range(2):
        # Small: where one token draws everything, the others weigh alike, and any of them may stay.
        queries = torch.randn(SIZE, 3, 32, generator=torch.Generator().manual_seed(layer)) / 64
        store.samples.record_extend(5, layer, queries, 1.0)
    store.touch(torch.tensor([1, 2]), torch.tensor([5, 5]))
    assert store.seal(torch.empty(0, dtype=torch.int64), torch.tensor([1, 2, 3, 4])) == 4
    store.check_integrity()
    for page, reader in ((1, 5), (2, 5), (3, -1), (4, -1)):
        assert_near(store, contents[page - 1], read_page(store, page), ladder.tail, reader)


@pytest.mark.parametrize(("source", "target"), [(0, 0), (1, 0), (2, 1)])
def test_moves_that_are_no_demotion_are_refused(source, target):
    g = geometry(64)
    codec, layouts = model(g, "fp4", "csa2-4x")
    sealer = CompiledSealer(layouts, codec)
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="cannot be sealed to"):
        sealer.seal(torch.zeros(1 << 20, dtype=torch.uint8), Wave(one + source, one, one + target, one - 1), Samples(None))
