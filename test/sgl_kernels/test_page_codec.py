"""Sealing and opening pages: against bounds derived from the number formats, and against the letter of the layout."""

import math

import pytest
import torch
from codec_bounds import U32, channel_error, entry_error, entry_norm_bounds, kept, open_by_the_letter, rounding_slack
from torch import Tensor

from sgl_kernels.basis import orthonormal_basis
from sgl_kernels.page_codec.reference import open_layer, open_pages, seal_pages
from sgl_kernels.page_layout import PageGeometry, PageLayout, coded_layout, plain_layout

FORMATS = {"fp8": "e4m3", "fp4": "e2m1", "int4": "int4"}
DIMS = [32, 64, 80, 96, 100, 112, 128, 256]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FLAT, IDENTITY = 0, 1


def geometry(dim: int, heads: int = 1, dtype: torch.dtype = torch.bfloat16) -> PageGeometry:
    """Two layers: layer 0 flat, layer 1 in the identity basis."""
    return PageGeometry(2, heads, dim, 64, dtype, (IDENTITY,))


def layout_of(name: str, g: PageGeometry) -> PageLayout:
    return coded_layout(name, FORMATS[name], g)


def normal(g: PageGeometry, n: int, seed: int = 0) -> Tensor:
    shape = (n, g.num_layers, g.num_kv_heads, g.page_size, g.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hard_pages(g: PageGeometry, seed: int = 0) -> dict[str, Tensor]:
    """One page of each kind that breaks naive codecs, (L, G, S, D) in the model dtype."""
    base = normal(g, 1, seed)[0]
    channel, token, both = base.clone(), base.clone(), base + 3
    channel[..., 3] *= 1000
    token[..., 5, :] *= 1000
    both[..., 7] += 40
    both[..., 9, :] *= 20
    pages = {
        "normal": base,
        "zeros": torch.zeros_like(base),
        "constant": base[..., :1, :].expand_as(base) * 5,
        "channel x1000": channel,
        "token x1000": token,
        "shifted, with outliers": both,
        "tiny": base * 1e-6,
        "large": base * 1e4,
        "one nonzero value": torch.zeros_like(base).index_fill_(-1, torch.tensor([4]), 2.5) * (base == base.max()),
    }
    return {name: page.to(g.dtype) for name, page in pages.items()}


def sealed_and_opened(keys: Tensor, values: Tensor, layout: PageLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Packed bytes, then keys and values that came back, float64."""
    basis = orthonormal_basis(layout.geometry.head_dim)
    packed = seal_pages(keys, values, layout, basis)
    k, v = open_pages(packed, layout, basis)
    return packed, k.double(), v.double()


def assert_within_bounds(keys: Tensor, values: Tensor, layout: PageLayout) -> None:
    basis = orthonormal_basis(layout.geometry.head_dim)
    _, k, v = sealed_and_opened(keys, values, layout)
    k_bound, v_bound = entry_norm_bounds(keys, values, layout, basis)
    assert bool(((k - kept(keys)).norm(dim=-1) <= k_bound).all())
    assert bool(((v - kept(values)).norm(dim=-1) <= v_bound).all())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("dim", DIMS)
def test_what_comes_back_is_within_the_bound_of_the_format(dim, heads, name):
    # A Latin square: every pair of dim, heads, format and dtype occurs.
    dtype = DTYPES[(DIMS.index(dim) + heads + list(FORMATS).index(name)) % 3]
    g = geometry(dim, heads, dtype)
    keys = torch.stack(list(hard_pages(g, seed=1).values()))
    values = torch.stack(list(hard_pages(g, seed=2).values()))
    assert_within_bounds(keys, values, layout_of(name, g))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dim", [64, 80])
def test_each_channel_is_within_its_own_bound(dim, name):
    g = geometry(dim, 2, torch.float32)
    keys = torch.stack(list(hard_pages(g).values()))
    layout = layout_of(name, g)
    wide = orthonormal_basis(dim).double()
    _, k, v = sealed_and_opened(keys, keys, layout)
    x = kept(keys)
    slack = rounding_slack(x)
    assert bool((((v - x) @ wide).abs() <= entry_error(x @ wide, layout.codes) + slack).all())
    assert bool((((k - x)[:, FLAT] @ wide).abs() <= (entry_error(x @ wide, layout.codes) + slack)[:, FLAT]).all())
    assert bool(((k - x)[:, IDENTITY].abs() <= channel_error(x, layout.codes)[:, IDENTITY] + slack[:, IDENTITY]).all())


@pytest.mark.parametrize("name", FORMATS)
def test_the_bound_is_not_an_empty_promise(name):
    """On ordinary data errors reach a fair part of the bound; a bound ten times too wide would hide a lost bit."""
    g = geometry(64, 2, torch.float32)
    keys, values = normal(g, 4, 3), normal(g, 4, 4)
    layout = layout_of(name, g)
    _, k, v = sealed_and_opened(keys, values, layout)
    k_bound, v_bound = entry_norm_bounds(keys, values, layout, orthonormal_basis(64))
    for error, bound in (
        ((k - keys)[:, FLAT], k_bound[:, FLAT]),
        ((k - keys)[:, IDENTITY], k_bound[:, IDENTITY]),
        (v - values, v_bound),
    ):
        assert float((error.norm(dim=-1) / bound).max()) > 0.4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_zeros_come_back_as_zeros(name, dtype):
    g = geometry(64, 2, dtype)
    zeros = torch.zeros(2, 2, 2, 64, 64, dtype=dtype)
    packed, k, v = sealed_and_opened(zeros, zeros, layout_of(name, g))
    identity_keys = k[:, IDENTITY]
    # The sixteen even levels of a channel have no zero: half a step of the smallest scale remains.
    assert float(identity_keys.abs().max()) <= (0 if name == "fp8" else 2.0**-16)
    k[:, IDENTITY] = 0
    assert not k.any()
    assert not v.any()
    assert packed.dtype == torch.uint8


@pytest.mark.parametrize("name", FORMATS)
def test_a_constant_page_is_left_to_the_mean(name):
    """What the rounding of the mean leaves is all that the codes must carry."""
    g = geometry(64, 1, torch.float32)
    x = normal(g, 1)[:, :, :, :1].expand(1, 2, 1, 64, 64)
    _, _, v = sealed_and_opened(x, x, layout_of(name, g))
    # In the basis the residual r of a constant y is at most |y| / 17. FP8 is off by 1/17 of r in each channel; the others
    # by half their widest step, with the scale max|r| / top.
    y = x.double() @ orthonormal_basis(64).double()
    per_channel = y.abs().amax(-1) / 17 * 18 / 17 / {"fp8": 17, "fp4": 6, "int4": 14}[name]
    assert bool(((v - x).norm(dim=-1) <= per_channel * math.sqrt(64)).all())


@pytest.mark.parametrize("name", FORMATS)
def test_an_outlier_channel_is_harmless_where_it_is_constant(name):
    """A channel at 1000 in every token is the page mean's business, not the codes'."""
    g = geometry(64, 1, torch.float32)
    plain = normal(g, 1)
    outlier = plain.clone()
    outlier[..., 3] += 300
    error = {}
    for what, x in (("plain", plain), ("outlier", outlier)):
        _, k, v = sealed_and_opened(x, x, layout_of(name, g))
        error[what] = float((v - x).norm()), float((k - x)[:, IDENTITY].norm())
    # 300 / 8 = 37.5 in each channel of the basis; its E4M3 rounding is at most 37.5 / 17 = 2.2 standard deviations in
    # a residual whose largest is about 2.4: at most twice the scale and so about twice the error, not 300 times.
    assert error["outlier"][0] <= 2.5 * error["plain"][0]
    # An identity layer loses nothing in the other channels.
    k_plain, k_outlier = (sealed_and_opened(x, x, layout_of(name, g))[1] for x in (plain, outlier))
    others = [c for c in range(64) if c != 3]
    assert torch.equal(k_plain[:, IDENTITY][..., others], k_outlier[:, IDENTITY][..., others])


@pytest.mark.parametrize("name", FORMATS)
def test_no_channel_of_an_identity_layer_is_clipped(name):
    """The constant sits at a channel's extreme in every token: clipping it would be an error in all of them."""
    g = geometry(64, 2, torch.float32)
    keys = normal(g, 8, 12) + 40 * normal(g, 8, 13)[..., :1, :]
    layout = layout_of(name, g)
    packed = seal_pages(keys, keys, layout, orthonormal_basis(64))
    opened = open_layer(packed.view(8, 2, -1)[:, IDENTITY], layout, IDENTITY)
    reach = opened.k_scales * (448.0 if name == "fp8" else 7.5)
    assert bool(((keys[:, IDENTITY] - opened.k_means).abs() <= reach * (1 + 4 * U32)).all())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, 3e38], ids=str)
@pytest.mark.parametrize("whole_token", [False, True])
def test_a_broken_token_stays_within_the_bound_of_the_page(name, broken, whole_token):
    g = geometry(64, 2, torch.float32)
    keys, values = normal(g, 2, 5), normal(g, 2, 6)
    for x in (keys, values):
        if whole_token:
            x[0, :, :, 11] = broken
        else:
            x[0, :, :, 11, 7] = broken
    assert_within_bounds(keys, values, layout_of(name, g))
    packed, k, v = sealed_and_opened(keys, values, layout_of(name, g))
    assert bool(k.isfinite().all())
    assert bool(v.isfinite().all())
    # Another page, sealed in the same call, does not notice.
    _, k_alone, v_alone = sealed_and_opened(keys[1:], values[1:], layout_of(name, g))
    assert float((k[1:] - k_alone).abs().max()) <= float(rounding_slack(keys[1:]).max())
    assert float((v[1:] - v_alone).abs().max()) <= float(rounding_slack(values[1:]).max())
    assert packed.shape == (2, layout_of(name, g).page_bytes)


@pytest.mark.parametrize("name", FORMATS)
def test_a_nan_token_costs_its_neighbours_nothing(name):
    """NaN is stored as 0, so the rest of the page is as good as if the token had been zeros."""
    g = geometry(64, 1, torch.float32)
    keys = normal(g, 1, 7)
    with_zeros = keys.clone()
    keys[..., 20, :], with_zeros[..., 20, :] = math.nan, 0.0
    layout, basis = layout_of(name, g), orthonormal_basis(64)
    assert torch.equal(seal_pages(keys, keys, layout, basis), seal_pages(with_zeros, with_zeros, layout, basis))


@pytest.mark.parametrize("dim", [32, 256])
@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_values_still_have_a_scale(name, dim):
    """Saturated values of one sign add up to 2^15 sqrt(D) in one channel of the basis; UE5M3 must reach it."""
    g = PageGeometry(1, 1, dim, 64, torch.float32)
    x = torch.full((1, 1, 1, 64, dim), 1e38)
    x[:, :, :, ::2] = -1e38
    assert_within_bounds(x, x, layout_of(name, g))


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sealing_leaves_its_inputs_alone(dtype):
    g = geometry(64, 1, dtype)
    keys, values = normal(g, 2, 1).to(dtype), normal(g, 2, 2).to(dtype)
    keys[0, 0, 0, 0, 0] = math.nan
    before = keys.clone(), values.clone()
    seal_pages(keys, values, layout_of("fp4", g), orthonormal_basis(64))
    assert torch.equal(keys.nan_to_num(), before[0].nan_to_num())
    assert torch.equal(values, before[1])


def test_strided_inputs_seal_to_the_same_bytes():
    g = geometry(64, 2)
    layout, basis = layout_of("fp4", g), orthonormal_basis(64)
    pair = torch.stack((normal(g, 2, 1), normal(g, 2, 2)), 3)
    strided = seal_pages(pair[:, :, :, 0], pair[:, :, :, 1], layout, basis)
    dense = seal_pages(pair[:, :, :, 0].contiguous(), pair[:, :, :, 1].contiguous(), layout, basis)
    assert torch.equal(strided, dense)


@pytest.mark.parametrize("name", FORMATS)
def test_no_page_is_fine_too(name):
    g = geometry(64)
    layout, basis = layout_of(name, g), orthonormal_basis(64)
    empty = torch.empty(0, 2, 1, 64, 64)
    packed = seal_pages(empty, empty, layout, basis)
    assert packed.shape == (0, layout.page_bytes)
    assert open_pages(packed, layout, basis)[0].shape == empty.shape


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layer", [FLAT, IDENTITY])
@pytest.mark.parametrize("dim", [64, 96, 256])
def test_the_folded_logit_is_the_dot_product_with_the_opened_key(dim, layer, name):
    """logit = q' . mean + s_e (q' . code_e) with q' = H q, and q . mid + sum_c (q_c s_c) code in an identity layer."""
    g = geometry(dim, 2)
    layout, basis = layout_of(name, g), orthonormal_basis(dim)
    keys, values = (torch.stack(list(hard_pages(g, seed).values())) for seed in (3, 4))
    packed = seal_pages(keys, values, layout, basis)
    opened = open_layer(packed.view(-1, 2, layout.layer_bytes)[:, layer], layout, layer)
    query = torch.randn(5, dim, generator=torch.Generator().manual_seed(5))
    q = query if layer == IDENTITY else query @ basis
    if layer == IDENTITY:
        folded = (q * opened.k_scales) @ opened.k_codes.transpose(-1, -2)
    else:
        folded = (q @ opened.k_codes.transpose(-1, -2)) * opened.k_scales.transpose(-1, -2)
    folded = folded + q @ opened.k_means.transpose(-1, -2)
    want_k, want_v = open_by_the_letter(packed, layout, basis)
    oracle = query.double() @ want_k[:, layer].transpose(-1, -2)
    # Two dot products of length D, of vectors that are at most |q| and |k| + 2 |mean| long, and the basis once.
    size = want_k[:, layer].norm(dim=-1) + 2 * opened.k_means.double().norm(dim=-1)
    bound = (2 * dim + 16) * U32 * query.double().norm(dim=-1)[:, None] * size[:, :, None, :]
    assert bool(((folded - oracle).abs() <= bound).all())
    # Values: the weighted sum in the basis, through the basis once.
    p = torch.softmax(torch.randn(1, 1, 5, 64, generator=torch.Generator().manual_seed(6)), -1)
    out = ((p * opened.v_scales.transpose(-1, -2)) @ opened.v_codes + p.sum(-1, keepdim=True) * opened.v_means) @ basis
    size = want_v[:, layer].norm(dim=-1).amax(-1) + 2 * opened.v_means.double().norm(dim=-1).amax(-1)
    bound = (2 * 64 + dim + 16) * U32 * size[..., None, None]
    assert bool(((out - p.double() @ want_v[:, layer]).abs() <= bound).all())
