"""Online softmax in base 2 over tiles of entries, and products of tiles with queries.

Few query columns: everything lies as (entries, columns) and (channels, columns), so that the 64 entries of a tile fill a
tensor core however few the columns are. Many columns (WIDE): as (columns, entries) and (columns, channels), so that the
softmax of a column stays in a few threads.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-1e30)
"""A logit below all others, and yet finite: what remains of a tile without entries."""


@triton.jit
def over_entries(x, WIDE: tl.constexpr):
    """(N,) or (D,) to join what has columns on its other axis."""
    if WIDE:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def over_columns(x, WIDE: tl.constexpr):
    """(M,) to join what has entries or channels on its other axis."""
    if WIDE:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def empty(N: tl.constexpr, M: tl.constexpr, WIDE: tl.constexpr):
    """Zeros for N entries or channels and M columns."""
    if WIDE:
        return tl.zeros((M, N), tl.float32)
    else:
        return tl.zeros((N, M), tl.float32)


@triton.jit
def multiply(left, right, sums, WIDE: tl.constexpr):
    """`sums` plus (N, K) times what has K and columns."""
    if WIDE:
        return tl.dot(right, tl.trans(left), sums, out_dtype=tl.float32, input_precision="ieee")
    else:
        return tl.dot(left, right, sums, out_dtype=tl.float32, input_precision="ieee")


@triton.jit
def tile_softmax(logits, WIDE: tl.constexpr):
    """Logits of base 2 -> weights relative to the largest of the tile, that one (M,), and the sum of weights (M,)."""
    axis: tl.constexpr = 1 if WIDE else 0
    top = tl.maximum(tl.max(logits, axis), NOTHING)
    weights = tl.exp2(logits - over_columns(top, WIDE))
    return weights, top, tl.sum(weights, axis)


@triton.jit
def join_top(top, tile_top):
    """The new largest logit, and the factors that bring what there was and the tile to it."""
    joint = tl.maximum(top, tile_top)
    return joint, tl.exp2(top - joint), tl.exp2(tile_top - joint)
