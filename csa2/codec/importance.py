"""How much attention each entry of a page can expect from queries to come.

That is seen best in a sample of the queries that its own request asked so far. Without one it follows from the first two
moments of the model's queries: for a normal query, E exp(q . k) = exp(mean . k + k Cov k / 2) (Devoto et al. 2025). Without
those (no calibration) nothing is known.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kernels.page_codec.reference import Entries


@dataclass(frozen=True)
class QueryMoments:
    """Rotated queries of a model, averaged over text and positions. R query heads read one KV head."""

    mean: Tensor
    """(L x G, R, D) fp32, softmax scale included."""
    covariance: Tensor
    """(L x G, R, D, D) fp32, softmax scale included twice."""

    def to(self, device: torch.device | str) -> "QueryMoments":
        """These moments on `device`."""
        return QueryMoments(self.mean.to(device), self.covariance.to(device))


def attention_share(entries: Entries, observed: Tensor, moments: QueryMoments | None) -> Tensor:
    """(N, heads, E) fp32 share of the page's attention that each entry can expect; adds up to 1.

    Args:
        entries: N pages, keys in the model's own basis.
        observed: (N, heads, E) from `observed_attention`; a page where it is zero has no sample.
        moments: of the model's queries, for pages without a sample; None: all their entries expect the same.
    """
    keys = entries.keys.float()
    bias: Tensor | float = 0.0 if entries.bias is None else entries.bias
    expected = torch.zeros_like(observed) if moments is None else expected_attention(keys, moments).log()
    has_sample = observed.flatten(1).any(-1)
    return torch.where(has_sample[:, None, None], observed, torch.softmax(expected + bias, -1))


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


def expected_attention(keys: Tensor, moments: QueryMoments) -> Tensor:
    """(N, heads, E) share of the page's attention that each key (N, heads, E, D) can expect, mean of its query heads."""
    linear = torch.einsum("nhed,hrd->nher", keys, moments.mean)
    quadratic = torch.einsum("nhed,hrdc,nhec->nher", keys, moments.covariance, keys)
    shares: Tensor = torch.softmax(linear + quadratic / 2, dim=2)
    return shares.mean(-1)
