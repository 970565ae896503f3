"""Codes to the lines of pages and back; `sgl_kernels.page_layout` says what a line is.

Code i of a dword lies in byte i % 4, at bit field i // 4; of the word of a half line in byte i % 2, at field i // 2.
"""

import triton
import triton.language as tl

from sgl_kernels.triton.tiles import half_pointer, word_pointer


@triton.jit
def dword_shift(i, BITS: tl.constexpr):
    """Lowest bit of code i of a dword."""
    return i % 4 * 8 + i // 4 * BITS


@triton.jit
def word_shift(i, BITS: tl.constexpr):
    """Lowest bit of code i of a word."""
    return i % 2 * 8 + i // 2 * BITS


@triton.jit
def store_keys(page, at, codes, C: tl.constexpr, E: tl.constexpr):
    """Store `codes` (E, C.dim) int32 of a class of keys as its lines: entries are lanes.

    Args:
        page: uint8.
        at: byte of the piece, a multiple of 64.
    """
    WIDTH: tl.constexpr = 32 // C.bits
    GROUPS: tl.constexpr = C.dim // WIDTH
    entry, group, i = tl.arange(0, E), tl.arange(0, GROUPS), tl.arange(0, WIDTH)
    codes = tl.where((tl.arange(0, C.dim) < C.channels)[None, :], codes, 0).reshape(E, GROUPS, WIDTH)
    dwords = tl.sum(codes << dword_shift(i, C.bits)[None, None, :], 2)
    place = (at + C.codes_at) // 4 + (C.stride // 4 * group)[None, :] + entry[:, None]
    tl.store(word_pointer(page) + place, dwords, mask=(group < C.whole)[None, :] & (entry < E)[:, None])
    if C.half:
        inside = i < WIDTH // 2
        shift = word_shift(tl.where(inside, i, 0), C.bits)
        words = tl.sum(tl.where(inside[None, None, :], codes << shift[None, None, :], 0), 2)
        place = (at + C.codes_at + C.whole * C.stride) // 2 + entry[:, None] + 0 * group[None, :]
        tl.store(half_pointer(page) + place, words.to(tl.int16), mask=(group == C.whole)[None, :] & (entry < E)[:, None])


@triton.jit
def store_values(page, at, codes, P: tl.constexpr):
    """Store `codes` (E, D) int32 of values as their lines: channels are lanes. See `store_keys`."""
    WIDTH: tl.constexpr = 32 // P.value_bits
    channel = tl.arange(0, P.dim)
    there = channel < P.head_dim
    if P.entries < WIDTH:
        shift = word_shift(tl.arange(0, P.entries), P.value_bits)
        words = tl.sum(codes << shift[:, None], 0)
        tl.store(half_pointer(page) + (at + P.v_codes) // 2 + channel, words.to(tl.int16), mask=there)
    else:
        GROUPS: tl.constexpr = P.entries // WIDTH
        group, i = tl.arange(0, GROUPS), tl.arange(0, WIDTH)
        dwords = tl.sum(codes.reshape(GROUPS, WIDTH, P.dim) << dword_shift(i, P.value_bits)[None, :, None], 1)
        place = (at + P.v_codes) // 4 + (P.value_stride // 4 * group)[:, None] + channel[None, :]
        tl.store(word_pointer(page) + place, dwords, mask=there[None, :] & (group < GROUPS)[:, None])


@triton.jit
def load_codes(
    page, at, lane, index, mask, BITS: tl.constexpr, WHOLE: tl.constexpr, STRIDE: tl.constexpr
):  # fmt: skip
    """int32 codes at contraction indices `index` of lanes `lane`, which broadcast to the shape of `mask`.

    Args:
        at: first byte of the lines.
        WHOLE: groups of dwords; behind them lies a half line.
        STRIDE: bytes from a group to the next.
    """
    WIDTH: tl.constexpr = 32 // BITS
    i, rest = index % WIDTH, tl.maximum(index - WHOLE * WIDTH, 0)
    whole = index < WHOLE * WIDTH
    byte = tl.where(whole, index // WIDTH * STRIDE + lane * 4 + i % 4, WHOLE * STRIDE + lane * 2 + rest % 2)
    shift = tl.where(whole, i // 4 * BITS, rest // 2 * BITS)
    packed = tl.load(page + at + byte, mask=mask, other=0).to(tl.int32)
    return (packed >> shift) & ((1 << BITS) - 1)
