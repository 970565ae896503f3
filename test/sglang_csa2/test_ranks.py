"""Ranks agree on the bytes of a page, and notice when their page tables differ."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import csa2
from csa2.calibrate.artefact import load
from csa2.capacity import plan_arena
from csa2.codec.assembly import codec_and_ladder
from csa2.codec.channels import make_rotation
from csa2.codec.sealing import CompiledSealer
from csa2.errors import IntegrityError
from csa2.formats import PLAIN
from csa2.impl import resolve_impl
from csa2.options import CacheOptions
from csa2.store import PageStore
from sgl_kernels.page_layout import PageGeometry
from sgl_kernels.paged_attention.reference import plain_rows, write_plain
from sglang_csa2 import ranks
from sglang_csa2.cpu_lora import Unpinned

SHIPPED = Path(csa2.__file__).parent / "calibrations" / "smollm2-135m-instruct"
PAGE = 64
LAYERS = 4
ROTATION = make_rotation(64, neox=True)
OPTIONS = CacheOptions(ratio="4", kv_format="int4", calibration=str(SHIPPED))


def built(rank):
    """Codec and ladder of one of three ranks of a model with 3 KV heads, the first layers of the demo model."""
    geometry = PageGeometry(LAYERS, 1, 64, PAGE, torch.bfloat16)
    return codec_and_ladder(OPTIONS, geometry, ROTATION, load(SHIPPED).of(range(LAYERS), range(rank, rank + 1)))


@pytest.fixture(scope="module")
def three():
    return [built(rank) for rank in range(3)]


def sizes(ladder, arena_bytes):
    return ranks.RankSizes(ladder.names, ladder.page_bytes, ladder.guard != ladder.end, arena_bytes)


def agreed(three):
    every = [sizes(ladder, 10**8 + i) for i, (_, ladder) in enumerate(three)]
    return [ranks.largest(ladder, every) for _, ladder in three]


def test_budgets_of_heads_make_pages_of_ranks_differ(three):
    """Otherwise the rest of this file tests nothing."""
    assert len({ladder.page_bytes for _, ladder in three}) > 1


def test_pages_cost_the_same_on_every_rank(three):
    results = agreed(three)
    assert len({ladder.page_bytes for ladder, _ in results}) == 1
    assert len({(ladder.guard, ladder.names) for ladder, _ in results}) == 1
    assert [arena for _, arena in results] == [10**8] * 3
    assert len({plan_arena(arena, ladder.page_bytes, ladder.guard) for ladder, arena in results}) == 1


def test_a_rank_that_merges_nothing_guards_as_the_others_do(three):
    _, ladder = three[0]
    other = sizes(ladder, 1)
    plain = ranks.RankSizes(other.names, other.page_bytes, not other.merges, 1)
    assert ranks.largest(ladder, [other, plain])[0].guard == ladder.warm


def test_ranks_with_other_formats_are_an_error(three):
    _, ladder = three[0]
    other = ranks.RankSizes(("bf16", "fp8"), (2, 1), False, 1)
    with pytest.raises(IntegrityError, match="ranks have different page formats"):
        ranks.largest(ladder, [sizes(ladder, 1), other])


def filled(codec, ladder, pages=4):
    """A store with pages of one request, the same tokens whatever the ladder."""
    store = PageStore(ladder, plan_arena(40 * ladder.page_bytes[PLAIN], ladder.page_bytes, ladder.guard), 32, codec)
    random = torch.Generator().manual_seed(0)
    own = torch.arange(1, pages + 1)
    store.map_pages(own)
    slots = torch.arange(PAGE, (pages + 1) * PAGE)
    store.record_writes(slots, slots - PAGE)
    layout = ladder.layouts[PLAIN]
    rows = plain_rows(store.arena.offsets[slots // PAGE], slots % PAGE, layout)
    tokens = torch.randn(2, LAYERS, len(slots), 1, 64, generator=random).bfloat16()
    for layer in range(LAYERS):
        write_plain(store.arena.buffer, rows, layout, layer, tokens[0, layer], tokens[1, layer])
    return store, own


@pytest.mark.parametrize("sealer", ["reference", "compiled"])
def test_larger_pages_hold_the_same_codes(three, sealer):
    """What a rank adds to its pages is never read."""
    index = next(i for i, (_, ladder) in enumerate(three) if ladder.page_bytes != agreed(three)[0][0].page_bytes)
    codec, own = three[index]
    if sealer == "compiled" and resolve_impl("auto", "rotated").name != "cpu":
        pytest.skip("no compiler")
    entries = []
    for ladder in (own, agreed(three)[index][0]):
        store, pages = filled(codec, ladder)
        if sealer == "compiled":
            store.seal_with(CompiledSealer(ladder.layouts, store.codec))
        assert store.seal(pages[2:], pages[2:]) == 2
        store.check_integrity()
        entries.append(store.read(pages[2:]))
    assert torch.equal(entries[0].keys, entries[1].keys)
    assert torch.equal(entries[0].values, entries[1].values)


@pytest.fixture
def other_rank(monkeypatch):
    """A second rank, whose part of each exchange is put into the list."""
    said = []
    monkeypatch.setattr(ranks, "gathered", lambda value: [value, *said])
    return said


def test_ranks_with_the_same_page_table_agree(three, other_rank):
    (left, pages), (right, _) = (filled(*three[0]) for _ in range(2))
    for store in (left, right):
        store.seal(pages)
    other_rank.append(ranks.digests_of(right))
    ranks.check_page_tables(left)


def test_a_difference_is_named(three, other_rank):
    (left, pages), (right, _) = (filled(*three[0]) for _ in range(2))
    right.facts.hits[pages[1]] = 1
    other_rank.append(ranks.digests_of(right))
    with pytest.raises(IntegrityError, match="ranks disagree on hits after forward pass 0"):
        ranks.check_page_tables(left)


def test_identity_layers_of_any_rank_are_those_of_all(other_rank):
    other_rank.append((0, 7))
    assert ranks.all_identity_layers((3, 7)) == (0, 3, 7)


def test_one_rank_asks_nobody(monkeypatch):
    monkeypatch.setattr(ranks, "_group", lambda: SimpleNamespace(world_size=1))
    assert ranks.gathered("mine") == ["mine"]
    assert not ranks.checks_ranks()


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinning works here")
def test_lora_pins_nothing_without_a_driver():
    with pytest.raises(RuntimeError):
        torch.zeros(2).pin_memory()
    with Unpinned():
        made = torch.tensor([1, 2], dtype=torch.int32, pin_memory=True)
        assert made.pin_memory() is made
        assert torch.zeros((3,), pin_memory=True).tolist() == [0, 0, 0]
