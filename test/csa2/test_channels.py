"""Which key channels the reduced formats keep, and the bases that mix them."""

from itertools import pairwise

import pytest
import torch
from codec_bounds import U32

from csa2.codec.channels import (
    BLOCK,
    COARSE_SHARE,
    FINE_SHARE,
    MERGED_COARSE_SHARE,
    Rotation,
    default_classes,
    make_rotation,
    reduced_bases,
)
from csa2.codec.codec import make_codec
from csa2.formats import HEAD_DIMS, MERGE, even_heads, make_ladder
from sgl_kernels.basis import orthonormal_basis
from sgl_kernels.page_layout import KeyClass, PageGeometry

ROTATIONS = [(64, True), (64, False), (32, True), (32, False), (2, True), (0, True)]


def geometry(dim: int, layers: int = 2, heads: int = 2, identity: tuple[int, ...] = ()) -> PageGeometry:
    return PageGeometry(layers, heads, dim, 64, torch.bfloat16, identity)


def test_pairs_of_the_neox_style_are_half_a_head_apart():
    assert make_rotation(8, neox=True).pairs == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert make_rotation(8, neox=False).pairs == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_orders_written_out():
    """The slowest pair first, and what does not rotate before all pairs."""
    assert make_rotation(8, neox=True).prior_order(8) == [3, 7, 2, 6, 1, 5, 0, 4]
    assert make_rotation(8, neox=False).prior_order(8) == [6, 7, 4, 5, 2, 3, 0, 1]
    assert make_rotation(4, neox=True).prior_order(8) == [4, 5, 6, 7, 1, 3, 0, 2]
    assert make_rotation(4, neox=False).prior_order(8) == [4, 5, 6, 7, 2, 3, 0, 1]
    assert make_rotation(0, neox=True).prior_order(8) == list(range(8))


@pytest.mark.parametrize(("rotary_dim", "neox"), ROTATIONS)
def test_an_order_has_every_channel_once_and_pairs_together(rotary_dim, neox):
    rotation = make_rotation(rotary_dim, neox=neox)
    assert rotation.is_none == (rotary_dim == 0)
    order = rotation.prior_order(64)
    assert sorted(order) == list(range(64))
    place = {channel: i for i, channel in enumerate(order)}
    assert all(place[b] == place[a] + 1 for a, b in rotation.pairs)
    # Pair j turns by base^(-2 j / rotary_dim) a token: the first is the fastest.
    assert all(place[slow[0]] < place[fast[0]] for fast, slow in pairwise(rotation.pairs))


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_default_classes_of_every_head_dim(dim, merged):
    classes = default_classes(geometry(dim), merged=merged)
    assert len(classes) == 4
    fine, coarse = classes[0]
    assert set(classes) == {(fine, coarse)}
    assert (fine.kind, coarse.kind) == ("int4", "lloyd2")
    # Whole Hadamard blocks, as near to their share of the pairs as they get; no pair is split.
    for of_class, share in ((fine, FINE_SHARE), (coarse, MERGED_COARSE_SHARE if merged else COARSE_SHARE)):
        assert of_class.channels % BLOCK == 0
        assert abs(of_class.channels - share * dim) <= BLOCK / 2
        assert of_class.channels >= BLOCK
    assert fine.channels + coarse.channels <= dim


def test_the_classes_of_64_and_128_channels():
    for dim in (64, 128):
        for merged, coarse in ((False, 12), (True, 8)):
            classes = default_classes(geometry(dim), merged=merged)
            assert classes[0] == (KeyClass("int4", dim * 12 // 32), KeyClass("lloyd2", dim * coarse // 32))


@pytest.mark.parametrize("merged", [False, True])
def test_where_all_channels_are_alike_every_channel_stays(merged):
    classes = default_classes(geometry(64), merged=merged, all_alike=True)
    assert classes == ((KeyClass("lloyd2", 64),),) * 4


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 64])
def test_channels_are_alike_without_rotation_and_calibration(rotary_dim, calibrated):
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
    orders = [order, order[::-1]] * 2 if calibrated else None
    rotation = make_rotation(rotary_dim, neox=True)
    classes = default_classes(geometry(64), merged=False, all_alike=orders is None and rotation.is_none)
    codec = make_codec(geometry(64), rotation, classes, orders)
    assert len(classes[0]) == (1 if rotary_dim == 0 and not calibrated else 2)
    channels = sum(c.channels for c in classes[0])
    for head in range(4 if calibrated else 0):
        kept = set(torch.nonzero(codec.bases.reduced[head, :, :channels].any(-1)).squeeze(-1).tolist())
        assert kept == set(orders[head][:channels])


def test_identity_layers_keep_all_their_channels():
    classes = default_classes(geometry(64, layers=3, identity=(1,)), merged=False)
    assert [len(of_head) for of_head in classes] == [2, 2, 0, 0, 2, 2]


def test_columns_select_and_mix():
    """Two classes, of one block and of three; each block gets every third pair. 4 of 32 channels are left out."""
    classes = ((KeyClass("int4", 8), KeyClass("lloyd2", 20)),)
    order = make_rotation(32, neox=True).prior_order(32)
    pairs = [order[c : c + 2] for c in range(0, 32, 2)]
    (basis,) = reduced_bases(classes, [order], 32)
    assert basis.shape == (32, 28)
    start = 0
    for block in ((0, 1, 2, 3), (4, 7, 10, 13), (5, 8, 11), (6, 9, 12)):
        channels = [channel for pair in block for channel in pairs[pair]]
        end = start + len(channels)
        assert torch.equal(basis[channels, start:end], orthonormal_basis(len(channels)))
        basis[channels, start:end] = 0
        start = end
    assert start == 28
    assert not basis.any()


def test_heads_with_fewer_channels_leave_columns_empty():
    classes = ((KeyClass("int4", 8), KeyClass("lloyd2", 16)), (), (KeyClass("lloyd2", 8),))
    bases = reduced_bases(classes, [list(range(32))] * 3, 32)
    assert bases.shape == (3, 32, 24)
    assert not bases[1].any()
    assert not bases[2, :, 8:].any()
    assert bases[2, :, :8].any(0).all()


def test_no_head_at_all_has_no_columns():
    assert reduced_bases(((), ()), [list(range(32))] * 2, 32).shape == (2, 32, 0)


@pytest.mark.parametrize("dim", [32, 34, 46, 64, 80, 96, 100, 112, 128, 192, 254, 256])
@pytest.mark.parametrize(("rotary", "neox"), [(1.0, True), (1.0, False), (0.5, True), (0.0, True)])
@pytest.mark.parametrize("merged", [False, True])
def test_bases_of_a_model_are_orthonormal_and_keep_the_slowest(merged, dim, rotary, neox):
    rotation = make_rotation(int(dim * rotary) // 2 * 2, neox=neox)
    classes = default_classes(geometry(dim, identity=(1,)), merged=merged, all_alike=rotation.is_none)
    codec = make_codec(geometry(dim, identity=(1,)), rotation, classes)
    bases = codec.bases.reduced.double()
    assert torch.equal(codec.bases.flat, orthonormal_basis(dim))
    assert bases.shape[:2] == (4, dim)
    for head, of_head in enumerate(classes):
        channels = sum(c.channels for c in of_head)
        columns = bases[head, :, :channels]
        # Each entry of a block is rounded once, and rows of it have length 1.
        error = (columns.T @ columns - torch.eye(channels)).abs().max() if channels else 0.0
        assert float(error) <= 2 * U32 * (1 + 1e-6)
        if of_head:
            kept = set(torch.nonzero(columns.any(-1)).squeeze(-1).tolist())
            assert kept == set(rotation.prior_order(dim)[:channels])
            # Classes do not mix.
            first = of_head[0].channels
            assert not (columns[:, :first].any(-1) & columns[:, first:].any(-1)).any()


@pytest.mark.parametrize("identity", [(), (0,), (0, 1)])
@pytest.mark.parametrize("all_alike", [False, True])
def test_the_reduced_rungs_of_every_head_dim_are_smaller_than_4_bits(all_alike, identity):
    """Also where all layers keep their channels, and whatever was rounded up to blocks and cache lines."""
    for dim in HEAD_DIMS:
        g = geometry(dim, heads=1, identity=identity)
        for tail, merge in MERGE.items():
            classes = default_classes(g, merged=merge > 1, all_alike=all_alike)
            page_bytes = make_ladder(g, "fp4", tail, "fp8", {tail: even_heads(tail, classes, g)}).page_bytes
            assert list(page_bytes) == sorted(set(page_bytes), reverse=True), (dim, tail)


def test_an_order_keeps_pairs_or_does_not():
    halves, neighbours = make_rotation(8, neox=True), make_rotation(8, neox=False)
    order = halves.prior_order(10)
    assert halves.keeps_pairs(order)
    assert not neighbours.keeps_pairs(order)
    assert halves.keeps_pairs([b for pair in zip(order[1::2], order[0::2], strict=True) for b in pair])
    assert not halves.keeps_pairs([*order[1:], order[0]])
    assert Rotation(()).keeps_pairs(list(range(10)))
