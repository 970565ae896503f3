"""A learned correction of the score, for each KV head a network of its own.

    f = a . x + a0 + b . silu(W x + w0)            x: what is known of an entry
    score = training-free score x g / (1 - g)      g = sigmoid(f), in 0..1

With a, a0 and b zero, g is 1/2 everywhere and the score is the training-free one. Without hidden units the network is a
linear regression of the log of the score.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_kernels.page_codec.reference import Entries

SCALARS = 4
"""Features beside key and value: log of the share of attention, size of the key, log of the size of the value, position."""
SHARE_FLOOR = 2.0**-24
"""Share of a page's attention below which shares count as equal."""
SIZE_FLOOR = 1e-6
LIMIT = 8.0
"""Largest |f|: a factor of 3000, beyond which the order of entries does not change any more."""


@dataclass(frozen=True)
class Scorer:
    """Weights of the networks of some heads, fp32. Axes: F = 2 D + SCALARS features, U hidden units."""

    weights: Tensor
    """(heads, F, 1 + U): column 0 is a, the others are W."""
    offsets: Tensor
    """(heads, 1 + U): a0 and w0."""
    outer: Tensor
    """(heads, U): b."""

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return self.weights.numel() + self.offsets.numel() + self.outer.numel()

    def map(self, change: Callable[[Tensor], Tensor]) -> "Scorer":
        """The scorer with `change` made to each of its tensors."""
        return Scorer(change(self.weights), change(self.offsets), change(self.outer))

    def to(self, device: torch.device | str) -> "Scorer":
        """This scorer on `device`."""
        return self.map(lambda tensor: tensor.to(device))

    def correction(self, entries: Entries, observed: Tensor) -> Tensor:
        """(N, heads, E) fp32 factor of the training-free score, exp(f) > 0.

        It is 1 where the scorer has nothing to say: in heads whose entries are merged already, in pages without a sample.

        Args:
            entries: N pages, finite, keys in the model's own basis.
            observed: (N, heads, E) from `observed_attention`.
        """
        keys, values = entries.keys.float(), entries.values.float()
        dim = keys.shape[-1]
        of_keys, of_values, of_scalars = self.weights[:, :dim], self.weights[:, dim : 2 * dim], self.weights[:, 2 * dim :]
        hidden = keys @ of_keys + values @ of_values + scalar_features(entries, observed) @ of_scalars
        # Features of keys are relative to the page mean; so are their products.
        hidden = hidden - keys.mean(-2, keepdim=True) @ of_keys + self.offsets.unsqueeze(-2)
        f = hidden[..., 0] + (F.silu(hidden[..., 1:]) @ self.outer.unsqueeze(-1)).squeeze(-1)
        applies = observed.flatten(1).any(-1)[:, None].expand(f.shape[:2])
        if entries.bias is not None:
            applies = applies & (entries.bias == 0).all(-1)
        return torch.where(applies.unsqueeze(-1), f.clamp(-LIMIT, LIMIT).exp(), 1.0)


def scalar_features(entries: Entries, observed: Tensor) -> Tensor:
    """(N, heads, E, SCALARS) fp32 features beside key and value."""
    count = observed.shape[-1]
    share = (observed.clamp(min=SHARE_FLOOR) * count).log()
    key_size = entries.keys.float().norm(dim=-1)
    value_size = entries.values.float().norm(dim=-1).clamp(min=SIZE_FLOOR).log()
    position = torch.linspace(-1, 1, count, device=share.device).expand_as(share)
    return torch.stack([share, key_size, value_size, position], -1)
