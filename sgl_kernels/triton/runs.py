"""What is needed once a page, done for a run of pages at a time: products with key means, sums of value means.

A *row* of a run is a page, or each tile of a page that has several. Programs note what they need of a row in device memory
of their own.
"""

import triton
import triton.language as tl

from sgl_kernels.triton.codes import E4M3, open_words
from sgl_kernels.triton.columns import column_rows, inverse_of, load_columns
from sgl_kernels.triton.softmax import empty, multiply, over_columns, over_entries
from sgl_kernels.triton.tiles import word_pointer

RUN = tl.constexpr(64)
"""Rows of a run."""
BLOCK = tl.constexpr(16)
"""Rows, and columns, whose means are looked at at a time: more would take the registers of the main loop."""


@triton.jit
def block_rows(pages, run, run_end, start, first, P: tl.constexpr):
    """(BLOCK,) byte of the piece of each row of a run from `first` on; those that there are not repeat the last page."""
    page = run + (first + tl.arange(0, BLOCK)) // P.page_tiles
    return tl.load(pages + tl.minimum(page, run_end - 1)).to(tl.int64) * 64 + start


@triton.jit
def open_means(arena, base, at: tl.constexpr, P: tl.constexpr, CT: tl.constexpr, ASM: tl.constexpr):
    """(BLOCK, D) means at byte `at` of the pieces at `base` (BLOCK,), in units of 2^8."""
    dword = tl.arange(0, P.dim // 4)
    pointers = word_pointer(arena) + ((base + at) // 4)[:, None] + dword[None, :]
    if P.dim == P.head_dim:
        words = tl.load(pointers)
    else:
        words = tl.load(pointers, mask=(dword < P.head_dim // 4)[None, :], other=0)
    return open_words(words, E4M3, CT, ASM)


@triton.jit
def multiply_exactly(left, right, sums, CT: tl.constexpr, WIDE: tl.constexpr):
    """`multiply` of fp32 `right`, which is rounded to CT twice: once itself, once what that left over."""
    high = right.to(CT)
    low = (right - high.to(tl.float32)).to(CT)
    return multiply(left, low, multiply(left, high, sums, WIDE), WIDE)


@triton.jit
def note_run(
    arena, pages, run, run_end, start, q_means, token, tokens, head, num_heads, notes, codes_max,
    P: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, CT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Note what the key means of a run add to logits, and the largest scale of the values of each of its rows.

    Args:
        pages: int32 places of pages in units of 64 bytes; run..run_end - 1 are read.
        start: byte of the piece in its page.
        q_means: queries in the basis of the means.
        notes: (RUN, M) fp32; codes_max: (RUN,) int32 codes of scales.
    """
    COLUMNS: tl.constexpr = min(M, BLOCK)
    channel, entry = tl.arange(0, P.dim), tl.arange(0, P.entries)
    for first_column in range(0, M, COLUMNS):
        m = first_column + tl.arange(0, COLUMNS)
        column, there = column_rows(m, token, tokens, head, num_heads, GROUP)
        q = load_columns(q_means, column, there, channel, channel < P.head_dim, P.head_dim, False)
        size = tl.max(tl.abs(q), 0)
        q = q * inverse_of(size)[None, :]
        for first in range(0, (run_end - run) * P.page_tiles, BLOCK):
            base, row = block_rows(pages, run, run_end, start, first, P), first + tl.arange(0, BLOCK)
            means = open_means(arena, base, P.k_mean, P, CT, ASM)
            logits = multiply_exactly(means, q, empty(BLOCK, COLUMNS, False), CT, False) * (size * 256.0)[None, :]
            tl.store(notes + row[:, None] * M + m[None, :], logits)
            if first_column == 0:
                scales = tl.load(arena + base[:, None] + (P.v_scales + entry)[None, :]).to(tl.int32)
                tl.store(codes_max + row, tl.max(scales, 1))


@triton.jit
def note_weights(
    notes, row, weights, tile_top, tile_mass, P: tl.constexpr, M: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Note log2 of the sum of weights of each row of a tile, from `row` on, in `notes` (RUN, M)."""
    m = tl.arange(0, M)
    PAGES: tl.constexpr = P.tile_pages
    if PAGES == 1:
        tl.store(notes + row * M + m, tile_top + tl.log2(tile_mass))
    elif WIDE:
        slot = tl.arange(0, P.tile) // P.entries
        for p in tl.static_range(PAGES):
            mass = tl.sum(tl.where((slot == p)[None, :], weights, 0.0), 1)
            tl.store(notes + (row + p) * M + m, tile_top + tl.log2(mass))
    else:
        masses = tl.sum(weights.reshape(PAGES, P.entries, M), 1)
        rows = row + tl.arange(0, PAGES)
        tl.store(notes + rows[:, None] * M + m[None, :], tile_top[None, :] + tl.log2(masses))


@triton.jit
def add_means(
    out, arena, pages, run, run_end, start, notes, top,
    P: tl.constexpr, M: tl.constexpr, CT: tl.constexpr, ASM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`out` and what the value means of a run add to it; `notes` (RUN, M) are those of `note_weights`."""
    m, rows = tl.arange(0, M), (run_end - run) * P.page_tiles
    for first in range(0, rows, BLOCK):
        base, row = block_rows(pages, run, run_end, start, first, P), first + tl.arange(0, BLOCK)
        note = notes + over_entries(row, WIDE) * M + over_columns(m, WIDE)
        noted = tl.load(note, mask=over_entries(row < rows, WIDE), other=float("-inf"))
        weights = tl.exp2(noted - over_columns(top, WIDE)) * 256.0
        out = multiply_exactly(tl.trans(open_means(arena, base, P.v_mean, P, CT, ASM)), weights, out, CT, WIDE)
    return out
