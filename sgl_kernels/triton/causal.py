"""Attention of the new tokens of requests among themselves, causal."""

import triton
import triton.language as tl

from sgl_kernels.triton.softmax import NOTHING, join_top, tile_softmax


@triton.jit
def attend_new(
    query, keys, values, spans, out, lse, key_stride, value_stride, num_heads, scale,
    D: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, CT: tl.constexpr,
    STAGES: tl.constexpr,
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
    token, tokens = tl.load(spans + block * 3), tl.load(spans + block * 3 + 1)
    first = tl.load(spans + block * 3 + 2)
    m, n, channel = tl.arange(0, M), tl.arange(0, TILE), tl.arange(0, DIM)
    real = channel < D
    there = m // GROUP < tokens
    place = (token + m // GROUP).to(tl.int64) * num_heads + head * GROUP + m % GROUP
    q = tl.load(query + place[None, :] * D + channel[:, None], mask=there[None, :] & real[:, None], other=0.0).to(CT)

    top = tl.full((M,), NOTHING, tl.float32)
    mass = tl.zeros((M,), tl.float32)
    sums = tl.zeros((DIM, M), tl.float32)
    for start in tl.range(first, token + tokens, TILE, num_stages=STAGES):
        at = start + n
        mask = (at < token + tokens)[:, None] & real[None, :]
        row = at.to(tl.int64)[:, None]
        k = tl.load(keys + row * key_stride + head * D + channel[None, :], mask=mask, other=0.0).to(CT)
        logits = tl.dot(k, q, out_dtype=tl.float32, input_precision="ieee") * scale
        logits = tl.where(at[:, None] <= (token + m // GROUP)[None, :], logits, float("-inf"))
        weights, tile_top, tile_mass = tile_softmax(logits)
        top, keep, add = join_top(top, tile_top)
        mass = mass * keep + tile_mass * add
        v = tl.load(values + row * value_stride + head * D + channel[None, :], mask=mask, other=0.0).to(CT)
        product = tl.dot(tl.trans(v), weights.to(CT), out_dtype=tl.float32, input_precision="ieee")
        sums = sums * keep[None, :] + product * add[None, :]
    result = sums / tl.where(mass > 0, mass, 1.0)[None, :]
    tl.store(out + place[None, :] * D + channel[:, None], result, mask=there[None, :] & real[:, None])
    tl.store(lse + place, tl.where(mass > 0, top + tl.log2(mass), float("-inf")), mask=there)
