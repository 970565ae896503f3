"""Merging neighbouring entries of a page into groups.

The most important entries become pivots; every other entry joins the pivot that is nearest in key and value. A group keeps
the key of its pivot, so its position is exact and nothing has to be rotated; its value is the weighted mean; its bias is the
log of the group's weight over that of the pivot, so that the group draws the attention that its members were worth.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_kernels.page_codec.reference import Entries

WEIGHT_FLOOR = 0.02
"""Added to the weight of each entry, in units of the page's mean: an entry that scores nothing still counts."""

ROUNDING = 2.0**-30
"""Variance over mean square below which entries do not differ but by fp32 rounding."""


def merge_heads(entries: Entries, importance: Tensor, groups: Sequence[int]) -> Entries:
    """Merge the entries of each head into its own number of groups; see `merge_entries`.

    Args:
        groups: E' of each head. Heads with fewer than others end with padding; a head that has that many already is left
            as it is.
    """
    if len(set(groups)) == 1 and groups[0] < entries.keys.shape[-2]:
        return merge_entries(entries, importance, groups[0])
    n, heads, _, dim = entries.keys.shape
    most = max(groups)
    keys, values = entries.keys.new_zeros(2, n, heads, most, dim)
    bias = entries.keys.new_full((n, heads, most), -math.inf)
    positions = None if entries.positions is None else entries.positions.new_zeros(n, heads, most)
    for count in set(groups):
        own = [head for head, wanted in enumerate(groups) if wanted == count]
        chosen = torch.tensor(own, device=keys.device)
        part = _heads(entries, chosen)
        if count < entries.keys.shape[-2]:
            part = merge_entries(part, importance[:, chosen], count)
        keys[:, chosen, :count], values[:, chosen, :count] = part.keys, part.values
        bias[:, chosen, :count] = 0.0 if part.bias is None else part.bias
        if positions is not None and part.positions is not None:
            positions[:, chosen, :count] = part.positions
    return Entries(keys, values, bias, positions)


def _heads(entries: Entries, chosen: Tensor) -> Entries:
    bias, positions = (None if x is None else x[:, chosen] for x in (entries.bias, entries.positions))
    return Entries(entries.keys[:, chosen], entries.values[:, chosen], bias, positions)


def merge_entries(entries: Entries, importance: Tensor, groups: int) -> Entries:
    """Merge E entries of each page and head into `groups`, in their order of position.

    Args:
        entries: keys and values (N, heads, E, D), bias and positions (N, heads, E) or None.
        importance: (N, heads, E) non-negative: how much attention later queries are expected to pay to each entry.
        groups: E' <= E.

    Returns:
        Entries with E' groups each and a bias of at least 0.
    """
    keys, values = entries.keys.float(), entries.values.float()
    weight = entry_weight(importance)
    if entries.bias is not None:
        weight = weight.masked_fill(entries.bias == -math.inf, 0.0)  # padding
    pivots = torch.topk(weight, groups, dim=-1).indices.sort(-1).values
    dim = keys.shape[-1]
    rows = pivots.unsqueeze(-1).expand(*pivots.shape, dim)
    pivot_keys = keys.gather(-2, rows)
    distance = _squared_distance(keys, rows) + _squared_distance(values, rows)
    nearest = distance.argmin(-1)
    # A pivot is its own group even where another one has the same key and value.
    nearest.scatter_(-1, pivots, torch.arange(groups, device=keys.device).expand_as(pivots))
    mass = torch.zeros_like(weight[..., :groups]).scatter_add_(-1, nearest, weight)
    owner = nearest.unsqueeze(-1).expand_as(values)
    summed = torch.zeros_like(pivot_keys).scatter_add_(-2, owner, values * weight.unsqueeze(-1))
    bias = (mass / weight.gather(-1, pivots)).log()
    if entries.bias is not None:
        bias = bias + entries.bias.gather(-1, pivots)
    positions = entries.positions
    if positions is not None:
        positions = positions.gather(-1, pivots)
    return Entries(pivot_keys, summed / mass.unsqueeze(-1), bias.clamp_(min=0), positions)


def entry_weight(importance: Tensor) -> Tensor:
    """(..., E) what each entry counts in its group, by its importance (..., E) over that of the page."""
    return importance / importance.mean(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) + WEIGHT_FLOOR


def _squared_distance(x: Tensor, rows: Tensor) -> Tensor:
    """(..., E, P) squared distance of each row of `x` (..., E, D) to its pivots, over the variance of the page.

    Args:
        rows: (..., P, D) index of the pivots along E, the same in all channels.
    """
    centred = x - x.mean(-2, keepdim=True)  # products of a large constant would cancel to noise
    size = x.square().sum(-1).mean(-1)
    spread = torch.maximum(centred.square().sum(-1).mean(-1), ROUNDING * size)
    pivots = centred.gather(-2, rows)
    squares = centred.square().sum(-1).unsqueeze(-1) + pivots.square().sum(-1).unsqueeze(-2)
    distance = squares - 2 * (centred @ pivots.transpose(-1, -2))
    return distance / spread.clamp(min=torch.finfo(torch.float32).tiny)[..., None, None]
