"""What is special about reduced keys and merged entries: channels left out, the bias, no mean of values."""

import math
from dataclasses import replace

import pytest
import torch
from codec_bounds import CODE_VALUES, U32, bias_error, kept, open_by_the_letter
from hard_pages import (
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
)

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
    packed = seal_pages(entries_of(keys, values, layout), layout, bases)
    opened, letter = open_pages(packed, layout, bases), open_by_the_letter(packed, layout, bases)
    for index, head in enumerate(layout.heads[:3]):
        left_out = opened.keys[:, index, :, head.key_channels :].double()
        assert torch.equal(left_out, letter.key_means[:, index, None, head.key_channels :].expand_as(left_out))
    # And the stored mean is the mean of all entries, as E4M3.
    mean = torch.from_numpy(CODE_VALUES["e4m3"])
    mean = mean[mean.isfinite()].unique()
    exact = kept(keys)[:, :3].mean(-2).clamp(-448, 448)
    distance = (exact[..., None] - mean).abs().amin(-1)
    # The mean itself is a sum of E numbers in fp32.
    slack = (layout.entries + 2) * U32 * kept(keys)[:, :3].abs().amax(-2)
    assert bool(((letter.key_means[:, :3] - exact).abs() <= distance + slack).all())


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


def test_merged_values_keep_no_mean():
    """Few entries share it: what it would save in codes it would cost in bytes."""
    layout = layout_of("csa2-4x", geometry(64, 1, torch.float32))
    values = normal(layout, 2, 1) + 100 * normal(layout, 2, 2)[..., :1, :]
    letter = open_by_the_letter(sealed_and_opened(values, values, layout)[0], layout, bases_of(layout.geometry))
    assert not letter.value_means.any()
    assert letter.key_means.any()


def test_what_a_format_needs_is_asked_for():
    layout = layout_of("csa2-4x", geometry(64, 1))
    keys, bases = normal(layout, 1), bases_of(layout.geometry)
    with pytest.raises(ValueError, match="needs the bias of its entries"):
        seal_pages(Entries(keys, keys, None), layout, bases)
    with pytest.raises(ValueError, match="needs the reduced bases"):
        seal_pages(entries_of(keys, keys, layout), layout, CodecBases(bases.flat))
