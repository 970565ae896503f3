"""Reading a tile of entries of a coded page: keys, values, scales and means, opened in registers.

Bytes are addressed from the arena by 64-bit offsets `base`, multiples of 64, so that loads stay vectorised. Keys have the
entry in the lane and contract over channels, values the channel in the lane and contract over entries: both come as the
left operand of a matrix product whose right operand is narrow (the queries of a group, or their weights).
"""

import triton
import triton.language as tl

from sgl_kernels.triton.codes import code_at, join8, open_words


@triton.jit
def word_pointer(arena):
    """The arena as int32."""
    return arena.to(tl.pointer_type(tl.int32))


@triton.jit
def half_pointer(arena):
    """The arena as int16."""
    return arena.to(tl.pointer_type(tl.int16))


@triton.jit
def chunk_channels(C: tl.constexpr):
    """Channel of each contraction index of a chunk, and whether there is one."""
    row = tl.arange(0, C.groups * C.width)
    if C.half:
        channel = row // 4 * 2 + row % 4
        there = (row % 4 < 2) & (row < C.width) & (channel < C.valid)
    else:
        channel = row
        there = row < C.valid
    return C.first + channel, there


@triton.jit
def open_keys(arena, base, entry, P: tl.constexpr, C: tl.constexpr, CT: tl.constexpr, ASM: tl.constexpr):
    """(N, contraction indices of the chunk): codes of entries `entry` (N,) of pieces at byte `base`, (N,) or a number."""
    group = tl.arange(0, C.groups)
    if C.half:
        at = (base + C.codes_at) // 2 + entry
        words = tl.load(half_pointer(arena) + at[:, None] + 0 * group[None, :]).to(tl.int32) & 0xFFFF
    else:
        at = (base + C.codes_at) // 4 + entry
        pointers = word_pointer(arena) + at[:, None] + (P.key_stride // 4 * group)[None, :]
        if C.valid > (C.groups - 1) * C.width:
            words = tl.load(pointers)
        else:
            words = tl.load(pointers, mask=(group * C.width < C.valid)[None, :], other=0)
    return open_words(words, C.kind, CT, ASM)


@triton.jit
def open_values(arena, base, first, P: tl.constexpr, CT: tl.constexpr, ASM: tl.constexpr):
    """(D, N): codes of values.

    Args:
        base: (groups of the tile,) or a number: byte where the piece of a group of entries lies.
        first: (groups,) which group of entries of its piece it is.
    """
    channel = tl.arange(0, P.dim)
    there = (channel < P.head_dim)[:, None]
    if P.value_half:
        at = (base + P.v_codes) // 2
        pointers = half_pointer(arena) + channel[:, None] + at[None, :]
        words = tl.load(pointers, mask=there, other=0).to(tl.int32) & 0xFFFF
        a, b = code_at(words, 0, P.value_kind, CT), code_at(words, 1, P.value_kind, CT)
        c, d = code_at(words, 4, P.value_kind, CT), code_at(words, 5, P.value_kind, CT)
        e, f = code_at(words, 8, P.value_kind, CT), code_at(words, 9, P.value_kind, CT)
        g, h = code_at(words, 12, P.value_kind, CT), code_at(words, 13, P.value_kind, CT)
        return join8(a, b, c, d, e, f, g, h).reshape(P.dim, words.shape[1] * 8)
    else:
        at = (base + P.v_codes) // 4 + P.value_stride // 4 * first
        pointers = word_pointer(arena) + channel[:, None] + at[None, :]
        if P.dim == P.head_dim:
            words = tl.load(pointers)
        else:
            words = tl.load(pointers, mask=there, other=0)
        return open_words(words, P.value_kind, CT, ASM)
