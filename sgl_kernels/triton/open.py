"""Opening: pages of any format become entries in fp32, in the model's own basis. One program for each page and head."""

import triton
import triton.language as tl

from sgl_kernels.triton.codes import code_value, scale_value
from sgl_kernels.triton.encode import decode_e4m3, finite
from sgl_kernels.triton.pack import load_codes
from sgl_kernels.triton.seal import FLAT, REDUCED, STEP

BIAS_STEP = tl.constexpr(1 / 16)


@triton.jit
def open_plain(
    arena, offsets, out, item_bytes, num_kv_heads, D: tl.constexpr, DIM: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """Keys (program 0 of the last axis) or values (1) of plain pages.

    Args:
        arena: the arena as numbers of the dtype of the pages, `item_bytes` each.
        offsets: (N,) int64 bytes of pages.
        out: (2, N, L x G, S, D) fp32.
        num_kv_heads: G.
    """
    page, head, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry, channel = tl.arange(0, S), tl.arange(0, DIM)
    there = (channel < D)[None, :] & (entry < S)[:, None]
    place = entry[:, None] * D + channel[None, :]
    tile = (head // num_kv_heads * 2 + which) * num_kv_heads + head % num_kv_heads
    source = tl.load(offsets + page) // item_bytes + tile.to(tl.int64) * (S * D)
    x = tl.load(arena + source + place, mask=there, other=0.0).to(tl.float32)
    target = (which.to(tl.int64) * tl.num_programs(0) + page) * tl.num_programs(1) + head
    tl.store(out + target * (S * D) + place, finite(x), mask=there)


@triton.jit
def open_keys(
    arena, offsets, table, flat, reduced, keys, bias, num_heads, page_entries, columns,
    P: tl.constexpr,
):  # fmt: skip
    """Keys, and biases, of the heads of one layout.

    Args:
        arena: uint8; offsets: (N,) int64 bytes of pages.
        table: (K, 3) int32 of `HeadGroup`.
        flat: (D, D) fp32; reduced: (rows, D, columns) fp32.
        keys: (N, L x G, E, D) fp32; a head writes its first P.entries.
        bias: (N, L x G, E) fp32 in nat, the same; 0 where entries are tokens.
        num_heads: L x G; page_entries: E.
    """
    page, place = tl.program_id(0), tl.program_id(1)
    at = tl.load(offsets + page) + tl.load(table + place * 3 + 1).to(tl.int64) * 64
    row = page.to(tl.int64) * num_heads + tl.load(table + place * 3)
    entry, channel = tl.arange(0, P.entries), tl.arange(0, P.dim)
    if P.basis == FLAT:
        x = keys_through(arena, at, flat, P.head_dim, 1, P)
    elif P.basis == REDUCED:
        basis = reduced + tl.load(table + place * 3 + 2).to(tl.int64) * P.head_dim * columns
        x = keys_through(arena, at, basis, 1, columns, P) + load_means(arena, at + P.k_mean, channel, P)[None, :]
    else:
        x = coded_keys(arena, at, channel, P, P.classes[0]) + load_means(arena, at + P.k_mean, channel, P)[None, :]
    store_rows(keys + row * page_entries * P.head_dim, x, P)
    steps = tl.zeros((P.entries,), tl.float32)
    if P.bias >= 0:
        steps = tl.load(arena + at + P.bias + entry).to(tl.float32)
    tl.store(bias + row * page_entries + entry, steps * BIAS_STEP)


@triton.jit
def open_values(arena, offsets, table, flat, values, num_heads, page_entries, P: tl.constexpr):
    """Values (N, L x G, E, D) fp32 of the heads of one layout; see `open_keys`."""
    page, place = tl.program_id(0), tl.program_id(1)
    at = tl.load(offsets + page) + tl.load(table + place * 3 + 1).to(tl.int64) * 64
    row = page.to(tl.int64) * num_heads + tl.load(table + place * 3)
    entry = tl.arange(0, P.entries)
    scales = scale_value(tl.load(arena + at + P.v_scales + entry)) * P.value_unit
    x = tl.zeros((P.entries, P.dim), tl.float32)
    for first in range(0, P.head_dim, STEP):
        channel = first + tl.arange(0, STEP)
        there = (channel < P.head_dim)[None, :] & (entry < P.entries)[:, None]
        codes = load_codes(
            arena, at + P.v_codes, channel[None, :], entry[:, None], there, P.value_bits, P.value_whole, P.value_stride
        )
        y = code_value(codes, P.value_kind) * scales[:, None] + load_means(arena, at + P.v_mean, channel, P)[None, :]
        y = tl.where(there, y, 0.0)
        basis = load_basis(flat, channel, channel < P.head_dim, P.head_dim, 1, P)
        x = tl.dot(y, basis, x, input_precision="ieee", out_dtype=tl.float32)
    store_rows(values + row * page_entries * P.head_dim, x, P)


@triton.jit
def keys_through(arena, at, basis, code_stride, model_stride, P: tl.constexpr):
    """(E, D) fp32: codes of keys times the basis, strides between its channels of codes and of the model. The mean joins
    them before where it lies in the flat basis."""
    x = tl.zeros((P.entries, P.dim), tl.float32)
    for c in tl.static_range(len(P.classes)):
        x = class_through(arena, at, basis, code_stride, model_stride, x, P, P.classes[c])
    return x


@triton.jit
def class_through(arena, at, basis, code_stride, model_stride, x, P: tl.constexpr, C: tl.constexpr):
    """`x` (E, D) and what one class of keys adds to it."""
    for first in range(0, C.channels, STEP):
        channel = first + tl.arange(0, STEP)
        there = channel < C.channels
        y = coded_keys(arena, at, channel, P, C)
        if P.basis == FLAT:
            y += load_means(arena, at + P.k_mean, channel, P)[None, :]
        rows = load_basis(basis, C.first + channel, there, code_stride, model_stride, P)
        x = tl.dot(tl.where(there[None, :], y, 0.0), rows, x, input_precision="ieee", out_dtype=tl.float32)
    return x


@triton.jit
def coded_keys(arena, at, channel, P: tl.constexpr, C: tl.constexpr):
    """(E, channels) fp32: channels of a class of keys as they are coded, without the mean."""
    entry = tl.arange(0, P.entries)
    there = (channel < C.channels)[None, :] & (entry < P.entries)[:, None]
    codes = load_codes(arena, at + C.codes_at, entry[:, None], channel[None, :], there, C.bits, C.whole, C.stride)
    y = code_value(codes, C.kind)
    if P.channel_scales:
        scales = scale_value(tl.load(arena + at + C.scales_at + channel, mask=channel < C.channels, other=0))
        return y * (scales * C.unit)[None, :]
    else:
        scales = scale_value(tl.load(arena + at + C.scales_at + entry))
        return y * (scales * C.unit)[:, None]


@triton.jit
def load_basis(basis, channel, there, code_stride, model_stride, P: tl.constexpr):
    """(channels, D) fp32: what channels of codes are in the model's own basis; 0 where not `there`."""
    column = tl.arange(0, P.dim)
    place = channel[:, None] * code_stride + column[None, :] * model_stride
    return tl.load(basis + place, mask=there[:, None] & (column < P.head_dim)[None, :], other=0.0)


@triton.jit
def load_means(arena, at, channel, P: tl.constexpr):
    """fp32 means of channels."""
    return decode_e4m3(tl.load(arena + at + channel, mask=channel < P.head_dim, other=0).to(tl.int32))


@triton.jit
def store_rows(rows, x, P: tl.constexpr):
    """Store (E, D) fp32, finite."""
    entry, channel = tl.arange(0, P.entries), tl.arange(0, P.dim)
    there = (channel < P.head_dim)[None, :] & (entry < P.entries)[:, None]
    tl.store(rows + entry[:, None] * P.head_dim + channel[None, :], finite(x), mask=there)
