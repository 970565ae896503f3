"""What calibration measures on a model's keys and queries.

The score of a pair of channels is the error that leaving it to the page mean would make in the logits: the squared
contribution of the pair to query-key products, page mean removed, weighted by the attention the key receives.
"""

import torch
from torch import Tensor

from csa2.codec.channels import Rotation

PAGE_TOKENS = 64
"""Tokens whose mean is removed; calibration does not depend on the page size of the server to first order."""
QUERY_TOKENS = 64


def channel_pairs(rotation: Rotation, head_dim: int) -> Tensor:
    """(P, 2) channels that are kept or dropped together: rotary pairs, then what does not rotate, two by two."""
    rotating = {channel for pair in rotation.pairs for channel in pair}
    rest = [channel for channel in range(head_dim) if channel not in rotating]
    pairs = [*rotation.pairs, *zip(rest[0::2], rest[1::2], strict=True)]
    return torch.tensor(pairs)


def pair_scores(queries: Tensor, keys: Tensor, pairs: Tensor) -> Tensor:
    """(G, P) score of each pair of channels in one layer of one sample, mean over queries.

    Args:
        queries: (H, T, D) rotated, softmax scale included.
        keys: (G, T, D) rotated.
        pairs: (P, 2) from `channel_pairs`.
    """
    groups, tokens, dim = keys.shape
    past = tokens // 2 // PAGE_TOKENS * PAGE_TOKENS
    rows = torch.linspace(past, tokens - 1, QUERY_TOKENS).long()
    asked = queries[:, rows].view(groups, -1, dim)
    attention = torch.softmax(asked @ keys[:, :past].transpose(-1, -2), -1)
    paged = keys[:, :past].view(groups, -1, PAGE_TOKENS, dim)
    rest = (paged - paged.mean(-2, keepdim=True)).flatten(1, 2)
    scores = [
        (attention * (asked[..., pair] @ rest[..., pair].transpose(-1, -2)).square()).sum((-1, -2))
        for pair in pairs.tolist()
    ]
    return torch.stack(scores, -1) / asked.shape[1]


def channel_order(scores: Tensor, pairs: Tensor) -> Tensor:
    """(..., D) int16 channels by falling score of their pair; `scores` is (..., P)."""
    by_score = scores.argsort(dim=-1, descending=True, stable=True)
    return pairs[by_score].flatten(-2).to(torch.int16)
