"""Which head gets how many bytes."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from csa2.codec.assembly import HeadCalibration, codec_and_ladder
from csa2.codec.budgets import HeadLosses, cheapest, menu
from csa2.codec.channels import BLOCK, default_classes, make_rotation
from csa2.formats import HEAD_DIMS, MERGE, even_heads
from csa2.options import CODE_FORMATS, KEY_SCALES, PAGE_SIZES, CacheOptions
from sgl_kernels.page_codec.reference import Entries
from sgl_kernels.page_layout import PageGeometry

ROTATION = make_rotation(64, neox=True)


def known(geometry: PageGeometry, seed: int = 0) -> HeadCalibration:
    """Heads that differ by orders of magnitude in what they lose; the costlier a choice, the less it loses."""
    random = torch.Generator().manual_seed(seed)
    heads = geometry.num_layers * geometry.num_kv_heads
    choices = menu(geometry.head_dim)
    sizes = torch.tensor([choice.layout(geometry).piece_bytes for choice in choices]).float()
    weight = 10 ** (4 * torch.rand(heads, generator=random))
    orders = [make_rotation(geometry.head_dim, neox=True).prior_order(geometry.head_dim)] * heads
    return HeadCalibration(orders, HeadLosses(choices, weight / sizes[:, None] ** 2))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(2, 4))
def test_no_other_choice_of_no_more_bytes_loses_less(seed, heads, choices):
    """The price finds the best of all choices that take no more bytes than its own."""
    random = torch.Generator().manual_seed(seed)
    losses = torch.rand(choices, heads, generator=random)
    sizes = torch.randint(1, 20, (choices,), generator=random)
    budget = int(sizes.min()) * heads + int(torch.randint(0, 40, (1,), generator=random))
    chosen = cheapest(losses, sizes, budget)
    columns = range(heads)

    def bytes_of(rows) -> int:
        return sum(int(sizes[row]) for row in rows)

    def loss_of(rows) -> float:
        return float(sum(losses[row, column].double() for row, column in zip(rows, columns, strict=True)))

    assert bytes_of(chosen) <= budget
    rivals = [rows for rows in product(range(choices), repeat=heads) if bytes_of(rows) <= bytes_of(chosen)]
    assert loss_of(chosen) <= min(loss_of(rows) for rows in rivals) + 1e-12


def test_what_cannot_fit_is_an_error():
    with pytest.raises(ValueError, match="do not fit in 19"):
        cheapest(torch.zeros(2, 2), torch.tensor([10, 20]), 19)
    assert cheapest(torch.zeros(2, 2), torch.tensor([10, 20]), 20) == [0, 0]


@pytest.mark.parametrize("size", PAGE_SIZES)
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 100, 128, 256])
@pytest.mark.parametrize("name", MERGE)
def test_uneven_heads_take_no_more_bytes_than_even_ones(name, dim, size):
    geometry = PageGeometry(3, 2, dim, size, torch.bfloat16, (1,))
    even = even_heads(name, default_classes(geometry, merged=MERGE[name] > 1), geometry)
    heads = known(geometry).losses.heads(even, geometry)
    assert heads[2:4] == even[2:4]  # the layer with the identity basis
    assert sum(head.piece_bytes for head in heads) <= sum(head.piece_bytes for head in even)
    assert len(set(heads[:2] + heads[4:])) > 1


@pytest.mark.parametrize("key_scale", KEY_SCALES)
@pytest.mark.parametrize("codes", CODE_FORMATS)
def test_four_bit_heads_keep_every_token_and_channel(codes, key_scale):
    """In codes of 8, 4 and 2 bits, those of 4 bits as the user chose; with a scale per channel there is one code."""
    geometry = PageGeometry(4, 3, 64, 64, torch.bfloat16, (1,))
    options = CacheOptions(ratio="4", kv_format=codes, shared_format="k8v4", key_scale=key_scale)
    (_, even), (_, ladder) = (
        codec_and_ladder(options, geometry, ROTATION, calibration) for calibration in (None, known(geometry))
    )
    four_bit = even.layouts[even.warm].heads[0].value_kind
    for name in ("k8v4", codes):
        before, after = even.layouts[even.index(name)], ladder.layouts[ladder.index(name)]
        assert after.page_bytes <= before.page_bytes
        assert after.heads[3:6] == before.heads[3:6]  # the layer with the identity basis
        if before.heads[0].channel_scales:
            assert after == before
            continue
        free = after.heads[:3] + after.heads[6:]
        assert {(head.basis, head.entries, head.key_channels, head.merged) for head in free} == {("flat", 64, 64, False)}
        kinds = {kind for head in free for kind in (head.key_classes[0].kind, head.value_kind)}
        assert len(kinds) > 1
        assert kinds <= {"e4m3", four_bit, "lloyd2"}
    k8v4, small = (ladder.layouts[ladder.index(name)] for name in ("k8v4", codes))
    if key_scale == "entry":
        # A page that comes down the ladder comes down in every head.
        assert all(a.piece_bytes >= b.piece_bytes for a, b in zip(k8v4.heads, small.heads, strict=True))


def test_the_head_that_loses_most_gets_most():
    geometry = PageGeometry(8, 2, 64, 64, torch.bfloat16)
    calibration = known(geometry)
    heads = calibration.losses.heads(even_heads("csa2-4x", default_classes(geometry, merged=True), geometry), geometry)
    by_loss = calibration.losses.losses[0].argsort(descending=True)
    sizes = [heads[index].piece_bytes for index in by_loss.tolist()]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("dim", HEAD_DIMS[::7])
def test_the_menu_keeps_whole_blocks_and_can_be_read_back(dim):
    choices = menu(dim)
    assert len(choices) == len(set(choices))
    for choice in choices:
        channels = [channels for _, channels in choice.keys]
        assert sum(channels) <= dim
        assert channels == [dim] or all(count % BLOCK == 0 for count in channels)


@pytest.mark.parametrize("ratio", ["2", "4", "8"])
def test_pages_of_uneven_heads_are_sealed_and_opened(ratio):
    """Heads that keep fewer entries end with padding, which has no weight; the others are what they were."""
    geometry = PageGeometry(4, 2, 64, 64, torch.bfloat16)
    codec, ladder = codec_and_ladder(CacheOptions(ratio=ratio), geometry, ROTATION, known(geometry))
    layout = ladder.layouts[ladder.tail]
    random = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 3, 8, 64, 64, generator=random)
    opened = codec.open(codec.seal(Entries(keys, values, None), layout), layout)
    assert len({head.entries for head in layout.heads}) > 1
    assert opened.bias is not None
    for index, head in enumerate(layout.heads):
        assert bool(opened.bias[:, index, : head.entries].isfinite().all())
        assert bool((opened.bias[:, index, head.entries :] == -torch.inf).all())
        assert not opened.keys[:, index, head.entries :].any()
        # Every token stands for itself or is part of a group: masses add up to those of the page or more.
        assert bool((opened.bias[:, index, : head.entries] >= 0).all())
    whole = [index for index, head in enumerate(layout.heads) if not head.merged]
    for index in whole:
        left = (opened.values[:, index] - values[:, index]).norm() / values[:, index].norm()
        assert float(left) < 0.35  # Max 1960: two bits leave 0.34 of a normal deviate


def test_a_page_of_uneven_heads_becomes_smaller_still():
    """From one budget to a smaller one: padding is nobody's pivot and adds to no group."""
    geometry = PageGeometry(4, 2, 64, 64, torch.bfloat16)
    calibration = known(geometry)
    codec, ladder = codec_and_ladder(CacheOptions(ratio="4"), geometry, ROTATION, calibration)
    layout = ladder.layouts[ladder.tail]
    random = torch.Generator().manual_seed(2)
    keys, values = torch.randn(2, 2, 8, 64, 64, generator=random)
    queries = torch.randn(2, 8, 48, 64, generator=random) * 0.3
    once = codec.open(codec.seal(Entries(keys, values, None), layout, queries), layout)
    again = codec.open(codec.seal(once, layout, queries), layout)
    assert torch.equal(again.bias.isinf(), once.bias.isinf())
    assert float((again.values - once.values).norm() / once.values.norm()) < 0.35
