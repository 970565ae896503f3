"""Samples for the tests of the scorer: random pages, and queries that look for the entries with a mark."""

import torch

from csa2.calibrate.merge_sample import MergeSample

PAGES, GROUPS, TOKENS, DIM = 3, 2, 64, 16


def random_sample(seed: int, rest: float = 0.0) -> MergeSample:
    """Queries of the sample look at anything; those that ask look at entries whose key has a large channel 0.

    Args:
        rest: log of the mass of everything that is not merged.
    """
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    asked = draw(GROUPS, 2, 12, DIM) * 0.3
    asked[..., 0] = 3.0
    return MergeSample(
        keys=draw(PAGES, GROUPS, TOKENS, DIM),
        values=draw(PAGES, GROUPS, TOKENS, DIM),
        queries=draw(GROUPS, 8, DIM) * 0.3,
        asked=asked,
        rest_mass=torch.full((GROUPS, 2, 12), rest),
        rest=draw(GROUPS, 2, 12, DIM),
    )
