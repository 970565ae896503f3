"""Where the parts of a page lie: the documented sizes, and pages decoded by the letter of the layout."""

import pytest
import torch
from codec_bounds import U32, kept, open_by_the_letter, rounding_slack
from hard_pages import DIMS, FORMATS, geometry, hard_pages, layout_of, normal, sealed_and_opened

from sgl_kernels.basis import orthonormal_basis
from sgl_kernels.page_codec.reference import open_pages, seal_pages
from sgl_kernels.page_layout import PageGeometry, plain_layout


def test_page_bytes_are_the_documented_numbers():
    g = PageGeometry(1, 1, 64, 64, torch.bfloat16)
    sizes = {name: layout_of(name, g).page_bytes for name in FORMATS}
    assert sizes == {"fp8": 8448, "fp4": 4352, "int4": 4352}
    assert plain_layout("bf16", g).page_bytes == 16384
    assert layout_of("fp4", g).bits_per_value == 4.25
    assert layout_of("fp8", g).bits_per_value == 8.25
    assert layout_of("fp4", g).metadata_bytes == layout_of("fp8", g).metadata_bytes == 256
    many = PageGeometry(30, 3, 64, 64, torch.bfloat16)
    assert layout_of("fp4", many).page_bytes == 30 * 3 * 4352
    # A head dim no larger than the page: the identity basis costs no bytes.
    assert layout_of("fp4", PageGeometry(30, 3, 64, 64, torch.bfloat16, (0,))).page_bytes == 30 * 3 * 4352


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("heads", [1, 2, 3, 8])
@pytest.mark.parametrize("dim", [*DIMS, 34, 254])
@pytest.mark.parametrize("identity", [(), (0,)])
def test_parts_fill_the_block_without_overlap(dim, heads, name, identity):
    g = PageGeometry(2, heads, dim, 64, torch.bfloat16, identity)
    layout = layout_of(name, g)
    code = dim if name == "fp8" else dim // 2
    scales = max(64, dim) if identity else 64
    sizes = {
        "k_codes": heads * 64 * code,
        "v_codes": heads * 64 * code,
        "k_scales": heads * scales,
        "v_scales": heads * 64,
        "k_means": heads * dim,
        "v_means": heads * dim,
    }
    starts = dict(layout.offsets)
    end = starts.pop("end")
    assert set(starts) == set(sizes)
    covered = sorted((start, start + sizes[part]) for part, start in starts.items())
    assert [low for low, _ in covered] == [0, *[high for _, high in covered[:-1]]]
    assert covered[-1][1] == end <= layout.layer_bytes < end + 256
    assert layout.layer_bytes % 256 == 0
    assert layout.page_bytes == 2 * layout.layer_bytes < plain_layout("bf16", g).page_bytes
    assert layout.metadata_bytes == layout.page_bytes - 2 * 2 * heads * 64 * code


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("dim", "heads"), [(32, 1), (64, 3), (80, 2), (128, 1), (256, 2)])
def test_opening_follows_the_letter_of_the_layout(dim, heads, name):
    g = geometry(dim, heads)
    layout, basis = layout_of(name, g), orthonormal_basis(dim)
    keys, values = (torch.stack(list(hard_pages(g, seed).values())) for seed in (8, 9))
    packed, k, v = sealed_and_opened(keys, values, layout)
    want_k, want_v = open_by_the_letter(packed, layout, basis)
    assert bool(((k - want_k).abs() <= rounding_slack(kept(keys))).all())
    assert bool(((v - want_v).abs() <= rounding_slack(kept(values))).all())


@pytest.mark.parametrize("name", FORMATS)
def test_every_byte_of_a_page_opens_to_something_readable(name):
    """Random bytes (no NaN codes): opening is total and follows the letter, whatever the codes are."""
    g = geometry(64, 2)
    layout, basis = layout_of(name, g), orthonormal_basis(64)
    packed = torch.randint(0, 256, (2, layout.page_bytes), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    packed[packed & 0x7F == 0x7F] = 1
    k, v = open_pages(packed, layout, basis)
    want_k, want_v = open_by_the_letter(packed, layout, basis)
    for got, want in ((k, want_k), (v, want_v)):
        size = want.norm(dim=-1, keepdim=True)
        assert bool(((got - want).abs() <= (64 + 8) * U32 * (size + size.max())).all())


@pytest.mark.parametrize("name", FORMATS)
def test_padding_bytes_are_zero_and_sealing_is_repeatable(name):
    g = geometry(80, 3)
    layout, basis = layout_of(name, g), orthonormal_basis(80)
    keys, values = normal(g, 3, 1), normal(g, 3, 2)
    packed = seal_pages(keys, values, layout, basis)
    blocks = packed.view(3, 2, layout.layer_bytes)
    assert layout.offsets["end"] < layout.layer_bytes
    assert not blocks[:, :, layout.offsets["end"] :].any()
    assert torch.equal(packed, seal_pages(keys, values, layout, basis))
