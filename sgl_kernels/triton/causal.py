"""Attention of the new tokens of requests among themselves, causal."""

import triton
import triton.language as tl

from sgl_kernels.triton.columns import column_rows
from sgl_kernels.triton.softmax import NOTHING, empty, join_top, multiply, over_columns, over_entries, tile_softmax


@triton.jit
def attend_new(
    query, keys, values, spans, out, lse, key_stride, value_stride, num_heads, scale,
    D: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, CT: tl.constexpr,
    STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program for each block of columns and KV head.

    Args:
        query: (T, H, D) contiguous; keys, values: (T, G, D), strides between tokens, the heads of a token contiguous.
        spans: (X, 3) int32: first token of a block, how many, and the first new token of its request.
        out: (T, H, D) fp32 normalised; lse: (T, H) fp32 in base 2.
        scale: softmax scale times log2(e).
        CT: type of the operands of matrix products.
    """
    block, head = tl.program_id(0), tl.program_id(1)
    token, tokens, first = tl.load(spans + block * 3), tl.load(spans + block * 3 + 1), tl.load(spans + block * 3 + 2)
    m, n, channel = tl.arange(0, M), tl.arange(0, TILE), tl.arange(0, DIM)
    real, end = channel < D, token + tokens
    row, there = column_rows(m, token, tokens, head, num_heads, GROUP)
    place = over_columns(row * D, WIDE) + over_entries(channel, WIDE)
    mask = over_columns(there, WIDE) & over_entries(real, WIDE)
    q = tl.load(query + place, mask=mask, other=0.0).to(CT)

    top = tl.full((M,), NOTHING, tl.float32)
    mass = tl.zeros((M,), tl.float32)
    sums = empty(DIM, M, WIDE)
    for start in tl.range(first, end, TILE, num_stages=STAGES):
        at = start + n
        rows = at.to(tl.int64)[:, None]
        known = (at < end)[:, None] & real[None, :]
        k = tl.load(keys + rows * key_stride + head * D + channel[None, :], mask=known, other=0.0).to(CT)
        logits = multiply(k, q, empty(TILE, M, WIDE), WIDE) * scale
        past = over_entries(at, WIDE) <= over_columns(token + m // GROUP, WIDE)
        logits = tl.where(past & over_entries(at < end, WIDE), logits, float("-inf"))
        weights, tile_top, tile_mass = tile_softmax(logits, WIDE)
        top, keep, add = join_top(top, tile_top)
        mass = mass * keep + tile_mass * add
        v = tl.load(values + rows * value_stride + head * D + channel[None, :], mask=known, other=0.0).to(CT)
        product = multiply(tl.trans(v), weights.to(CT), empty(DIM, M, WIDE), WIDE)
        sums = sums * over_columns(keep, WIDE) + product * over_columns(add, WIDE)
    tl.store(out + place, sums / over_columns(mass, WIDE), mask=mask)
    tl.store(lse + row, top + tl.log2(mass), mask=there)
