"""Merging entries of a page around pivots, which the caller has chosen. One program for each page and head."""

import triton
import triton.language as tl

from sgl_kernels.triton.seal import STEP

LEAST = tl.constexpr(1.1754943508222875e-38)
"""The smallest normal fp32."""


@triton.jit
def merge_groups(
    keys, values, bias, weight, pivots, heads, out_keys, out_values, out_bias, num_heads, page_groups, rounding,
    HAS_BIAS: tl.constexpr, E: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Every entry joins the pivot that is nearest by squared distance of keys and of values, in units of their variance in
    the page; a pivot its own group. A group has the key of its pivot, the mean value by weight, and a bias that is
    log(sum of weights / weight of the pivot) larger.

    Args:
        keys, values: (N, L x G, E, D) fp32, finite.
        bias: (N, L x G, E) fp32 in nat, read if HAS_BIAS.
        weight: (N, L x G, E) fp32, that of an entry that there is not 0.
        pivots: (N, K, GROUPS) int64 in order, of the heads that get so many groups.
        heads: (K,) int64: which they are.
        out_keys, out_values: (N, L x G, page_groups, D) fp32; out_bias: (N, L x G, page_groups) fp32.
        rounding: variance over mean square below which keys or values count as equal.
    """
    page, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = page * num_heads + tl.load(heads + place)
    entry, group = tl.arange(0, E), tl.arange(0, GROUPS)
    pivot = tl.load(pivots + (page * tl.num_programs(1) + place) * GROUPS + group).to(tl.int32)
    keys += row * E * D
    values += row * E * D
    distance = distances(keys, pivot, rounding, E, GROUPS, D) + distances(values, pivot, rounding, E, GROUPS, D)
    # The first of the nearest ones.
    nearest = tl.min(tl.where(distance == tl.min(distance, 1)[:, None], group[None, :], GROUPS), 1)
    is_pivot = entry[:, None] == pivot[None, :]
    own = tl.sum(is_pivot.to(tl.int32), 1)[:, None] > 0
    joins = tl.where(own, is_pivot, nearest[:, None] == group[None, :])
    w = tl.load(weight + row * E + entry)
    share = tl.where(joins, w[:, None], 0.0)
    mass = tl.sum(share, 0)
    biases = tl.log(tl.div_rn(mass, tl.sum(tl.where(is_pivot, w[:, None], 0.0), 0)))
    if HAS_BIAS:
        biases += tl.load(bias + row * E + pivot)
    target = row * page_groups + group
    tl.store(out_bias + target, tl.maximum(biases, 0.0))
    share = tl.trans(tl.div_rn(share, mass[None, :] + tl.zeros_like(share)))
    for first in range(0, D, STEP):
        channel = first + tl.arange(0, STEP)
        place_out = target[:, None] * D + channel[None, :]
        there = (channel < D)[None, :] & (group < GROUPS)[:, None]
        v = channels_of(values, entry, channel, D)
        mean = tl.dot(share, v, tl.zeros((GROUPS, STEP), tl.float32), input_precision="ieee", out_dtype=tl.float32)
        tl.store(out_values + place_out, mean, mask=there)
        tl.store(out_keys + place_out, channels_of(keys, pivot, channel, D), mask=there)


@triton.jit
def distances(rows, pivot, rounding, E: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr):
    """(E, GROUPS) squared distance of each row of `rows` (E, D) to its pivots, over the variance of the page."""
    entry = tl.arange(0, E)
    products = tl.zeros((E, GROUPS), tl.float32)
    squares = tl.zeros((E,), tl.float32)
    pivot_squares = tl.zeros((GROUPS,), tl.float32)
    sizes = tl.zeros((E,), tl.float32)
    for first in range(0, D, STEP):
        channel = first + tl.arange(0, STEP)
        x = channels_of(rows, entry, channel, D)
        sizes += tl.sum(x * x, 1)
        # Products of a large constant would cancel to noise.
        mean = tl.sum(x, 0) * (1.0 / E)
        x -= mean[None, :]
        p = channels_of(rows, pivot, channel, D) - mean[None, :]
        squares += tl.sum(x * x, 1)
        pivot_squares += tl.sum(p * p, 1)
        products = tl.dot(x, tl.trans(p), products, input_precision="ieee", out_dtype=tl.float32)
    spread = tl.maximum(tl.sum(squares, 0) * (1.0 / E), rounding * (tl.sum(sizes, 0) * (1.0 / E)))
    return (squares[:, None] + pivot_squares[None, :] - 2 * products) * tl.div_rn(1.0, tl.maximum(spread, LEAST))


@triton.jit
def channels_of(rows, row, channel, D: tl.constexpr):
    """(rows, channels) fp32 of `rows` (..., D); channels from D on are 0."""
    there = (channel < D)[None, :] & (row >= 0)[:, None]
    return tl.load(rows + row[:, None] * D + channel[None, :], mask=there, other=0.0)
