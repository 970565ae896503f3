"""How important each token of a page is for queries to come.

The score of a token is the attention it can expect times the size of its value. Expected attention follows from the first
two moments of the queries: for a normal query, E exp(q . k) = exp(mean . k + k Cov k / 2) (Devoto et al. 2025). Without
moments (no calibration) all tokens expect the same and the value decides.
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


def importance(entries: Entries, moments: QueryMoments | None) -> Tensor:
    """(N, heads, E) fp32 score of each entry, comparable inside a page and head only."""
    size = entries.values.float().norm(dim=-1)
    keys = entries.keys.float()
    expected = torch.zeros_like(size) if moments is None else expected_attention(keys, moments).log()
    if entries.bias is not None:
        expected = expected + entries.bias
    scores: Tensor = size * torch.softmax(expected, -1)
    return scores


def expected_attention(keys: Tensor, moments: QueryMoments) -> Tensor:
    """(N, heads, E) share of the page's attention that each key (N, heads, E, D) can expect, summed over its query heads."""
    linear = torch.einsum("nhed,hrd->nher", keys, moments.mean)
    quadratic = torch.einsum("nhed,hrdc,nhec->nher", keys, moments.covariance, keys)
    shares: Tensor = torch.softmax(linear + quadratic / 2, dim=2)
    return shares.sum(-1)
