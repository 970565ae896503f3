"""Sealing: entries become the codes, scales, means and biases of coded pages. One program for each page and head.

Numbers are fp32 throughout, products too: sealing is rare, and what it rounds stays in the page.
"""

import triton
import triton.language as tl

from sgl_kernels.triton.encode import ROUNDER, decode_e4m3, encode_channels, encode_e4m3, encode_entries
from sgl_kernels.triton.pack import store_keys, store_values

FLAT = tl.constexpr("flat")
REDUCED = tl.constexpr("reduced")
STEP = tl.constexpr(16)
"""Channels that meet a basis at a time."""


@triton.jit
def seal_keys(
    keys, weight, packed, table, flat, reduced, num_heads, page_entries, page_bytes, columns,
    P: tl.constexpr,
):  # fmt: skip
    """Keys of the heads of one layout.

    Args:
        keys: (N, L x G, E, D) fp32, finite, in the model's own basis; a head has its first P.entries.
        weight: (N, L x G, E) fp32 attention of each entry; all 0: the mean is the plain one.
        packed: (N, page_bytes) uint8.
        table: (K, 3) int32 of `HeadGroup`.
        flat: (D, D) fp32; reduced: (rows, D, columns) fp32.
        page_entries: E.
    """
    page, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = page * num_heads + tl.load(table + place * 3)
    at = page * page_bytes + tl.load(table + place * 3 + 1).to(tl.int64) * 64
    keys += row * page_entries * P.head_dim
    if P.channel_scales:
        seal_channels(keys, packed, at, flat, P)
    else:
        share, weighted = shares(weight + row * page_entries, P)
        share = tl.where(weighted, share, 1.0 / P.entries)
        if P.basis == REDUCED:
            columns_of = reduced + tl.load(table + place * 3 + 2).to(tl.int64) * P.head_dim * columns
            seal_classes(keys, share, packed, at, columns_of, columns, P)
        else:
            y, means = centred(in_basis(keys, flat, P), share)
            store_channels(packed, at + P.k_mean, means, P)
            store_class(packed, at, y, P.classes[0], P.entries)


@triton.jit
def seal_values(
    values, bias, weight, packed, table, flat, num_heads, page_entries, page_bytes,
    P: tl.constexpr,
):  # fmt: skip
    """Values, and biases where entries are groups, of the heads of one layout; see `seal_keys`.

    Args:
        values: (N, L x G, E, D) fp32, finite.
        bias: (N, L x G, E) fp32 in nat; read where P has biases.
        weight: all 0: no mean is taken out.
    """
    page, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = page * num_heads + tl.load(table + place * 3)
    at = page * page_bytes + tl.load(table + place * 3 + 1).to(tl.int64) * 64
    share, _ = shares(weight + row * page_entries, P)
    y, means = centred(in_basis(values + row * page_entries * P.head_dim, flat, P), share)
    store_channels(packed, at + P.v_mean, means, P)
    scales, codes = encode_entries(y, P.head_dim, P.value_kind)
    entry = tl.arange(0, P.entries)
    tl.store(packed + at + P.v_scales + entry, scales.to(tl.uint8))
    store_values(packed, at, codes, P)
    if P.bias >= 0:
        steps = tl.load(bias + row * page_entries + entry) * 16.0
        steps = tl.minimum(tl.maximum(steps, 0.0), 255.0) + ROUNDER
        tl.store(packed + at + P.bias + entry, (steps.to(tl.int32, bitcast=True) & 255).to(tl.uint8))


@triton.jit
def shares(weight, P: tl.constexpr):
    """(E,) weights that add up to 1, or 0 where all are; and whether they are not."""
    share = tl.load(weight + tl.arange(0, P.entries))
    total = tl.sum(share, 0)
    # Without weights shares are 0 over 1.
    return tl.div_rn(share, tl.where(total > 0, total, 1.0) + tl.zeros_like(share)), total > 0


@triton.jit
def in_basis(rows, basis, P: tl.constexpr):
    """(E, D) fp32 product of `rows` (E, D) with the symmetric `basis` (D, D)."""
    entry, column = tl.arange(0, P.entries), tl.arange(0, P.dim)
    y = tl.zeros((P.entries, P.dim), tl.float32)
    for first in range(0, P.head_dim, STEP):
        x = load_rows(rows, entry, first, P)
        channel = first + tl.arange(0, STEP)
        there = (channel < P.head_dim)[:, None] & (column < P.head_dim)[None, :]
        b = tl.load(basis + channel[:, None] * P.head_dim + column[None, :], mask=there, other=0.0)
        y = tl.dot(x, b, y, input_precision="ieee", out_dtype=tl.float32)
    return y


@triton.jit
def load_rows(rows, entry, first, P: tl.constexpr):
    """(E, STEP) channels of `rows` from `first` on."""
    channel = first + tl.arange(0, STEP)
    place = entry[:, None] * P.head_dim + channel[None, :]
    return tl.load(rows + place, mask=(channel < P.head_dim)[None, :], other=0.0)


@triton.jit
def centred(y, share):
    """`y` (E, C) without its mean by `share` (E,) as it is stored, and the codes of that mean."""
    means = encode_e4m3(tl.sum(y * share[:, None], 0))
    return y - decode_e4m3(means)[None, :], means


@triton.jit
def store_channels(page, at, codes, P: tl.constexpr):
    """Store a byte for each channel."""
    channel = tl.arange(0, P.dim)
    tl.store(page + at + channel, codes.to(tl.uint8), mask=channel < P.head_dim)


@triton.jit
def store_class(page, at, y, C: tl.constexpr, E: tl.constexpr):
    """Store scales and codes of a class of keys `y` (E, C.dim), whose columns from C.channels on are 0."""
    scales, codes = encode_entries(y, C.channels, C.kind)
    tl.store(page + at + C.scales_at + tl.arange(0, E), scales.to(tl.uint8))
    store_keys(page, at, codes, C, E)


@triton.jit
def seal_classes(keys, share, page, at, basis, columns, P: tl.constexpr):
    """Keys in a reduced basis: the mean stays in the model's own."""
    for c in tl.static_range(len(P.classes)):
        y = reduced_class(keys, share, page, at, basis, columns, P, P.classes[c])
        store_class(page, at, y, P.classes[c], P.entries)


@triton.jit
def reduced_class(keys, share, page, at, basis, columns, P: tl.constexpr, C: tl.constexpr):
    """(E, C.dim) fp32 keys of a class, without the mean, which is stored on the way."""
    entry, column = tl.arange(0, P.entries), tl.arange(0, C.dim)
    y = tl.zeros((P.entries, C.dim), tl.float32)
    for first in range(0, P.head_dim, STEP):
        x, means = centred(load_rows(keys, entry, first, P), share)
        channel = first + tl.arange(0, STEP)
        if C.first == 0:
            tl.store(page + at + P.k_mean + channel, means.to(tl.uint8), mask=channel < P.head_dim)
        there = (channel < P.head_dim)[:, None] & (column < C.channels)[None, :]
        b = tl.load(basis + channel[:, None] * columns + (C.first + column)[None, :], mask=there, other=0.0)
        y = tl.dot(x, b, y, input_precision="ieee", out_dtype=tl.float32)
    return y


@triton.jit
def seal_channels(keys, page, at, flat, P: tl.constexpr):
    """Keys with a midpoint and a scale for each channel."""
    if P.basis == FLAT:
        y = in_basis(keys, flat, P)
    else:
        entry, channel = tl.arange(0, P.entries), tl.arange(0, P.dim)
        place = entry[:, None] * P.head_dim + channel[None, :]
        y = tl.load(keys + place, mask=(channel < P.head_dim)[None, :], other=0.0)
    means, scales, codes = encode_channels(y, P.classes[0].kind)
    store_channels(page, at + P.k_mean, means, P)
    store_channels(page, at + P.classes[0].scales_at, scales, P)
    store_keys(page, at, codes, P.classes[0], P.entries)
