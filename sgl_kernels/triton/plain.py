"""Attention of query columns over plain pages."""

import triton
import triton.language as tl

from sgl_kernels.triton.columns import column_rows, inverse_of, load_columns
from sgl_kernels.triton.softmax import NOTHING, empty, join_top, multiply, over_columns, over_entries, tile_softmax

FP32 = tl.constexpr("fp32")
FP16 = tl.constexpr("fp16")


@triton.jit
def attend_plain(
    arena, pages, lengths, begin, end, start, q_model, token, tokens, head, num_heads,
    P: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, CT: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """As `coded.attend_coded`, but sums in the model's own basis; `lengths`: int32 valid entries of each page."""
    n, channel = tl.arange(0, P.tile), tl.arange(0, P.dim)
    axis: tl.constexpr = 1 if WIDE else 0
    real = channel < P.head_dim
    T: tl.constexpr = tl.float32 if P.dtype == FP32 else tl.float16 if P.dtype == FP16 else tl.bfloat16
    value_bytes: tl.constexpr = 4 if P.dtype == FP32 else 2
    table = arena.to(tl.pointer_type(T))
    column, there = column_rows(tl.arange(0, M), token, tokens, head, num_heads, GROUP)
    q = load_columns(q_model, column, there, channel, real, P.head_dim, WIDE)
    size = tl.max(tl.abs(q), axis)
    query = (q * over_columns(inverse_of(size), WIDE)).to(CT)

    top = tl.full((M,), NOTHING, tl.float32)
    mass = tl.zeros((M,), tl.float32)
    out = empty(P.dim, M, WIDE)
    for step in tl.range(0, tl.cdiv(end - begin, P.tile_pages) * P.page_tiles, num_stages=1 if WIDE else STAGES):
        page = begin + step // P.page_tiles * P.tile_pages
        number = page + n // P.entries if P.tile_pages > 1 else page + 0 * n
        entry = n % P.entries if P.tile_pages > 1 else n + step % P.page_tiles * P.tile
        at = tl.load(pages + tl.minimum(number, end - 1)).to(tl.int64) * (64 // value_bytes) + start // value_bytes
        valid = (entry < tl.load(lengths + tl.minimum(number, end - 1))) & (number < end)
        row = (at + entry * P.head_dim)[:, None] + channel[None, :]
        mask = valid[:, None] & real[None, :]
        # To CT at once: what the interpreter computes in bf16 is wrong.
        keys = tl.load(table + row, mask=mask, other=0.0).to(CT)
        logits = multiply(keys, query, empty(P.tile, M, WIDE), WIDE) * over_columns(size, WIDE)
        logits = tl.where(over_entries(valid, WIDE), logits, float("-inf"))
        weights, tile_top, tile_mass = tile_softmax(logits, WIDE)
        top, keep, add = join_top(top, tile_top)
        mass = mass * keep + tile_mass * add
        values = tl.load(table + P.v_codes // value_bytes + row, mask=mask, other=0.0).to(CT)
        product = multiply(tl.trans(values), weights.to(CT), empty(P.dim, M, WIDE), WIDE)
        out = out * over_columns(keep, WIDE) + product * over_columns(add, WIDE)
    return out, mass, top
