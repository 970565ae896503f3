"""Storing new tokens in plain pages."""

import triton
import triton.language as tl


@triton.jit
def write_rows(
    keys, values, table, rows, key_stride, value_stride, first_row, page_size, values_behind,
    D: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One program for each token and KV head.

    Args:
        keys, values: (T, G, D), strides between tokens, the heads of a token contiguous.
        table: the arena as rows of D values of the dtype of the pages.
        rows: (T,) int64 row of layer 0 and head 0 of each token; negative: the token is not stored.
        first_row: of the layer in a page; `values_behind`: rows from keys to values.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + token)
    channel = tl.arange(0, DIM)
    real = (channel < D) & (row >= 0)
    target = (row + first_row + head * page_size) * D + channel
    source = token.to(tl.int64)
    tl.store(table + target, tl.load(keys + source * key_stride + head * D + channel, mask=real), mask=real)
    target += values_behind * D
    tl.store(table + target, tl.load(values + source * value_stride + head * D + channel, mask=real), mask=real)
