"""Sealing and opening pages: against bounds derived from the number formats."""

import math

import pytest
import torch
from codec_bounds import (
    U32,
    channel_error,
    entry_error,
    entry_norm_bounds,
    kept,
    open_by_the_letter,
    reduced_error,
    rounding_slack,
    shares_of,
)
from hard_pages import (
    DIMS,
    DTYPES,
    EXACT_ZERO,
    FLAT,
    FORMATS,
    IDENTITY,
    PAGE_SIZES,
    bases_of,
    biases,
    entries_of,
    geometry,
    hard_entries,
    in_layer,
    layout_of,
    normal,
    sealed_and_opened,
    weights,
)
from torch import Tensor

from sgl_kernels.page_codec.reference import Entries, open_layer, open_pages, seal_pages
from sgl_kernels.page_layout import PageGeometry, PageLayout


def assert_within_bounds(keys: Tensor, values: Tensor, layout: PageLayout) -> None:
    """With weights and without."""
    for weight in (None, weights(layout, len(keys))):
        _, k, v = sealed_and_opened(keys, values, layout, weight)
        k_bound, v_bound = entry_norm_bounds(keys, values, layout, bases_of(layout.geometry), weight)
        assert bool(((k - kept(keys)).norm(dim=-1) <= k_bound).all())
        assert bool(((v - kept(values)).norm(dim=-1) <= v_bound).all())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("dim", DIMS)
def test_what_comes_back_is_within_the_bound_of_the_format(dim, heads, name):
    # A Latin square: every pair of dim, heads, format, dtype and page size occurs.
    turn = DIMS.index(dim) + heads + FORMATS.index(name)
    layout = layout_of(name, geometry(dim, heads, DTYPES[turn % 3], PAGE_SIZES[(turn // 3 + heads) % 3]))
    assert_within_bounds(*hard_entries(layout, 1), layout)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dim", [64, 80])
def test_each_channel_is_within_its_own_bound(dim, name):
    layout = layout_of(name, geometry(dim, 3, torch.float32))
    keys, values = hard_entries(layout)
    bases = bases_of(layout.geometry)
    wide = bases.flat.double()
    weight = weights(layout, len(keys))
    _, k, v = sealed_and_opened(keys, values, layout, weight)
    x, y = kept(keys), kept(values)
    k_share, v_share = shares_of(weight, x, plain=True), shares_of(weight, y, plain=False)
    slack = rounding_slack(y)
    for index, head in enumerate(layout.heads):
        bound = entry_error(y[:, index] @ wide, head.value_kind, v_share[:, index])
        assert bool((((v - y)[:, index] @ wide).abs() <= bound + slack[:, index]).all())
        error, kind, slack_k = (k - x)[:, index], head.key_classes[0].kind, rounding_slack(x)[:, index]
        if head.basis == "identity":
            assert bool((error.abs() <= channel_error(x[:, index], kind) + slack_k).all())
        elif head.basis == "flat":
            assert bool(((error @ wide).abs() <= entry_error(x[:, index] @ wide, kind, k_share[:, index]) + slack_k).all())
        else:
            columns = bases.reduced[index, :, : head.key_channels]
            bound, lost = reduced_error(x[:, index], head, columns, k_share[:, index])
            inside = error @ columns.double()
            assert bool((inside.abs() <= bound + slack_k).all())
            outside = error - inside @ columns.double().T
            assert bool((outside.norm(dim=-1) <= lost + slack_k[..., 0] * math.sqrt(dim)).all())


@pytest.mark.parametrize("name", FORMATS)
def test_the_bound_is_not_an_empty_promise(name):
    """On ordinary data errors reach a fair part of the bound; a bound ten times too wide would hide a lost bit."""
    layout = layout_of(name, geometry(64, 3, torch.float32))
    keys, values = normal(layout, 4, 3), normal(layout, 4, 4)
    for weight in (None, weights(layout, 4)):
        _, k, v = sealed_and_opened(keys, values, layout, weight)
        k_bound, v_bound = entry_norm_bounds(keys, values, layout, bases_of(layout.geometry), weight)
        for index in range(6):
            assert float(((k - keys).norm(dim=-1) / k_bound)[:, index].max()) > 0.4
            assert float(((v - values).norm(dim=-1) / v_bound)[:, index].max()) > 0.4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("weighted", [False, True])
def test_zeros_come_back_as_zeros(weighted, name, dtype):
    layout = layout_of(name, geometry(64, 3, dtype))
    zeros = torch.zeros_like(normal(layout, 2)).to(dtype)
    packed, k, v = sealed_and_opened(zeros, zeros, layout, weights(layout, 2) if weighted else None)
    # The sixteen even levels of a channel have no zero: half a step of the smallest scale remains.
    eight_bit_keys = name in ("fp8", "k8v4")
    assert float(in_layer(k, layout, IDENTITY).abs().max()) <= (0 if eight_bit_keys else 2.0**-16)
    # Nor have the four levels of two bits: the inner one remains in every channel of the basis.
    inner = 0 if name in EXACT_ZERO else 0.4528 * 2.0**-15 * 8 * (1 + 64 * U32)
    assert float(in_layer(k, layout, FLAT).norm(dim=-1).max()) <= inner
    assert float(v.norm(dim=-1).max()) <= inner
    assert packed.dtype == torch.uint8


@pytest.mark.parametrize("name", FORMATS)
def test_a_constant_page_is_left_to_the_mean(name):
    """What the rounding of the mean leaves is all that the codes must carry."""
    layout = layout_of(name, geometry(64, 1, torch.float32))
    x = normal(layout, 1)[..., :1, :].expand(1, 2, layout.entries, 64)
    _, k, v = sealed_and_opened(x, x, layout, weights(layout, 1))
    # In the basis of the mean the residual r of a constant y is at most |y| / 17. Codes make it smaller: FP8 is off by
    # 1/17 of r in each channel, the others by half their widest step, with the scale max|r| / top. Two bits have the scale
    # rms(r): |error|^2 <= sum of (0.56 rms)^2 and r^2, which is (1 + 0.56^2) |r|^2. What is left out is |r| itself.
    in_flat_basis = x.double() @ bases_of(layout.geometry).flat.double()
    share = {"fp8": 1 / 17, "k8v4": 1 / 6, "fp4": 1 / 6, "int4": 1 / 14}
    if name in share:
        per_channel = in_flat_basis.abs().amax(-1) / 17 * 18 / 17 * share[name]
        assert bool(((v - x).norm(dim=-1) <= per_channel * math.sqrt(64)).all())
        keys = in_layer(k - x, layout, FLAT)
        assert bool((keys.norm(dim=-1) <= in_layer(per_channel * math.sqrt(64), layout, FLAT)).all())
        return
    left = x.double().norm(dim=-1) / 17 * math.sqrt(1 + 0.56**2)
    assert bool((in_layer((k - x).norm(dim=-1), layout, FLAT) <= in_layer(left, layout, FLAT)).all())
    assert bool(((v - x).norm(dim=-1) <= left).all())


@pytest.mark.parametrize("name", FORMATS)
def test_an_outlier_channel_is_harmless_where_it_is_constant(name):
    """A channel at 300 in every token is the page mean's business, not the codes'."""
    layout = layout_of(name, geometry(64, 1, torch.float32))
    plain = normal(layout, 1)
    outlier = plain.clone()
    outlier[..., 3] += 300
    error, even = {}, torch.ones(1, 2, layout.entries)
    for what, x in (("plain", plain), ("outlier", outlier)):
        _, _, v = sealed_and_opened(x, x, layout, even)
        error[what] = float((v - x).norm())
    # 300 / 8 = 37.5 in each channel of the basis; its E4M3 rounding is at most 37.5 / 17 = 2.2 standard deviations in
    # a residual whose largest is about 2.4: at most twice the scale and so about twice the error, not 300 times.
    assert error["outlier"] <= 2.5 * error["plain"]
    # An identity layer loses nothing in the other channels.
    k_plain, k_outlier = (in_layer(sealed_and_opened(x, x, layout)[1], layout, IDENTITY) for x in (plain, outlier))
    others = [c for c in range(64) if c != 3]
    assert torch.equal(k_plain[..., others], k_outlier[..., others])


@pytest.mark.parametrize("name", FORMATS)
def test_no_channel_of_an_identity_layer_is_clipped(name):
    """The constant sits at a channel's extreme in every token: clipping it would be an error in all of them."""
    layout = layout_of(name, geometry(64, 2, torch.float32))
    keys = normal(layout, 8, 12) + 40 * normal(layout, 8, 13)[..., :1, :]
    _, k, _ = sealed_and_opened(keys, keys, layout)
    # Half a step of (max - min) / 2 / 7.5, which is stored at most 9/8 as large; the extremes are no worse than the rest.
    error, bound = (k - keys).abs(), channel_error(kept(keys), layout.heads[-1].key_classes[0].kind)
    extreme = (keys == keys.amax(-2, keepdim=True)) | (keys == keys.amin(-2, keepdim=True))
    beyond = (error - bound - rounding_slack(kept(keys)))[extreme.logical_and(torch.arange(4)[:, None, None] >= 2)]
    assert beyond.numel() >= 2 * 8 * 2 * 64
    assert float(beyond.max()) <= 0


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, 3e38], ids=str)
@pytest.mark.parametrize("whole_token", [False, True])
def test_a_broken_token_stays_within_the_bound_of_the_page(name, broken, whole_token):
    layout = layout_of(name, geometry(64, 3, torch.float32))
    keys, values = normal(layout, 2, 5), normal(layout, 2, 6)
    for x in (keys, values):
        if whole_token:
            x[0, :, 11] = broken
        else:
            x[0, :, 11, 7] = broken
    assert_within_bounds(keys, values, layout)
    packed, k, v = sealed_and_opened(keys, values, layout)
    assert bool(k.isfinite().all())
    assert bool(v.isfinite().all())
    # Another page, sealed in the same call, does not notice.
    bases = bases_of(layout.geometry)
    entries = entries_of(keys, values, layout)
    bias = None if entries.bias is None else entries.bias[1:]
    alone = open_pages(seal_pages(Entries(keys[1:], values[1:], bias), layout, bases), layout, bases)
    assert float((k[1:] - alone.keys).abs().max()) <= float(rounding_slack(keys[1:]).max())
    assert float((v[1:] - alone.values).abs().max()) <= float(rounding_slack(values[1:]).max())
    assert packed.shape == (2, layout.page_bytes)


@pytest.mark.parametrize("name", FORMATS)
def test_a_nan_token_costs_its_neighbours_nothing(name):
    """NaN is stored as 0, so the rest of the page is as good as if the token had been zeros."""
    layout = layout_of(name, geometry(64, 1, torch.float32))
    keys = normal(layout, 1, 7)
    with_zeros = keys.clone()
    keys[..., 11, :], with_zeros[..., 11, :] = math.nan, 0.0
    bases = bases_of(layout.geometry)
    packed = [seal_pages(entries_of(x, x, layout), layout, bases, weights(layout, 1)) for x in (keys, with_zeros)]
    assert torch.equal(*packed)


@pytest.mark.parametrize("dim", [32, 256])
@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_values_still_have_a_scale(name, dim):
    """Saturated values of one sign add up to 2^15 sqrt(D) in one channel of the basis; UE5M3 must reach it."""
    layout = layout_of(name, PageGeometry(1, 1, dim, 64, torch.float32))
    x = torch.full((1, 1, layout.entries, dim), 1e38)
    x[:, :, ::2] = -1e38
    assert_within_bounds(x, x, layout)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["fp4", "csa2-4x"])
def test_sealing_leaves_its_inputs_alone(name, dtype):
    layout = layout_of(name, geometry(64, 1, dtype))
    keys, values = normal(layout, 2, 1).to(dtype), normal(layout, 2, 2).to(dtype)
    keys[0, 0, 0, 0] = math.nan
    entries = entries_of(keys, values, layout)
    before = keys.clone(), values.clone(), None if entries.bias is None else entries.bias.clone()
    weight = weights(layout, 2)
    seal_pages(entries, layout, bases_of(layout.geometry), weight)
    assert torch.equal(weight, weights(layout, 2))
    assert torch.equal(keys.nan_to_num(), before[0].nan_to_num())
    assert torch.equal(values, before[1])
    assert entries.bias is before[2] is None or torch.equal(entries.bias, before[2])


@pytest.mark.parametrize("name", FORMATS)
def test_strided_inputs_seal_to_the_same_bytes(name):
    layout = layout_of(name, geometry(64, 2))
    bases, bias = bases_of(layout.geometry), biases(layout, 2)
    pair = torch.stack((normal(layout, 2, 1), normal(layout, 2, 2)), 2)
    strided = seal_pages(Entries(pair[:, :, 0], pair[:, :, 1], bias), layout, bases)
    dense = seal_pages(Entries(pair[:, :, 0].contiguous(), pair[:, :, 1].contiguous(), bias), layout, bases)
    assert torch.equal(strided, dense)


@pytest.mark.parametrize("name", FORMATS)
def test_no_page_is_fine_too(name):
    layout = layout_of(name, geometry(64))
    bases = bases_of(layout.geometry)
    empty = normal(layout, 0)
    packed = seal_pages(entries_of(empty, empty, layout), layout, bases)
    assert packed.shape == (0, layout.page_bytes)
    assert open_pages(packed, layout, bases).keys.shape == empty.shape


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layer", [FLAT, IDENTITY])
@pytest.mark.parametrize("dim", [64, 96, 256])
def test_an_opened_layer_is_in_the_basis_that_it_says(dim, layer, name):
    """With q' = H q where the keys are in the flat basis: q' . key is the logit; values come back through the basis."""
    layout = layout_of(name, geometry(dim, 3))
    bases = bases_of(layout.geometry)
    keys, values = hard_entries(layout, 3)
    packed = sealed_and_opened(keys, values, layout, weights(layout, len(keys)))[0]
    start, size = layout.layer_range(layer)
    opened = open_layer(packed[:, start : start + size].contiguous(), layout, layer, bases)
    letter = open_by_the_letter(packed, layout, bases)
    want_k, want_v, k_means, v_means = (
        in_layer(x, layout, layer) for x in (letter.keys, letter.values, letter.key_means, letter.value_means)
    )
    query = torch.randn(5, dim, generator=torch.Generator().manual_seed(5))
    folded = (query @ bases.flat if layout.layer_basis(layer) == "flat" else query) @ opened.keys.transpose(-1, -2)
    oracle = query.double() @ want_k.transpose(-1, -2)
    # Two dot products of length D, of vectors that are at most |q| and |k| + 2 |mean| long, and the basis once.
    length = want_k.norm(dim=-1) + 2 * k_means.norm(dim=-1)[..., None]
    bound = (2 * dim + 16) * U32 * query.double().norm(dim=-1)[:, None] * length[:, :, None, :]
    assert bool(((folded - oracle).abs() <= bound).all())
    # Values: the weighted sum in the basis, through the basis once.
    p = torch.softmax(torch.randn(1, 1, 5, layout.entries, generator=torch.Generator().manual_seed(6)), -1)
    out = (p @ opened.values) @ bases.flat
    length = want_v.norm(dim=-1).amax(-1) + 2 * v_means.norm(dim=-1)
    bound = (2 * 64 + dim + 16) * U32 * length[..., None, None]
    assert bool(((out - p.double() @ want_v).abs() <= bound).all())
    assert (opened.bias is None) == (not layout.is_merged)
    if opened.bias is not None:
        assert torch.equal(opened.bias.double(), in_layer(letter.bias, layout, layer))
