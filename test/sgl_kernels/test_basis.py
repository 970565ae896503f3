"""The flat bases: orthonormal, symmetric, flat."""

import math

import pytest
import torch
from codec_bounds import U32

from sgl_kernels.basis import is_power_of_two, orthonormal_basis

DIMS = [1, 2, 32, 34, 48, 64, 80, 96, 100, 112, 128, 160, 192, 254, 256]


def test_powers_of_two():
    assert [n for n in range(-4, 70) if is_power_of_two(n)] == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize("dim", DIMS)
def test_basis_is_its_own_inverse(dim):
    basis = orthonormal_basis(dim)
    assert basis.dtype == torch.float32
    assert torch.equal(basis, basis.T)
    # Each entry is rounded once (U of itself), and sum |b||c| <= 1 for unit rows, so a dot product is off by 2 U.
    error = (basis.double() @ basis.double() - torch.eye(dim, dtype=torch.float64)).abs().max()
    assert float(error) <= 2 * U32 * (1 + 1e-6)


@pytest.mark.parametrize("dim", DIMS)
def test_basis_spreads_every_outlier(dim):
    largest = float(orthonormal_basis(dim).abs().max()) * math.sqrt(dim)
    assert largest <= (1 if is_power_of_two(dim) else math.sqrt(2)) * (1 + 4 * U32)


@pytest.mark.parametrize("dim", [2, 32, 64, 128, 256])
def test_powers_of_two_give_the_hadamard_matrix(dim):
    basis = orthonormal_basis(dim)
    assert torch.equal(basis.abs(), torch.full_like(basis, 1 / math.sqrt(dim)))
    bits = torch.arange(dim)
    parity = torch.tensor([[bin(i & j).count("1") % 2 for j in bits.tolist()] for i in bits.tolist()])
    assert torch.equal(basis < 0, parity.bool())
