"""Which layers keep a large constant in their keys, from the weights alone.

A key bias is a constant before rotation. Slowly rotating pairs turn so little inside a page that the page mean removes
the constant; fast pairs average to nothing, so the constant survives as an outlier that the flat basis would spread over
all channels. Models with biased QKV projections (Qwen2) lose several per cent of perplexity at 4 bits from one such
layer; a bias alone proves nothing, other layers have large ones that the mean removes.
"""

import torch
from torch import Tensor

SURVIVING_BIAS_THRESHOLD = 3.0
"""Flag above it. Measured on Qwen2.5-0.5B: 15.6 and 17.8 in the layer that breaks, at most 1.32 in all other heads."""


def surviving_share(cos: Tensor, sin: Tensor) -> Tensor:
    """(pairs,) share of a constant's energy that the mean over a page leaves in each rotary pair.

    Args:
        cos, sin: (S, pairs) rotation of each pair at the positions of one page, scaled or not: YaRN multiplies both.
    """
    cos, sin = cos.double(), sin.double()
    # A share, because a rotation that scales does it to constant and content alike.
    return 1 - (cos.mean(0) ** 2 + sin.mean(0) ** 2) / (cos**2 + sin**2).mean(0)


def surviving_bias_ratio(bias: Tensor, weight: Tensor, norm_weight: Tensor, share: Tensor, *, neox: bool) -> Tensor:
    """(G,) size of the surviving bias over the size of the content, per KV head.

    Args:
        bias: (G, D) key bias.
        weight: (G, D, hidden) key projection.
        norm_weight: (hidden,) weight of the norm in front of the projection.
        share: (pairs,) from `surviving_share`; channels beyond the rotated ones do not rotate and are removed exactly.
        neox: whether pair j is channels (j, j + pairs) rather than (2j, 2j + 1).
    """
    pairs = share.numel()
    rotated = bias[:, : 2 * pairs].double()
    first, second = (rotated[:, :pairs], rotated[:, pairs:]) if neox else (rotated[:, 0::2], rotated[:, 1::2])
    constant = ((first**2 + second**2) * share).sum(-1).clamp(min=0).sqrt()
    content = (weight.double() * norm_weight.double()).flatten(1).norm(dim=1)
    ratio: Tensor = constant / content.clamp(min=torch.finfo(torch.float64).tiny)
    return ratio
