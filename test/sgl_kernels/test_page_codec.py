"""Sealing and opening pages: against bounds derived from the number formats."""

import math

import pytest
import torch
from codec_bounds import U32, channel_error, entry_error, entry_norm_bounds, kept, open_by_the_letter, rounding_slack
from hard_pages import DIMS, DTYPES, FLAT, FORMATS, IDENTITY, geometry, hard_pages, layout_of, normal, sealed_and_opened
from torch import Tensor

from sgl_kernels.basis import orthonormal_basis
from sgl_kernels.page_codec.reference import open_layer, open_pages, seal_pages
from sgl_kernels.page_layout import PageGeometry, PageLayout


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
