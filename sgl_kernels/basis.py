"""Fixed orthonormal bases in which pages are quantised.

Rotating with a flat orthogonal matrix spreads outlier channels over all channels (QuaRot, Ashkboos et al. 2024). Both
bases here are symmetric and their own inverse, so the query side and the output side use the same matrix.
"""

import math

import torch
from torch import Tensor


def is_power_of_two(n: int) -> bool:
    """Whether `n` is 1, 2, 4, 8, ..."""
    return n > 0 and n & (n - 1) == 0


def orthonormal_basis(head_dim: int) -> Tensor:
    """(D, D) fp32, symmetric and orthonormal: Sylvester's Hadamard matrix if D is a power of two, else Hartley's.

    The Hartley matrix cas(2 pi i j / D) / sqrt(D) exists for every D; its entries are at most sqrt(2) times those of a
    Hadamard matrix, so it spreads outliers nearly as evenly (Bracewell 1983).
    """
    if is_power_of_two(head_dim):
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while matrix.shape[0] < head_dim:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    else:
        index = torch.arange(head_dim, dtype=torch.float64)
        angle = torch.outer(index, index) * (2 * math.pi / head_dim)
        matrix = torch.cos(angle) + torch.sin(angle)
    return (matrix / math.sqrt(head_dim)).to(torch.float32)
