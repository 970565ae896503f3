"""How important each entry of a page is for queries to come.

The score of an entry is the attention it can expect times the size of its value. What it can expect is seen best in a sample of
the queries that its own request asked so far. Without one it follows from the first two moments of the model's queries: for a
normal query, E exp(q . k) = exp(mean . k + k Cov k / 2) (Devoto et al. 2025). Without those (no calibration) all entries expect
the same and the value decides.
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


def importance(entries: Entries, queries: Tensor | None = None, moments: QueryMoments | None = None) -> Tensor:
    """(N, heads, E) fp32 score of each entry, comparable inside a page and head only.

    Args:
        entries: N pages, keys in the model's own basis.
        queries: (N, heads, M, D) sample of queries to each page, softmax scale included. A page whose sample is all zero has
            none, and is scored by `moments`.
        moments: of the model's queries.
    """
    keys, size = entries.keys.float(), entries.values.float().norm(dim=-1)
    bias = 0.0 if entries.bias is None else entries.bias
    expected = torch.zeros_like(size) if moments is None else expected_attention(keys, moments).log()
    expected = torch.softmax(expected + bias, -1)
    if queries is not None:
        seen = observed_attention(keys, queries, bias)
        has_sample = queries.flatten(1).any(-1)
        expected = torch.where(has_sample[:, None, None], seen, expected)
    scores: Tensor = size * expected
    return scores


def observed_attention(keys: Tensor, queries: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """(N, heads, E) mean share of the page's attention that `queries` (N, heads, M, D) pay to `keys` (N, heads, E, D)."""
    logits = queries.float() @ keys.transpose(-1, -2)
    if isinstance(bias, Tensor):
        logits = logits + bias.unsqueeze(-2)
    return torch.softmax(logits, -1).mean(-2)


def expected_attention(keys: Tensor, moments: QueryMoments) -> Tensor:
    """(N, heads, E) share of the page's attention that each key (N, heads, E, D) can expect, mean of its query heads."""
    linear = torch.einsum("nhed,hrd->nher", keys, moments.mean)
    quadratic = torch.einsum("nhed,hrdc,nhec->nher", keys, moments.covariance, keys)
    shares: Tensor = torch.softmax(linear + quadratic / 2, dim=2)
    return shares.mean(-1)
