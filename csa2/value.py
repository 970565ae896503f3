"""What a page is worth, and what a step down the ladder costs.

*Worth* of a page: how soon and how often it will be read again, as far as its past says,

    worth = (1 + log2(1 + hits)) * 2^-age

with its age in turnovers of the cache (pages mapped since its last use over pages that are mapped), so that nothing has to
be tuned to a rate of requests. *Price* of a step: worth, times the loss that the step adds, over the bytes that it frees.
Losses are those of the formats, measured once without any calibration (docs/codec.md, table of demotions): what matters is
their order and rough size. Divergence grows with the square of the error.

*Value* for eviction, in turnovers: candidates are as small as they get, so what counts is when a page is read again,

    value = 0.5 * log2(1 + hits) - age - 0.005 * depth

Pages far from the beginning of their sequence are worth a little less: of two branches as old, the longer one loses its end.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from csa2.facts import PageFacts, Usage
from csa2.formats import FormatLadder

FORMAT_ERRORS = {
    "fp8": 0.0023,
    "k8v4": 0.0044,
    "fp4": 0.0090,
    "int4": 0.0084,
    "csa2-2x": 0.0204,
    "csa2-4x": 0.0269,
    "csa2-8x": 0.0325,
}
"""Relative error of the attention output with old pages in a format (docs/codec.md); the model dtype has none."""
IN_USE = 8.0
"""How many times more a page is worth that a running request reads: it is read in every step."""
HITS_WEIGHT = 0.5
"""Turnovers that doubling the requests that used a page makes up for (benchmark/eviction.py)."""
DEPTH_WEIGHT = 0.005
"""Turnovers by which a page is older for each page before it in its sequence."""
MAX_AGE = 60.0
"""Turnovers beyond which a page gets no older: 2^-60 is still a normal number."""


def format_losses(ladder: FormatLadder) -> Tensor:
    """(formats,) float64 loss of each format of the ladder: its squared error."""
    return torch.tensor([FORMAT_ERRORS.get(name, 0.0) ** 2 for name in ladder.names], dtype=torch.float64)


@dataclass(frozen=True)
class Turnover:
    """How far the cache has turned over; gives pages their age."""

    mapped_total: int = 0
    """Pages mapped since the start."""
    mapped: int = 0
    """Pages that are mapped now."""

    def age(self, turn: Tensor) -> Tensor:
        """float64 age in turnovers of pages last used at `turn`, see `PageFacts.turn`."""
        return ((self.mapped_total - turn).double() / max(1, self.mapped)).clamp(0, MAX_AGE)


def worth(facts: PageFacts, pages: Tensor, turnover: Turnover) -> Tensor:
    """(n,) float64 worth of `pages` (n,)."""
    age = turnover.age(facts.turn[pages])
    return (1 + torch.log2(1.0 + facts.hits[pages].double())) * torch.exp2(-age)


def worth_in_use(facts: PageFacts, pages: Tensor, usage: Usage, turnover: Turnover) -> Tensor:
    """(n,) float64 worth of `pages` (n,), of those that a running request reads `IN_USE` times more."""
    return worth(facts, pages, turnover) * torch.where(usage.users[pages] > 0, IN_USE, 1.0)


def step_costs(ladder: FormatLadder) -> Tensor:
    """(formats, formats) float64 loss that a step from one format to a smaller one adds, over the bytes that it frees."""
    losses = format_losses(ladder)
    sizes = torch.tensor(ladder.page_bytes, dtype=torch.float64)
    freed = (sizes[:, None] - sizes[None, :]).clamp(min=1)
    return (losses[None, :] - losses[:, None]).clamp(min=0) / freed


def eviction_values(facts: PageFacts, turnover: Turnover) -> Tensor:
    """(virtual pages,) float64 value of each page; among the ends of branches the smallest goes first."""
    age = turnover.age(facts.turn)
    return HITS_WEIGHT * torch.log2(1.0 + facts.hits.double()) - age - DEPTH_WEIGHT * facts.depth.double()
