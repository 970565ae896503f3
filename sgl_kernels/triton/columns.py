"""Query columns: the query heads of a group, of one or several tokens."""

import triton
import triton.language as tl

from sgl_kernels.triton.softmax import over_columns, over_entries


@triton.jit
def column_rows(m, token, tokens, head, num_heads, GROUP: tl.constexpr):
    """Row (token, query head) of columns `m` of a block of `tokens` tokens from `token` on, and whether there is one."""
    row = (token + m // GROUP).to(tl.int64) * num_heads + head * GROUP + m % GROUP
    return row, m // GROUP < tokens


@triton.jit
def load_columns(queries, row, there, channel, valid, head_dim: tl.constexpr, WIDE: tl.constexpr):
    """fp32 channels `channel` of queries (T, H, D) as (channels, columns), or (columns, channels) if WIDE."""
    pointers = queries + over_columns(row * head_dim, WIDE) + over_entries(channel, WIDE)
    return tl.load(pointers, mask=over_columns(there, WIDE) & over_entries(valid, WIDE), other=0.0)


@triton.jit
def inverse_of(size):
    """1 / size, or 0."""
    return tl.where(size > 0, 1.0 / size, 0.0)
