"""n-way merge of partial results: those of pages, and any others that come with their log-sum-exp."""

import triton
import triton.language as tl


@triton.jit
def joined(total, best, mass, value, lse):
    """The weighted sum, largest log-sum-exp and mass with one part more, and what other sums are to be multiplied by."""
    top = tl.maximum(best, lse)
    keep, weight = tl.exp2(best - top), tl.exp2(lse - top)
    return total * keep + value * weight, top, mass * keep + weight, keep


OF_A_BATCH = ("num_blocks", "splits", "num_tokens")
"""Arguments that differ from batch to batch: the kernel is not compiled anew for their values while a server serves."""


@triton.jit(do_not_specialize=OF_A_BATCH)
def merge_partials(
    spans, out, lse, others, others_lse, plain, coded, total,
    num_formats, num_blocks, splits, num_others, num_tokens, num_heads, plain_formats, other_unit,
    D: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """One program for each block, KV head and column.

    Args:
        spans: (X, 3) int32: first token and tokens of each block come first.
        out, lse: (F, X, splits, G, M, D) and (F, X, splits, G, M) fp32 of `attend_items`, base 2.
        others, others_lse: (num_others, T, H, D) any float, in the model's own basis, and (num_others, T, H) fp32.
        plain, coded: (T, H, D) fp32: what of the result is in the model's own basis, and what in the flat one.
        total: (T, H) fp32 log-sum-exp in base 2.
        plain_formats: how many of the formats, the first ones, are in the model's own basis.
        other_unit: one unit of `others_lse` in base 2: log2(e) if they are natural logarithms.
    """
    block, head, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(spans + block * 3) + m // GROUP
    if m // GROUP < tl.load(spans + block * 3 + 1):
        channel = tl.arange(0, DIM)
        real = channel < D
        row = token.to(tl.int64) * num_heads + head * GROUP + m % GROUP
        own = tl.zeros((DIM,), tl.float32)
        flat = tl.zeros((DIM,), tl.float32)
        best, mass = float("-inf"), 0.0
        for i in range(num_formats * splits):
            item = (i // splits * num_blocks + block) * splits + i % splits
            place = (item.to(tl.int64) * tl.num_programs(1) + head) * M + m
            part = tl.load(lse + place)
            # Where nothing was read nothing was written.
            if part > float("-inf"):
                value = tl.load(out + place * D + channel, mask=real, other=0.0)
                if i < plain_formats * splits:
                    own, best, mass, keep = joined(own, best, mass, value, part)
                    flat *= keep
                else:
                    flat, best, mass, keep = joined(flat, best, mass, value, part)
                    own *= keep
        for i in range(num_others):
            place = row + i * (num_tokens * num_heads)
            part = tl.load(others_lse + place) * other_unit
            if part > float("-inf"):
                value = tl.load(others + place * D + channel, mask=real, other=0.0).to(tl.float32)
                own, best, mass, keep = joined(own, best, mass, value, part)
                flat *= keep
        share = 1.0 / tl.where(mass > 0, mass, 1.0)
        tl.store(plain + row * D + channel, own * share, mask=real)
        tl.store(coded + row * D + channel, flat * share, mask=real)
        tl.store(total + row, best + tl.log2(mass))
