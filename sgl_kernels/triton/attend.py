"""Attention of query columns over the pages of one format: partial results with their log-sum-exp.

A *column* is one query head of one token; the columns of a program are the heads of a group, of one or several tokens. An
*item* of work is some pages of one request and one block of columns. Each program computes logits as (entries, columns)
and outputs as (channels, columns): codes are the left operand, so 64 entries fill a tensor core however few the queries are.
"""

import triton
import triton.language as tl

from sgl_kernels.triton.codes import mean_value, scale_value
from sgl_kernels.triton.softmax import NOTHING, join_top, tile_softmax
from sgl_kernels.triton.tiles import chunk_channels, open_keys, open_values

BIAS_STEP = tl.constexpr(1.4426950408889634 / 16)
"""Step of a stored bias as a logit of base 2."""
FP32 = tl.constexpr("fp32")
FP16 = tl.constexpr("fp16")
PLAIN = tl.constexpr("plain")


@triton.jit
def attend_coded(
    arena, pages, begin, end, start, q_codes, q_means, column, there,
    P: tl.constexpr, M: tl.constexpr, CT: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum of weighted values (D, M) in the flat basis, sum of weights and largest logit (M,) of coded pages.

    Args:
        pages: int32 places of pages in units of 64 bytes; begin..end - 1 are read.
        start: byte of the piece in its page.
        q_codes, q_means: queries in the basis of the codes, and of the means.
        column: (M,) where the channels of a column begin in either; `there`: whether there is one.
    """
    n, channel = tl.arange(0, P.tile), tl.arange(0, P.dim)
    real = channel < P.head_dim
    wide = column[:, None] + channel[None, :]
    q_mean = tl.load(q_means + wide, mask=there[:, None] & real[None, :], other=0.0)
    operands, sizes = (), tl.full((M,), 1.0, tl.float32)
    if not P.channel_scales:
        # Queries as fp16 relative to their largest channel, whatever their size.
        sizes = tl.max(tl.abs(tl.load(q_codes + wide, mask=there[:, None] & real[None, :], other=0.0)), 1)
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
    for step in tl.range(0, tl.cdiv(end - begin, P.tile_pages) * P.page_tiles, num_stages=STAGES):
        page = begin + step // P.page_tiles * P.tile_pages
        tile = step % P.page_tiles
        if P.tile_pages == 1:
            entry = n + tile * P.tile
            base = tl.load(pages + page).to(tl.int64) * 64 + start
        else:
            entry = n % P.entries
            base = tl.load(pages + tl.minimum(page + n // P.entries, end - 1)).to(tl.int64) * 64 + start
        # Rows beyond a page with fewer entries than a tile read its first ones.
        if P.tile > P.entries * P.tile_pages:
            entry = tl.where(n < P.entries, n, 0)
        logits = coded_logits(arena, base, entry, operands, P, M, CT, ASM) * sizes[None, :]
        if P.bias >= 0:
            logits += (tl.load(arena + base + P.bias + entry).to(tl.float32) * BIAS_STEP)[:, None]
        logits += mean_logits(arena, pages, page, end, start, q_mean, P)
        if P.tile_pages > 1:
            logits = tl.where((page + n // P.entries < end)[:, None], logits, float("-inf"))
        elif P.tile > P.entries:
            logits = tl.where((n < P.entries)[:, None], logits, float("-inf"))
        weights, tile_top, tile_mass = tile_softmax(logits)
        top, keep, add = join_top(top, tile_top)
        mass = mass * keep + tile_mass * add

        scales = scale_value(tl.load(arena + base + P.v_scales + entry))
        largest = tl.max(scales, 0)
        weighted = (weights * (scales / largest)[:, None]).to(CT)
        values = tile_values(arena, pages, page, end, start, tile, P, CT, ASM)
        product = tl.dot(values, weighted, out_dtype=tl.float32, input_precision="ieee")
        out = out * keep[None, :] + product * (add * (largest * P.value_unit))[None, :]
        out = add_means(out, arena, pages, page, end, start, weights, tile_mass, add, P, M)
    return out, mass, top


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
    else:
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
def mean_logits(arena, pages, page, end, start, q_mean, P: tl.constexpr):
    """(N or 1, M) what the key means of the pages of a tile add to logits."""
    channel = tl.arange(0, P.dim)
    real = channel < P.head_dim
    slot = tl.arange(0, P.tile) // P.entries
    PAGES: tl.constexpr = P.tile_pages
    for p in tl.static_range(PAGES):
        at = arena + page_base(pages, page + p, end, start) + P.k_mean
        mean = mean_value(tl.load(at + channel, mask=real, other=0))
        of_page = tl.sum(q_mean * mean[None, :], 1)[None, :]
        if P.tile_pages == 1:
            logits = of_page
        elif p == 0:
            logits = tl.where((slot == 0)[:, None], of_page, 0.0)
        else:
            logits = tl.where((slot == p)[:, None], of_page, logits)
    return logits


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
    else:
        page_groups: tl.constexpr = 1 if P.value_half else P.entries // P.value_width
        group = tl.arange(0, P.tile_pages * page_groups)
        base = tl.load(pages + tl.minimum(page + group // page_groups, end - 1)).to(tl.int64) * 64 + start
        return open_values(arena, base, group % page_groups, P, CT, ASM)


@triton.jit
def add_means(out, arena, pages, page, end, start, weights, tile_mass, add, P: tl.constexpr, M: tl.constexpr):
    """`out` (D, M) and what the value means of the pages of a tile add to it."""
    channel = tl.arange(0, P.dim)
    real = channel < P.head_dim
    slot = tl.arange(0, P.tile_pages)
    if P.tile_pages == 1:
        at = arena + page_base(pages, page, end, start) + P.v_mean
        mean = mean_value(tl.load(at + channel, mask=real, other=0))
        out += mean[:, None] * (tile_mass * add)[None, :]
    else:
        PAGES: tl.constexpr = P.tile_pages
        masses = tl.sum(weights.reshape(P.tile_pages, P.entries, M), 1)
        for p in tl.static_range(PAGES):
            at = arena + page_base(pages, page + p, end, start) + P.v_mean
            mean = mean_value(tl.load(at + channel, mask=real, other=0))
            of_page = tl.sum(tl.where((slot == p)[:, None], masses, 0.0), 0)
            out += mean[:, None] * (of_page * add)[None, :]
    return out


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
    arena, pages, lengths, items, table, q_codes, q_means, out, lse, num_heads,
    PIECES: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, CT: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program for each item and KV head.

    Args:
        arena: uint8.
        pages, lengths: (N,) int32 places in units of 64 bytes, and valid tokens, of the pages of the plan.
        items: (W, 4) int32: first token, tokens, first page and last + 1.
        table: (G, 2) int32 of this layer and format: which of PIECES, and where in the page in units of 64 bytes.
        q_codes, q_means: (T, H, D) fp32 times softmax scale and log2(e), in the basis of the codes and of the means.
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
                        arena, pages, begin, end, start, q_codes, q_means, column, there, P, M, CT, ASM, STAGES
                    )
                channel = tl.arange(0, P.dim)
                target = out + place * (M * P.head_dim) + m[None, :] * P.head_dim + channel[:, None]
                mask = there[None, :] & (channel < P.head_dim)[:, None]
                tl.store(target, sums / mass[None, :], mask=mask)
                tl.store(lse + place * M + m, top + tl.log2(mass), mask=there)
