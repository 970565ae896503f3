"""Attention of query columns over the pages of one format: partial results with their log-sum-exp.

A *column* is one query head of one token; the columns of a program are the heads of a group, of one or several tokens. An
*item* of work is some pages of one request and one block of columns. Each program computes logits as (entries, columns)
and outputs as (channels, columns): codes are the left operand, so 64 entries fill a tensor core however few the queries are.
"""

import triton
import triton.language as tl

from sgl_kernels.triton.codes import E4M3, open_words, scale_value
from sgl_kernels.triton.softmax import NOTHING, join_top, tile_softmax
from sgl_kernels.triton.tiles import chunk_channels, open_keys, open_values, word_pointer

BIAS_STEP = tl.constexpr(1.4426950408889634 / 16)
"""Step of a stored bias as a logit of base 2."""
RUN = tl.constexpr(64)
"""Rows of a run: pages, or tiles of pages that have several."""
BLOCK = tl.constexpr(16)
"""Rows of a run whose means are opened at a time: more would take the registers of the main loop."""
FP32 = tl.constexpr("fp32")
FP16 = tl.constexpr("fp16")
PLAIN = tl.constexpr("plain")


@triton.jit
def attend_coded(
    arena, pages, begin, end, start, q_codes, q_means, column, there, notes, codes_max,
    P: tl.constexpr, M: tl.constexpr, CT: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum of weighted values (D, M) in the flat basis, sum of weights and largest logit (M,) of coded pages.

    Pages are read in runs. What is needed once a page is done for a whole run: before it the products with the key means,
    behind it the sum of the value means, both as matrix products. A *row* is a page, or each tile of a page that has more.

    Args:
        pages: int32 places of pages in units of 64 bytes; begin..end - 1 are read.
        start: byte of the piece in its page.
        q_codes, q_means: queries in the basis of the codes, and of the means.
        column: (M,) where the channels of a column begin in either; `there`: whether there is one.
        notes: (2, RUN, M) fp32 of this program: what the key mean adds to logits, and log2 of the weight of a row.
        codes_max: (RUN,) int32 of this program: largest code of a scale of values.
    """
    n, m = tl.arange(0, P.tile), tl.arange(0, M)
    operands, sizes = (), tl.full((M,), 1.0, tl.float32)
    if not P.channel_scales:
        # Queries as fp16 relative to their largest channel, whatever their size.
        channel = tl.arange(0, P.dim)
        mask = there[:, None] & (channel < P.head_dim)[None, :]
        sizes = tl.max(tl.abs(tl.load(q_codes + column[:, None] + channel[None, :], mask=mask, other=0.0)), 1)
    inverse = tl.where(sizes > 0, 1.0 / sizes, 0.0)
    for c in tl.static_range(len(P.chunks)):
        row, valid = chunk_channels(P.chunks[c])
        q = tl.load(q_codes + row[:, None] + column[None, :], mask=valid[:, None] & there[None, :], other=0.0)
        if P.channel_scales:
            operands = operands + (q,)
        else:
            operands = operands + ((q * inverse[None, :]).to(CT),)

    top = tl.full((M,), NOTHING, tl.float32)
    mass = tl.zeros((M,), tl.float32)
    out = tl.zeros((P.dim, M), tl.float32)
    for run in range(begin, end, RUN // P.page_tiles):
        run_end = tl.minimum(end, run + RUN // P.page_tiles)
        note_run(arena, pages, run, run_end, start, q_means, column, there, notes, codes_max, P, M, CT, ASM)
        tl.debug_barrier()
        for step in tl.range(0, tl.cdiv(run_end - run, P.tile_pages) * P.page_tiles, num_stages=STAGES):
            page = run + step // P.page_tiles * P.tile_pages
            slot = n // P.entries if P.tile_pages > 1 else 0 * n
            tile = step % P.page_tiles
            if P.tile_pages == 1:
                entry = n + tile * P.tile
                base = tl.load(pages + page).to(tl.int64) * 64 + start
            else:
                entry = n % P.entries
                base = tl.load(pages + tl.minimum(page + slot, run_end - 1)).to(tl.int64) * 64 + start
            # Rows beyond a page with fewer entries than a tile read its first one.
            if P.tile > P.entries * P.tile_pages:
                entry = tl.where(n < P.entries, n, 0)
            logits = coded_logits(arena, base, entry, operands, P, M, CT, ASM) * sizes[None, :]
            if P.bias >= 0:
                logits += (tl.load(arena + base + P.bias + entry).to(tl.float32) * BIAS_STEP)[:, None]
            first_row = step * P.tile_pages
            logits += tl.load(notes + (first_row + slot)[:, None] * M + m[None, :])
            if P.tile_pages > 1:
                logits = tl.where((page + slot < run_end)[:, None], logits, float("-inf"))
            elif P.tile > P.entries:
                logits = tl.where((n < P.entries)[:, None], logits, float("-inf"))
            weights, tile_top, tile_mass = tile_softmax(logits)
            top, keep, add = join_top(top, tile_top)
            mass = mass * keep + tile_mass * add
            note_weights(notes, first_row, weights, tile_top, tile_mass, P, M)

            # Weights times scales as fp16: relative to a power of two near the largest scale of the tile.
            largest = tl.load(codes_max + first_row)
            PAGES: tl.constexpr = P.tile_pages
            for p in tl.static_range(1, PAGES):
                largest = tl.maximum(largest, tl.load(codes_max + first_row + p))
            largest = largest // 8 * 8
            scales = scale_value(tl.load(arena + base + P.v_scales + entry).to(tl.int32) - largest + 120)
            weighted = (weights * scales[:, None]).to(CT)
            values = tile_values(arena, pages, page, run_end, start, tile, P, CT, ASM)
            product = tl.dot(values, weighted, out_dtype=tl.float32, input_precision="ieee")
            out = out * keep[None, :] + product * (add * (scale_value(largest) * P.value_unit))[None, :]
        tl.debug_barrier()
        out = add_means(out, arena, pages, run, run_end, start, notes, top, P, M, CT, ASM)
        tl.debug_barrier()
    return out, mass, top


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
def exact_dot(left, right, CT: tl.constexpr):
    """`left` (type CT) times fp32 `right`, which is rounded to CT twice: once itself, once what that left over."""
    high = right.to(CT)
    low = (right - high.to(tl.float32)).to(CT)
    product = tl.dot(left, high, out_dtype=tl.float32, input_precision="ieee")
    return tl.dot(left, low, product, out_dtype=tl.float32, input_precision="ieee")


@triton.jit
def note_run(
    arena, pages, run, run_end, start, q_means, column, there, notes, codes_max,
    P: tl.constexpr, M: tl.constexpr, CT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Write what is needed of the rows of a run: see `attend_coded`."""
    m, channel, entry = tl.arange(0, M), tl.arange(0, P.dim), tl.arange(0, P.entries)
    mask = (channel < P.head_dim)[:, None] & there[None, :]
    q = tl.load(q_means + channel[:, None] + column[None, :], mask=mask, other=0.0)
    size = tl.max(tl.abs(q), 0)
    q = q * tl.where(size > 0, 1.0 / size, 0.0)[None, :]
    for first in range(0, (run_end - run) * P.page_tiles, BLOCK):
        base, row = block_rows(pages, run, run_end, start, first, P), first + tl.arange(0, BLOCK)
        logits = exact_dot(open_means(arena, base, P.k_mean, P, CT, ASM), q, CT) * (size * 256.0)[None, :]
        tl.store(notes + row[:, None] * M + m[None, :], logits)
        scales = tl.load(arena + base[:, None] + (P.v_scales + entry)[None, :]).to(tl.int32)
        tl.store(codes_max + row, tl.max(scales, 1))


@triton.jit
def note_weights(notes, row, weights, tile_top, tile_mass, P: tl.constexpr, M: tl.constexpr):
    """Note log2 of the sum of weights of each row of a tile, from `row` on."""
    m = tl.arange(0, M)
    if P.tile_pages == 1:
        tl.store(notes + (row + RUN) * M + m, tile_top + tl.log2(tile_mass))
    else:
        slot = tl.arange(0, P.tile_pages)
        masses = tl.sum(weights.reshape(P.tile_pages, P.entries, M), 1)
        tl.store(notes + (row + slot + RUN)[:, None] * M + m[None, :], tile_top[None, :] + tl.log2(masses))


@triton.jit
def add_means(
    out, arena, pages, run, run_end, start, notes, top,
    P: tl.constexpr, M: tl.constexpr, CT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`out` (D, M) and what the value means of a run add to it."""
    m, rows = tl.arange(0, M), (run_end - run) * P.page_tiles
    for first in range(0, rows, BLOCK):
        base, row = block_rows(pages, run, run_end, start, first, P), first + tl.arange(0, BLOCK)
        note = notes + (row + RUN)[:, None] * M + m[None, :]
        noted = tl.load(note, mask=(row < rows)[:, None], other=float("-inf"))
        means = tl.trans(open_means(arena, base, P.v_mean, P, CT, ASM))
        out += exact_dot(means, tl.exp2(noted - top[None, :]), CT) * 256.0
    return out


@triton.jit
def coded_logits(
    arena, base, entry, operands, P: tl.constexpr, M: tl.constexpr, CT: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """(N, M) products of codes and queries, times the scales of the codes."""
    logits = tl.zeros((P.tile, M), tl.float32)
    if P.channel_scales:
        # The scales of a page join its queries, which are made fp16 anew.
        size = tl.zeros((M,), tl.float32)
        scaled = ()
        for c in tl.static_range(len(P.chunks)):
            row, valid = chunk_channels(P.chunks[c])
            scale = scale_value(tl.load(arena + base + P.k_scales + row, mask=valid, other=0))
            scaled = scaled + (operands[c] * scale[:, None],)
            size = tl.maximum(size, tl.max(tl.abs(scaled[c]), 0))
        inverse = tl.where(size > 0, 1.0 / size, 0.0)
        for c in tl.static_range(len(P.chunks)):
            keys = open_keys(arena, base, entry, P, P.chunks[c], CT, ASM)
            query = (scaled[c] * inverse[None, :]).to(CT)
            logits = tl.dot(keys, query, logits, out_dtype=tl.float32, input_precision="ieee")
        return logits * (size * P.chunks[0].unit)[None, :]
    product = tl.zeros((P.tile, M), tl.float32)
    for c in tl.static_range(len(P.chunks)):
        keys = open_keys(arena, base, entry, P, P.chunks[c], CT, ASM)
        if P.chunks[c].opens_class:
            product = tl.dot(keys, operands[c], out_dtype=tl.float32, input_precision="ieee")
        else:
            product = tl.dot(keys, operands[c], product, out_dtype=tl.float32, input_precision="ieee")
        if P.chunks[c].closes_class:
            scales = scale_value(tl.load(arena + base + P.chunks[c].scales_at + entry)) * P.chunks[c].unit
            logits += product * scales[:, None]
    return logits


@triton.jit
def page_base(pages, page, end, start):
    """Byte of the piece in page number `page`, or in the last one."""
    return tl.load(pages + tl.minimum(page, end - 1)).to(tl.int64) * 64 + start


@triton.jit
def tile_values(arena, pages, page, end, start, tile, P: tl.constexpr, CT: tl.constexpr, ASM: tl.constexpr):
    """(D, N) codes of the values of a tile."""
    if P.tile_pages == 1:
        base = page_base(pages, page, end, start)
        if P.tile > P.entries:
            # A page of 8 entries in a tile of 16.
            group = tl.arange(0, P.tile // 8) * 0 if P.value_half else tl.arange(0, P.tile // P.value_width)
            limit: tl.constexpr = 1 if P.value_half else P.entries // P.value_width
            group = tl.minimum(group, limit - 1)
        else:
            group = tl.arange(0, P.tile // P.value_width) + tile * (P.tile // P.value_width)
        return open_values(arena, base + 0 * group.to(tl.int64), group, P, CT, ASM)
    page_groups: tl.constexpr = 1 if P.value_half else P.entries // P.value_width
    group = tl.arange(0, P.tile_pages * page_groups)
    base = tl.load(pages + tl.minimum(page + group // page_groups, end - 1)).to(tl.int64) * 64 + start
    return open_values(arena, base, group % page_groups, P, CT, ASM)


@triton.jit
def attend_plain(
    arena, pages, lengths, begin, end, start, q_model, column, there,
    P: tl.constexpr, M: tl.constexpr, CT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same of plain pages, `lengths` int32 valid entries of each."""
    n, channel = tl.arange(0, P.tile), tl.arange(0, P.dim)
    real = channel < P.head_dim
    T: tl.constexpr = tl.float32 if P.dtype == FP32 else tl.float16 if P.dtype == FP16 else tl.bfloat16
    item_bytes: tl.constexpr = 4 if P.dtype == FP32 else 2
    table = arena.to(tl.pointer_type(T))
    q = tl.load(q_model + channel[:, None] + column[None, :], mask=real[:, None] & there[None, :], other=0.0)
    size = tl.max(tl.abs(q), 0)
    query = (q * tl.where(size > 0, 1.0 / size, 0.0)[None, :]).to(CT)

    top = tl.full((M,), NOTHING, tl.float32)
    mass = tl.zeros((M,), tl.float32)
    out = tl.zeros((P.dim, M), tl.float32)
    for step in tl.range(0, tl.cdiv(end - begin, P.tile_pages) * P.page_tiles, num_stages=STAGES):
        page = begin + step // P.page_tiles * P.tile_pages
        number = page + n // P.entries if P.tile_pages > 1 else page + 0 * n
        entry = n % P.entries if P.tile_pages > 1 else n + step % P.page_tiles * P.tile
        at = tl.load(pages + tl.minimum(number, end - 1)).to(tl.int64) * (64 // item_bytes) + start // item_bytes
        valid = (entry < tl.load(lengths + tl.minimum(number, end - 1))) & (number < end)
        row = at + entry * P.head_dim
        mask = valid[:, None] & real[None, :]
        # To CT at once: what the interpreter computes in bf16 is wrong.
        keys = tl.load(table + row[:, None] + channel[None, :], mask=mask, other=0.0).to(CT)
        logits = tl.dot(keys, query, out_dtype=tl.float32, input_precision="ieee") * size[None, :]
        logits = tl.where(valid[:, None], logits, float("-inf"))
        weights, tile_top, tile_mass = tile_softmax(logits)
        top, keep, add = join_top(top, tile_top)
        mass = mass * keep + tile_mass * add
        behind = P.v_codes // item_bytes
        values = tl.load(table + behind + row[:, None] + channel[None, :], mask=mask, other=0.0).to(CT)
        product = tl.dot(tl.trans(values), weights.to(CT), out_dtype=tl.float32, input_precision="ieee")
        out = out * keep[None, :] + product * add[None, :]
    return out, mass, top


@triton.jit
def attend_items(
    arena, pages, lengths, items, table, q_codes, q_means, notes, codes_max, out, lse, num_heads,
    PIECES: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, CT: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program for each item and KV head.

    Args:
        arena: uint8.
        pages, lengths: (N,) int32 places in units of 64 bytes, and valid tokens, of the pages of the plan.
        items: (W, 4) int32: first token, tokens, first page and last + 1.
        table: (G, 2) int32 of this layer and format: which of PIECES, and where in the page in units of 64 bytes.
        q_codes, q_means: (T, H, D) fp32 times softmax scale and log2(e), in the basis of the codes and of the means.
        notes, codes_max: (W, G, 2, RUN, M) fp32 and (W, G, RUN) int32, what programs note for themselves.
        out: (W, G, M, D) fp32 normalised, not written where nothing was read; lse: (W, G, M) fp32 in base 2, minus infinity
            there.
        GROUP: query heads of a KV head; M: columns, the heads of a token after each other.
        CT: type of the operands of matrix products.
    """
    item, head = tl.program_id(0), tl.program_id(1)
    token, tokens = tl.load(items + item * 4), tl.load(items + item * 4 + 1)
    begin, end = tl.load(items + item * 4 + 2), tl.load(items + item * 4 + 3)
    kind, start = tl.load(table + head * 2), tl.load(table + head * 2 + 1).to(tl.int64) * 64
    m = tl.arange(0, M)
    there = m // GROUP < tokens
    first = (token + m // GROUP).to(tl.int64) * num_heads + head * GROUP + m % GROUP
    place = item.to(tl.int64) * tl.num_programs(1) + head
    if begin == end:
        tl.store(lse + place * M + m, tl.full((M,), float("-inf"), tl.float32))
    else:
        for i in tl.static_range(len(PIECES)):
            if kind == i:
                P: tl.constexpr = PIECES[i]
                column = first * P.head_dim
                if P.basis == PLAIN:
                    sums, mass, top = attend_plain(
                        arena, pages, lengths, begin, end, start, q_codes, column, there, P, M, CT, STAGES
                    )
                else:
                    sums, mass, top = attend_coded(
                        arena,
                        pages,
                        begin,
                        end,
                        start,
                        q_codes,
                        q_means,
                        column,
                        there,
                        notes + place * (2 * RUN * M),
                        codes_max + place * RUN,
                        P,
                        M,
                        CT,
                        ASM,
                        STAGES,
                    )
                channel = tl.arange(0, P.dim)
                target = out + place * (M * P.head_dim) + m[None, :] * P.head_dim + channel[:, None]
                mask = there[None, :] & (channel < P.head_dim)[:, None]
                tl.store(target, sums / mass[None, :], mask=mask)
                tl.store(lse + place * M + m, top + tl.log2(mass), mask=there)
