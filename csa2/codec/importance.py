"""How much attention each entry of a page can expect from queries to come.

That is seen best in a sample of the queries that its own request asked so far. Without one the size of the key tells: small
keys draw much attention (Devoto et al. 2024, "A simple and effective L2 norm based strategy for KV cache compression").
"""

import torch
from torch import Tensor

from sgl_kernels.page_codec.reference import Entries

EQUAL_SIZES = 0.01
"""Deviation of the sizes of a page's keys, over their mean, below which they count as equal: a few roundings of bfloat16."""


def attention_share(entries: Entries, observed: Tensor) -> Tensor:
    """(N, heads, E) fp32 share of the page's attention that each entry can expect; adds up to 1.

    Args:
        entries: N pages, keys in the model's own basis.
        observed: (N, heads, E) from `observed_attention`; a page where it is zero has no sample.
    """
    size = entries.keys.float().norm(dim=-1)
    average = size.mean(-1, keepdim=True)
    # Keys that were normalised (QK-norm) are equal but for rounding, which says nothing.
    floor = (EQUAL_SIZES * average).clamp(min=torch.finfo(torch.float32).tiny)
    spread = torch.maximum(size.std(-1, keepdim=True, correction=0), floor)
    expected = (average - size) / spread
    if entries.bias is not None:
        expected = expected + entries.bias
    has_sample = observed.flatten(1).any(-1)
    return torch.where(has_sample[:, None, None], observed, torch.softmax(expected, -1))


def observed_attention(entries: Entries, queries: Tensor | None) -> Tensor:
    """(N, heads, E) fp32 mean share of the page's attention that a sample of queries pays to each entry.

    Args:
        queries: (N, heads, M, D), softmax scale included; all zero for a page without a sample, whose result is zero. None:
            no page has one.
    """
    keys = entries.keys.float()
    if queries is None:
        return torch.zeros_like(keys[..., 0])
    logits = queries.float() @ keys.transpose(-1, -2)
    if entries.bias is not None:
        logits = logits + entries.bias.unsqueeze(-2)
    share = torch.softmax(logits, -1).mean(-2)
    return share * queries.flatten(1).any(-1)[:, None, None]
