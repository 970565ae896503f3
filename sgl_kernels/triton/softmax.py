"""Online softmax in base 2 over tiles of entries, one column a query."""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-1e30)
"""A logit below all others, and yet finite: what remains of a tile without entries."""


@triton.jit
def tile_softmax(logits):
    """(N, M) logits of base 2 -> weights relative to the largest of the tile, that one (M,), and the sum of weights (M,)."""
    top = tl.maximum(tl.max(logits, 0), NOTHING)
    weights = tl.exp2(logits - top[None, :])
    return weights, top, tl.sum(weights, 0)


@triton.jit
def join_top(top, tile_top):
    """The new largest logit, and the factors that bring what there was and the tile to it."""
    joint = tl.maximum(top, tile_top)
    return joint, tl.exp2(top - joint), tl.exp2(tile_top - joint)
