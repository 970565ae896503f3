"""Where the parts of a page lie: the documented sizes, and pages decoded by the letter of the layout."""

import pytest
import torch
from codec_bounds import BITS, U32, kept, open_by_the_letter, piece_parts, rounding_slack
from hard_pages import (
    DIMS,
    FORMATS,
    PAGE_SIZES,
    bases_of,
    entries_of,
    geometry,
    hard_entries,
    layout_of,
    normal,
    sealed_and_opened,
)

from sgl_kernels.cpu.tables import piece_table
from sgl_kernels.errors import PageLayoutError
from sgl_kernels.page_codec.reference import Entries, open_pages, seal_pages
from sgl_kernels.page_layout import KeyClass, PageGeometry, coded_layout, plain_layout, reduced_layout

CLASSES = (KeyClass("int4", 24), KeyClass("lloyd2", 24))


def test_page_bytes_are_the_documented_numbers():
    g = PageGeometry(1, 1, 64, 64, torch.bfloat16)
    sizes = {name: layout_of(name, g).page_bytes for name in ("fp8", "k8v4", "fp4", "int4")}
    assert sizes == {"fp8": 8448, "k8v4": 6400, "fp4": 4352, "int4": 4352}
    sizes = {merge: reduced_layout("reduced", (CLASSES,), "lloyd2", merge, g).page_bytes for merge in (1, 2, 4)}
    # Keys of 24 channels in 4 and 24 in 2 bits, values in 2; two key scales, a value scale and, if merged, a bias an entry.
    codes = {merge: 64 // merge * (24 * 4 + 24 * 2 + 64 * 2) // 8 for merge in (1, 2, 4)}
    metadata = {1: 3 * 64 + 2 * 64, 2: 4 * 32 + 2 * 64, 4: 4 * 16 + 2 * 64}
    padding = {1: 0, 2: 0, 4: 32}
    assert sizes == {merge: codes[merge] + metadata[merge] + padding[merge] for merge in (1, 2, 4)}
    assert sizes == {1: 2496, 2: 1344, 4: 768}
    assert plain_layout("bf16", g).page_bytes == 16384
    assert layout_of("fp4", g).metadata_bytes == layout_of("fp8", g).metadata_bytes == 256
    many = PageGeometry(30, 3, 64, 64, torch.bfloat16)
    assert layout_of("fp4", many).page_bytes == 30 * 3 * 4352
    # A head dim no larger than the page: the identity basis costs no bytes.
    assert layout_of("fp4", PageGeometry(30, 3, 64, 64, torch.bfloat16, (0,))).page_bytes == 30 * 3 * 4352


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("size", PAGE_SIZES)
@pytest.mark.parametrize("dim", [*DIMS, 34, 254])
def test_parts_and_pieces_are_where_the_letter_says(dim, size, heads, name):
    g = geometry(dim, heads, size=size)
    layout = layout_of(name, g)
    assert len(layout.heads) == 2 * heads
    start, value_bits = 0, 0
    for index, head in enumerate(layout.heads):
        parts = piece_parts(head)
        piece_bytes = parts.pop("piece")[1]
        offsets = {name: at for name, at in head.offsets.items() if name in parts}
        assert offsets == {name: at for name, (at, _) in parts.items()}
        assert head.offsets["end"] == sum(part for _, part in parts.values()) <= piece_bytes == head.piece_bytes
        assert piece_bytes % 64 == 0
        assert layout.piece_offsets[index] == start
        start += piece_bytes
        bits = sum(BITS[c.kind] * c.channels for c in head.key_classes) + BITS[head.value_kind] * dim
        value_bits += bits * head.entries
    assert layout.page_bytes == layout.piece_offsets[-1] == start < plain_layout("bf16", g).page_bytes
    assert layout.metadata_bytes == layout.page_bytes - value_bits // 8
    for layer in (0, 1):
        first, size_of_layer = layout.layer_range(layer)
        assert (first, first + size_of_layer) == (
            layout.piece_offsets[layer * heads],
            layout.piece_offsets[(layer + 1) * heads],
        )
        assert layout.layer_heads(layer) == layout.heads[layer * heads : (layer + 1) * heads]


@pytest.mark.parametrize("name", FORMATS)
def test_pieces_that_look_alike_are_grouped_once(name):
    layout = layout_of(name, geometry(64, 4))
    seen = [index for _, indices in layout.head_groups for index in indices]
    assert sorted(seen) == list(range(8))
    assert all(layout.heads[index] == head for head, indices in layout.head_groups for index in indices)
    assert len({head for head, _ in layout.head_groups}) == len(layout.head_groups)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("dim", "heads", "size"), [(32, 1, 64), (64, 3, 32), (80, 2, 64), (128, 1, 128), (256, 2, 32), (100, 1, 64), (34, 3, 32)]
)
def test_opening_follows_the_letter_of_the_layout(dim, heads, size, name):
    g = geometry(dim, heads, size=size)
    layout, bases = layout_of(name, g), bases_of(g)
    keys, values = hard_entries(layout, 8)
    packed, k, v = sealed_and_opened(keys, values, layout)
    want = open_by_the_letter(packed, layout, bases)
    assert bool(((k - want.keys).abs() <= rounding_slack(kept(keys))).all())
    assert bool(((v - want.values).abs() <= rounding_slack(kept(values))).all())
    bias = open_pages(packed, layout, bases).bias
    assert (bias is None) == (want.bias is None) == (not layout.is_merged)
    if bias is not None:
        assert torch.equal(bias.double(), want.bias)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", PAGE_SIZES)
def test_every_byte_of_a_page_opens_to_something_readable(size, name):
    """Random bytes (no NaN codes): opening is total and follows the letter, whatever the codes are."""
    g = geometry(64, 3, size=size)
    layout, bases = layout_of(name, g), bases_of(g)
    packed = torch.randint(0, 256, (2, layout.page_bytes), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    packed[packed & 0x7F == 0x7F] = 1
    got, want = open_pages(packed, layout, bases), open_by_the_letter(packed, layout, bases)
    for x, y, means in ((got.keys, want.keys, want.key_means), (got.values, want.values, want.value_means)):
        norm = y.norm(dim=-1, keepdim=True)
        # A sum of codes times scales and of a mean, each at most as large as an entry or the mean; the bases once.
        largest = norm + norm.amax((-1, -2), keepdim=True) + 2 * means.norm(dim=-1)[..., None, None]
        assert bool(((x - y).abs() <= (64 + 8) * U32 * largest).all())


@pytest.mark.parametrize("name", FORMATS)
def test_padding_bytes_are_zero_and_sealing_is_repeatable(name):
    g = geometry(80, 3, size=32)
    layout, bases = layout_of(name, g), bases_of(g)
    entries = entries_of(normal(layout, 3, 1), normal(layout, 3, 2), layout)
    packed = seal_pages(entries, layout, bases)
    assert any(head.offsets["end"] < head.piece_bytes for head in layout.heads)
    for head, start, end in zip(layout.heads, layout.piece_offsets, layout.piece_offsets[1:], strict=False):
        assert not packed[:, start + head.offsets["end"] : end].any()
    assert torch.equal(packed, seal_pages(entries, layout, bases))


def test_a_page_may_have_heads_of_many_classes():
    """Heads of a layer that differ are opened one by one."""
    g = PageGeometry(1, 3, 64, 64, torch.bfloat16)
    layout = reduced_layout("csa2-2x", (CLASSES, (KeyClass("lloyd2", 64),), CLASSES), "lloyd2", 1, g)
    # Two bits a channel are 16 bytes an entry instead of 18, and one scale instead of two.
    assert layout.piece_offsets == (0, 2496, 2496 + 2304, 2496 + 2304 + 2496)
    assert [indices for _, indices in layout.head_groups] == [(0, 2), (1,)]


def test_identity_layers_take_the_first_byte_of_the_kind_that_fits():
    g = PageGeometry(2, 1, 64, 64, torch.bfloat16, (1,))
    kinds = {
        name: [(h.basis, h.key_classes[0].kind, h.value_kind, h.channel_scales) for h in layout_of(name, g).heads]
        for name in FORMATS
    }
    assert kinds["fp8"] == [("flat", "e4m3", "e4m3", False), ("identity", "e4m3", "e4m3", True)]
    assert kinds["k8v4"] == [("flat", "e4m3", "e2m1", False), ("identity", "e4m3", "e2m1", True)]
    assert kinds["fp4"] == [("flat", "e2m1", "e2m1", False), ("identity", "int4_asymmetric", "e2m1", True)]
    assert kinds["int4"] == [("flat", "int4", "int4", False), ("identity", "int4_asymmetric", "int4", True)]
    for name, entries in (("csa2-2x", 64), ("csa2-4x", 32), ("csa2-8x", 16)):
        assert kinds[name] == [("reduced", "int4", "lloyd2", False), ("identity", "int4_asymmetric", "lloyd2", True)]
        assert [head.entries for head in layout_of(name, g).heads] == [entries, entries] == [layout_of(name, g).entries] * 2
        assert [head.merged for head in layout_of(name, g).heads] == [entries < 64] * 2


def test_what_a_plain_page_says_of_itself():
    g = PageGeometry(3, 2, 64, 64, torch.float16)
    plain = plain_layout("fp16", g)
    assert plain.is_plain
    assert (plain.entries, plain.is_merged, plain.metadata_bytes) == (64, False, 0)
    assert plain.page_bytes == 3 * 2 * 2 * 64 * 64 * 2
    assert plain.layer_range(2) == (2 * 2 * 2 * 64 * 64 * 2, 2 * 2 * 64 * 64 * 2)
    assert plain.layer_basis(0) == "identity"
    coded = coded_layout("fp8", "e4m3", "e4m3", g)
    assert [coded.layer_basis(layer) for layer in range(3)] == ["flat"] * 3


def test_a_layout_with_3_bit_codes_is_refused():
    g = PageGeometry(1, 1, 64, 64, torch.bfloat16)
    for make in (
        lambda: coded_layout("int3", "int3", "int4", g),
        lambda: coded_layout("int3", "int4", "int3", g),
        lambda: reduced_layout("reduced", ((KeyClass("int4", 24), KeyClass("int3", 24)),), "lloyd2", 1, g),
    ):
        with pytest.raises(PageLayoutError, match="'int3' has codes of 3 bits"):
            make()


def test_a_layout_with_integers_of_2_bits():
    """No format of the ladder has them, but pages hold them: as many bytes as `lloyd2`, each channel off by half a step."""
    g = PageGeometry(1, 2, 64, 64, torch.bfloat16)
    layout, bases = coded_layout("int2", "int2", "int2", g), bases_of(g)
    assert layout.page_bytes == coded_layout("lloyd2", "lloyd2", "lloyd2", g).page_bytes
    x = normal(layout, 3, 1)
    opened = open_pages(seal_pages(Entries(x, x, None), layout, bases), layout, bases)
    wide = bases.flat.double()
    y = x.double() @ wide
    for got, mean in ((opened.keys, y.mean(-2, keepdim=True)), (opened.values, torch.zeros(1))):
        # Scale: the largest of what the mean leaves, over 1.5, of a mean and a scale that are each stored off by 1/17 at
        # most; 2^-10 is half the distance of E4M3's smallest numbers. Half a step; clipping loses less.
        largest = ((y - mean).abs() + mean.abs() / 17 + 2.0**-10).amax(-1, keepdim=True)
        assert bool(((got.double() @ wide - y).abs() <= largest / 1.5 * 18 / 17 / 2 + rounding_slack(x)).all())
    with pytest.raises(ValueError, match="'int2': the compiled kernels read plain, e4m3"):
        piece_table([layout], bases)
