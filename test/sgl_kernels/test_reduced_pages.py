"""Channels that reduced keys leave out, the bias of merged entries, and means weighted by attention."""

import math
from dataclasses import replace

import pytest
import torch
from codec_bounds import CODE_VALUES, U32, bias_error, kept, open_by_the_letter, shares_of
from hard_pages import (
    FLAT,
    FORMATS,
    IDENTITY,
    PAGE_SIZES,
    REDUCED,
    bases_of,
    biases,
    entries_of,
    geometry,
    hard_entries,
    layout_of,
    normal,
    sealed_and_opened,
    weights,
)
from torch import Tensor

from sgl_kernels.basis import orthonormal_basis
from sgl_kernels.page_codec.reference import CodecBases, Entries, open_pages, seal_pages
from sgl_kernels.page_layout import PageLayout


def selecting(layout: PageLayout) -> CodecBases:
    """Bases that select the first channels, without mixing them."""
    g = layout.geometry
    return replace(bases_of(g), reduced=torch.eye(g.head_dim).expand(len(layout.heads), -1, -1))


@pytest.mark.parametrize("name", REDUCED)
@pytest.mark.parametrize("size", PAGE_SIZES)
def test_channels_left_out_are_the_stored_mean_exactly(size, name):
    layout = layout_of(name, geometry(64, 3, torch.float32, size))
    bases = selecting(layout)
    keys, values = hard_entries(layout, 4)
    weight = weights(layout, len(keys))
    packed = seal_pages(entries_of(keys, values, layout), layout, bases, weight)
    opened, letter = open_pages(packed, layout, bases), open_by_the_letter(packed, layout, bases)
    for index, head in enumerate(layout.heads[:3]):
        left_out = opened.keys[:, index, :, head.key_channels :].double()
        assert torch.equal(left_out, letter.key_means[:, index, None, head.key_channels :].expand_as(left_out))
    # And that is the mean of all entries by their weights.
    assert_nearest(letter.key_means[:, :3], kept(keys)[:, :3], shares_of(weight, keys, plain=True)[:, :3])


def assert_nearest(means: Tensor, y: Tensor, share: Tensor) -> None:
    """`means` are the E4M3 numbers nearest to the means of y (..., E, D)."""
    table = torch.from_numpy(CODE_VALUES["e4m3"])
    table = table[table.isfinite()].unique()
    exact = (y * share).sum(-2).clamp(-448, 448)
    distance = (exact[..., None] - table).abs().amin(-1)
    # The mean itself is a sum of E products in fp32, of values that went through a basis of D channels.
    slack = (y.shape[-2] + y.shape[-1] + 4) * U32 * y.norm(dim=-1).amax(-1, keepdim=True)
    assert bool(((means - exact).abs() <= distance + slack).all())


@pytest.mark.parametrize("name", FORMATS)
def test_means_are_weighted_by_attention(name):
    layout = layout_of(name, geometry(64, 1, torch.float32))
    bases, wide = bases_of(layout.geometry), orthonormal_basis(64).double()
    keys, values = normal(layout, 6, 1) + 2 * normal(layout, 6, 2)[..., :1, :], normal(layout, 6, 3) + 1
    weight = weights(layout, 6)
    letter = open_by_the_letter(seal_pages(entries_of(keys, values, layout), layout, bases, weight), layout, bases)
    k_share, v_share = shares_of(weight, keys, plain=True), shares_of(weight, values, plain=False)
    assert_nearest(letter.value_means, values.double() @ wide, v_share)
    flat = keys.double() @ wide if layout.layer_basis(FLAT) == "flat" else keys.double()
    assert_nearest(letter.key_means[:, FLAT], flat[:, FLAT], k_share[:, FLAT])
    # Identity keys have midpoints, whoever attends to them; pages without weights have no mean of values.
    low, high = torch.aminmax(keys.double()[:, IDENTITY], dim=-2)
    assert_nearest(letter.key_means[:, IDENTITY], torch.stack((low, high), -2), torch.full((2, 1), 0.5))
    assert not letter.value_means[2::3].any()
    assert letter.value_means[:2].any()


@pytest.mark.parametrize("name", FORMATS)
def test_only_the_ratio_of_weights_matters(name):
    layout = layout_of(name, geometry(64, 2, torch.float32))
    bases, weight = bases_of(layout.geometry), weights(layout, 3)
    entries = entries_of(normal(layout, 3, 1), normal(layout, 3, 2), layout)
    # Powers of two: the quotients are the same numbers.
    packed = [seal_pages(entries, layout, bases, weight * factor) for factor in (1, 2.0**-20, 2.0**20)]
    assert torch.equal(packed[0], packed[1])
    assert torch.equal(packed[0], packed[2])
    nothing = seal_pages(entries, layout, bases, torch.zeros_like(weight))
    assert torch.equal(nothing, seal_pages(entries, layout, bases))
    assert torch.equal(nothing[2], packed[0][2])


@pytest.mark.parametrize("name", FORMATS)
def test_the_entry_that_draws_all_attention_is_stored_best(name):
    """What is left of it is the rounding of the mean, so its scale is small: at most 1/17 of its values, and then coded."""
    layout = layout_of(name, geometry(64, 1, torch.float32))
    keys, values = normal(layout, 4, 1), normal(layout, 4, 2)
    weight = torch.zeros(4, 2, layout.entries)
    weight[..., 7] = 1
    _, _, v = sealed_and_opened(keys, values, layout, weight)
    y = values.double()[:, :, 7]
    assert bool(((v - values)[:, :, 7].norm(dim=-1) <= y.norm(dim=-1) / 17 * math.sqrt(1 + 0.56**2)).all())


@pytest.mark.parametrize("name", REDUCED)
def test_kept_channels_do_not_see_the_ones_left_out(name):
    """An outlier in a channel that is left out costs nothing in the others."""
    layout = layout_of(name, geometry(64, 1, torch.float32))
    bases = selecting(layout)
    keys = normal(layout, 2, 1)
    outlier = keys.clone()
    outlier[..., 63] *= 1e4
    opened = [open_pages(seal_pages(entries_of(x, keys, layout), layout, bases), layout, bases) for x in (keys, outlier)]
    assert torch.equal(opened[0].keys[:, 0, :, :48], opened[1].keys[:, 0, :, :48])
    assert torch.equal(opened[0].values, opened[1].values)


@pytest.mark.parametrize("name", ["csa2-4x", "csa2-8x"])
def test_biases_come_back_to_half_a_step(name):
    layout = layout_of(name, geometry(64, 2))
    bases, keys = bases_of(layout.geometry), normal(layout, 3)
    bias = biases(layout, 3, 5)
    assert bias is not None
    bias[0, 0, :4] = torch.tensor([0.0, math.log(2), 255 / 16, 1e3])
    opened = open_pages(seal_pages(Entries(keys, keys, bias), layout, bases), layout, bases)
    assert bool(((opened.bias - bias).abs() <= bias_error(bias) * (1 + 4 * U32)).all())
    assert opened.bias[0, 0, :4].tolist() == [0.0, 11 / 16, 255 / 16, 255 / 16]
    assert bool((opened.bias * 16 == (opened.bias * 16).round()).all())


def test_what_a_format_needs_is_asked_for():
    layout = layout_of("csa2-4x", geometry(64, 1))
    keys, bases = normal(layout, 1), bases_of(layout.geometry)
    with pytest.raises(ValueError, match="needs the bias of its entries"):
        seal_pages(Entries(keys, keys, None), layout, bases)
    with pytest.raises(ValueError, match="needs the reduced bases"):
        seal_pages(entries_of(keys, keys, layout), layout, CodecBases(bases.flat))
