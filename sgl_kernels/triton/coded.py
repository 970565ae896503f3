"""Attention of query columns over coded pages, opened in registers tile by tile."""

import triton
import triton.language as tl

from sgl_kernels.triton.codes import scale_value
from sgl_kernels.triton.columns import column_rows, inverse_of, load_columns
from sgl_kernels.triton.runs import RUN, add_means, note_run, note_weights
from sgl_kernels.triton.softmax import NOTHING, empty, join_top, multiply, over_columns, over_entries, tile_softmax
from sgl_kernels.triton.tiles import chunk_channels, open_keys, open_values

BIAS_STEP = tl.constexpr(1.4426950408889634 / 16)
"""Step of a stored bias as a logit of base 2."""


@triton.jit
def attend_coded(
    arena, pages, begin, end, start, q_codes, q_means, token, tokens, head, num_heads, notes, codes_max,
    P: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, CT: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Sum of weighted values in the flat basis, sum of weights and largest logit (M,) over pages begin..end - 1.

    Args:
        pages: int32 places of pages in units of 64 bytes.
        start: byte of the piece in its page.
        q_codes, q_means: queries in the basis of the codes, and of the means.
        notes: (2, RUN, M) fp32 and codes_max: (RUN,) int32 of this program, see `runs`.
    """
    n, m = tl.arange(0, P.tile), tl.arange(0, M)
    q_row, there = column_rows(m, token, tokens, head, num_heads, GROUP)
    operands, sizes = query_operands(q_codes, q_row, there, P, M, CT, WIDE)
    top = tl.full((M,), NOTHING, tl.float32)
    mass = tl.zeros((M,), tl.float32)
    out = empty(P.dim, M, WIDE)
    # Wide queries that are scaled anew for each page, or wide tiles of several pages, leave no registers for more.
    IN_FLIGHT: tl.constexpr = 1 if WIDE and (P.channel_scales or P.tile_pages > 1) else STAGES
    for run in range(begin, end, RUN // P.page_tiles):
        run_end = tl.minimum(end, run + RUN // P.page_tiles)
        note_run(
            arena, pages, run, run_end, start, q_means, token, tokens, head, num_heads, notes, codes_max,
            P, GROUP, M, CT, ASM,
        )  # fmt: skip
        tl.debug_barrier()
        for step in tl.range(0, tl.cdiv(run_end - run, P.tile_pages) * P.page_tiles, num_stages=IN_FLIGHT):
            page, tile, first_row = run + step // P.page_tiles * P.tile_pages, step % P.page_tiles, step * P.tile_pages
            slot = n // P.entries
            if P.tile_pages == 1:
                entry = n + tile * P.tile
                base = tl.load(pages + page).to(tl.int64) * 64 + start
            else:
                entry = n % P.entries
                base = tl.load(pages + tl.minimum(page + slot, run_end - 1)).to(tl.int64) * 64 + start
            # Rows beyond a page with fewer entries than a tile read its first one.
            if P.tile > P.entries * P.tile_pages:
                entry = tl.where(n < P.entries, n, 0)
            if P.channel_scales:
                logits = scaled_logits(arena, base, entry, q_codes, q_row, there, P, M, CT, ASM, WIDE)
            else:
                logits = coded_logits(arena, base, entry, operands, P, M, CT, ASM, WIDE) * over_columns(sizes, WIDE)
            if P.bias >= 0:
                bias = tl.load(arena + base + P.bias + entry).to(tl.float32) * BIAS_STEP
                logits += over_entries(bias, WIDE)
            logits += noted_means(notes, first_row, slot, P, M, WIDE)
            if P.tile_pages > 1:
                logits = tl.where(over_entries(page + slot < run_end, WIDE), logits, float("-inf"))
            elif P.tile > P.entries:
                logits = tl.where(over_entries(n < P.entries, WIDE), logits, float("-inf"))
            weights, tile_top, tile_mass = tile_softmax(logits, WIDE)
            top, keep, add = join_top(top, tile_top)
            mass = mass * keep + tile_mass * add
            note_weights(notes + RUN * M, first_row, weights, tile_top, tile_mass, P, M, WIDE)

            # Weights times scales as fp16: relative to a power of two near the largest scale of the tile.
            largest = tl.load(codes_max + first_row)
            PAGES: tl.constexpr = P.tile_pages
            for p in tl.static_range(1, PAGES):
                largest = tl.maximum(largest, tl.load(codes_max + first_row + p))
            largest = largest // 8 * 8
            scales = scale_value(tl.load(arena + base + P.v_scales + entry).to(tl.int32) - largest + 120)
            weighted = (weights * over_entries(scales, WIDE)).to(CT)
            values = tile_values(arena, pages, page, run_end, start, tile, P, CT, ASM)
            product = multiply(values, weighted, empty(P.dim, M, WIDE), WIDE)
            unit = add * (scale_value(largest) * P.value_unit)
            out = out * over_columns(keep, WIDE) + product * over_columns(unit, WIDE)
        tl.debug_barrier()
        out = add_means(out, arena, pages, run, run_end, start, notes + RUN * M, top, P, M, CT, ASM, WIDE)
        tl.debug_barrier()
    return out, mass, top


@triton.jit
def noted_means(notes, row, slot, P: tl.constexpr, M: tl.constexpr, WIDE: tl.constexpr):
    """What key means add to the logits of a tile whose first row is `row`; `slot` (N,): row of an entry in the tile."""
    m = tl.arange(0, M)
    if P.tile_pages == 1:
        return over_columns(tl.load(notes + row * M + m), WIDE)
    elif WIDE:
        # A load for each entry would take the registers.
        PAGES: tl.constexpr = P.tile_pages
        means = over_columns(tl.load(notes + row * M + m), WIDE)
        for p in tl.static_range(1, PAGES):
            means = tl.where((slot >= p)[None, :], over_columns(tl.load(notes + (row + p) * M + m), WIDE), means)
        return means
    else:
        return tl.load(notes + ((row + slot) * M)[:, None] + m[None, :])


@triton.jit
def query_operands(
    q_codes, row, there, P: tl.constexpr, M: tl.constexpr, CT: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """The query as an operand of type CT for each chunk of channels, relative to its largest channel (M,), whatever that is;
    nothing where the scales of channels are still to join."""
    axis: tl.constexpr = 1 if WIDE else 0
    operands = ()
    sizes = tl.zeros((M,), tl.float32)
    if not P.channel_scales:
        channel = tl.arange(0, P.dim)
        q = load_columns(q_codes, row, there, channel, channel < P.head_dim, P.head_dim, WIDE)
        sizes = tl.max(tl.abs(q), axis)
        inverse = over_columns(inverse_of(sizes), WIDE)
        for c in tl.static_range(len(P.chunks)):
            channel, valid = chunk_channels(P.chunks[c])
            q = load_columns(q_codes, row, there, channel, valid, P.head_dim, WIDE)
            operands = operands + ((q * inverse).to(CT),)
    return operands, sizes


@triton.jit
def coded_logits(
    arena, base, entry, operands,
    P: tl.constexpr, M: tl.constexpr, CT: tl.constexpr, ASM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Products of codes and queries, times the scales of the codes."""
    logits = empty(P.tile, M, WIDE)
    product = empty(P.tile, M, WIDE)
    for c in tl.static_range(len(P.chunks)):
        if P.chunks[c].opens_class:
            product = empty(P.tile, M, WIDE)
        product = multiply(open_keys(arena, base, entry, P, P.chunks[c], CT, ASM), operands[c], product, WIDE)
        if P.chunks[c].closes_class:
            scales = scale_value(tl.load(arena + base + P.chunks[c].scales_at + entry)) * P.chunks[c].unit
            logits += product * over_entries(scales, WIDE)
    return logits


@triton.jit
def scaled_logits(
    arena, base, entry, q_codes, row, there,
    P: tl.constexpr, M: tl.constexpr, CT: tl.constexpr, ASM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Products of codes and queries with which the scales of channels have been joined; these are rounded anew each page."""
    axis: tl.constexpr = 1 if WIDE else 0
    logits = empty(P.tile, M, WIDE)
    size = tl.zeros((M,), tl.float32)
    for c in tl.static_range(len(P.chunks)):
        size = tl.maximum(size, tl.max(tl.abs(scaled_query(arena, base, q_codes, row, there, P, P.chunks[c], WIDE)), axis))
    inverse = over_columns(inverse_of(size), WIDE)
    for c in tl.static_range(len(P.chunks)):
        query = (scaled_query(arena, base, q_codes, row, there, P, P.chunks[c], WIDE) * inverse).to(CT)
        logits = multiply(open_keys(arena, base, entry, P, P.chunks[c], CT, ASM), query, logits, WIDE)
    return logits * over_columns(size * P.chunks[0].unit, WIDE)


@triton.jit
def scaled_query(arena, base, q_codes, row, there, P: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr):
    """fp32 channels of a chunk of the query, times the scales of the page."""
    channel, valid = chunk_channels(C)
    scale = scale_value(tl.load(arena + base + P.k_scales + channel, mask=valid, other=0))
    return load_columns(q_codes, row, there, channel, valid, P.head_dim, WIDE) * over_entries(scale, WIDE)


@triton.jit
def tile_values(arena, pages, page, end, start, tile, P: tl.constexpr, CT: tl.constexpr, ASM: tl.constexpr):
    """(D, N) codes of the values of a tile."""
    page_groups: tl.constexpr = 1 if P.value_half else P.entries // P.value_width
    if P.tile_pages > 1:
        group = tl.arange(0, P.tile_pages * page_groups)
        base = tl.load(pages + tl.minimum(page + group // page_groups, end - 1)).to(tl.int64) * 64 + start
        return open_values(arena, base, group % page_groups, P, CT, ASM)
    else:
        tile_groups: tl.constexpr = P.tile // 8 if P.value_half else P.tile // P.value_width
        # A tile that is larger than its page repeats its last group.
        group = tl.minimum(tl.arange(0, tile_groups) + tile * tile_groups, page_groups - 1)
        base = tl.load(pages + page).to(tl.int64) * 64 + start
        return open_values(arena, base + 0 * group.to(tl.int64), group, P, CT, ASM)
