"""Attention of query columns over the pages of one format: partial results with their log-sum-exp.

An *item* of work is some pages of one request and one block of columns.
"""

import triton
import triton.language as tl

from sgl_kernels.triton.coded import attend_coded
from sgl_kernels.triton.columns import column_rows
from sgl_kernels.triton.plain import attend_plain
from sgl_kernels.triton.runs import RUN
from sgl_kernels.triton.softmax import over_columns, over_entries

PLAIN = tl.constexpr("plain")


@triton.jit
def attend_items(
    arena, pages, lengths, items, table, q_codes, q_means, notes, codes_max, out, lse, num_heads,
    PIECES: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, CT: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
    WIDE: tl.constexpr,
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
        WIDE: see `softmax`.
    """
    item, head = tl.program_id(0), tl.program_id(1)
    token, tokens = tl.load(items + item * 4), tl.load(items + item * 4 + 1)
    begin, end = tl.load(items + item * 4 + 2), tl.load(items + item * 4 + 3)
    kind, start = tl.load(table + head * 2), tl.load(table + head * 2 + 1).to(tl.int64) * 64
    m = tl.arange(0, M)
    there = column_rows(m, token, tokens, head, num_heads, GROUP)[1]
    place = item.to(tl.int64) * tl.num_programs(1) + head
    if begin == end:
        tl.store(lse + place * M + m, tl.full((M,), float("-inf"), tl.float32))
    else:
        notes += place * (2 * RUN * M)
        codes_max += place * RUN
        for i in tl.static_range(len(PIECES)):
            if kind == i:
                P: tl.constexpr = PIECES[i]
                if P.basis == PLAIN:
                    sums, mass, top = attend_plain(
                        arena, pages, lengths, begin, end, start, q_codes, token, tokens, head, num_heads,
                        P, GROUP, M, CT, STAGES, WIDE,
                    )  # fmt: skip
                else:
                    sums, mass, top = attend_coded(
                        arena, pages, begin, end, start, q_codes, q_means, token, tokens, head, num_heads, notes, codes_max,
                        P, GROUP, M, CT, ASM, STAGES, WIDE,
                    )  # fmt: skip
                channel = tl.arange(0, P.dim)
                target = out + place * (M * P.head_dim) + over_columns(m * P.head_dim, WIDE) + over_entries(channel, WIDE)
                mask = over_columns(there, WIDE) & over_entries(channel < P.head_dim, WIDE)
                tl.store(target, sums / over_columns(mass, WIDE), mask=mask)
                tl.store(lse + place * M + m, top + tl.log2(mass), mask=there)
