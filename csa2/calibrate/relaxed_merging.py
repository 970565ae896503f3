"""Merging as `csa2/codec/merging.py` does it, with a gradient for the choice of pivots.

Forward it is the merging that serves. Backward, an entry is a pivot with probability r = sigmoid((log w - threshold) / T),
and what it is not itself it gives to its neighbours, the nearer and the likelier pivots the more (a straight-through
estimator, Bengio et al. 2013, over a soft top-k).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from csa2.codec.merging import entry_weight
from sgl_kernels.page_codec.reference import Entries

TEMPERATURE = 0.5
"""Of the soft choice, in nats of the weight."""
NEARNESS = 0.1
"""Squared distance, in variances of the page, over which a neighbour becomes e times less likely."""

TINY = torch.finfo(torch.float32).tiny


def pairwise_distance(entries: Entries) -> Tensor:
    """(N, heads, E, E) squared distance in key and value, each over the variance of the page."""

    def distance(x: Tensor) -> Tensor:
        centred = x - x.mean(-2, keepdim=True)
        spread = centred.square().sum(-1).mean(-1).clamp(min=TINY)
        return torch.cdist(centred, centred).square() / spread[..., None, None]

    return distance(entries.keys) + distance(entries.values)


def relaxed_merge(entries: Entries, importance: Tensor, groups: int, distance: Tensor) -> tuple[Tensor, Tensor]:
    """Unmerged pages as the groups of `merge_entries`, one at the place of each entry; those of no pivot are empty.

    Args:
        importance: (N, heads, E) positive; the results have a gradient with respect to it.
        distance: from `pairwise_distance`.

    Returns:
        Sum of values (N, heads, E, D) and mass (N, heads, E) of each group, in units of its pivot's weight.
    """
    weight = entry_weight(importance)
    share = _hard_groups(weight.detach(), groups, distance)
    soft = _soft_groups(weight.log(), groups, distance)
    share = share + (soft - soft.detach())
    share = share * (weight.unsqueeze(-1) / weight.unsqueeze(-2))
    return share.transpose(-1, -2) @ entries.values, share.sum(-2)


def _hard_groups(weight: Tensor, groups: int, distance: Tensor) -> Tensor:
    """(N, heads, E, E) 1 where the entry of the row belongs to the pivot of the column."""
    count = weight.shape[-1]
    pivots = torch.topk(weight, groups, dim=-1).indices
    is_pivot = torch.zeros_like(weight, dtype=torch.bool).scatter_(-1, pivots, torch.ones_like(pivots, dtype=torch.bool))
    nearest = distance.masked_fill(~is_pivot.unsqueeze(-2), float("inf")).argmin(-1)
    own = torch.arange(count, device=weight.device).expand_as(nearest)
    return F.one_hot(torch.where(is_pivot, own, nearest), count).to(weight.dtype)


def _soft_groups(log_weight: Tensor, groups: int, distance: Tensor) -> Tensor:
    """(N, heads, E, E) probability that the entry of the row belongs to a pivot at the column."""
    ordered = log_weight.detach().sort(-1, descending=True).values
    threshold = (ordered[..., groups - 1] + ordered[..., groups]) / 2
    logit = (log_weight - threshold.unsqueeze(-1)) / TEMPERATURE
    near = F.logsigmoid(logit).unsqueeze(-2) - distance / NEARNESS
    itself = torch.eye(distance.shape[-1], dtype=torch.bool, device=distance.device)
    others = near.masked_fill(itself, float("-inf")).softmax(-1)
    stays = torch.sigmoid(logit)
    return (1 - stays).unsqueeze(-1) * others + torch.diag_embed(stays)
