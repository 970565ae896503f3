"""The compiled small operators against float64, for every instruction set of this CPU."""

import pytest
import torch
from torch import Tensor

from sgl_kernels.cpu import isa as isas
from sgl_kernels.cpu.small_ops import SmallOps

ISAS = isas.available()
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
WIDTHS = [1, 15, 16, 17, 33, 100, 576]


def make(*shape: int, dtype: torch.dtype, seed: int = 0, gap: int = 0) -> Tensor:
    """Random rows, `gap` elements apart."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape[:-1], shape[-1] + gap, generator=random).to(dtype)[..., : shape[-1]]


def assert_rounded_once(out: Tensor, want: Tensor, terms: Tensor, roundings: int) -> None:
    """Off by the rounding of the result and by `roundings` fp32 roundings of the terms."""
    tolerance = 1.01 * UNIT[out.dtype] * want.abs() + roundings * UNIT[torch.float32] * terms.abs()
    if out.dtype == torch.float16:
        tolerance = tolerance + 2.0**-25  # below 2^-14 the steps of fp16 stay
    assert bool(((out.double() - want).abs() <= tolerance).all())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width, weight_dtype, dtype, isa):
    x, weight = make(5, width, dtype=dtype, gap=3), make(width, dtype=weight_dtype, seed=1)
    out = SmallOps(isa).rms_norm(x, weight, 1e-5)
    wide = x.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert out.dtype == dtype
    assert_rounded_once(out, want, want, width + 8)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", UNIT, ids=str)
def test_rms_norm_of_a_sum_normalises_it_before_it_is_rounded(dtype, isa):
    x, residual, weight = make(300, 576, dtype=dtype), make(300, 576, dtype=dtype, seed=2), make(576, dtype=dtype, seed=1)
    wide = x.double() + residual.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    SmallOps(isa).add_rms_norm(x, residual, weight, 1e-5)
    assert_rounded_once(residual, wide, wide, 2)
    assert_rounded_once(x, want, want, 600)


@pytest.mark.parametrize("isa", ISAS)
def test_rms_norm_can_round_before_the_weight(isa):
    x, weight = make(4, 64, dtype=torch.bfloat16), make(64, dtype=torch.bfloat16, seed=1)
    out = SmallOps(isa).rms_norm(x, weight, 1e-5, round_before_weight=True)
    wide = x.double()
    normal = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    want = normal * weight.double()
    # Two roundings to bf16 instead of one.
    assert bool(((out.double() - want).abs() <= 2.02 * UNIT[torch.bfloat16] * want.abs()).all())
    assert torch.equal(out, normal.bfloat16() * weight) or bool(((out - normal.bfloat16() * weight).abs() <= 2.0**-7 * want.abs()).all())  # fmt: skip # noqa: E501


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_and_mul(width, dtype, isa):
    x = make(7, 2 * width, dtype=dtype) * 4
    out = SmallOps(isa).silu_and_mul(x)
    gate, up = x.double().split(width, -1)
    want = gate / (1 + torch.exp(-gate)) * up
    assert_rounded_once(out, want, want, 16)


@pytest.mark.parametrize("isa", ISAS)
def test_silu_of_large_numbers_is_finite(isa):
    gate = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 1e30]])
    out = SmallOps(isa).silu_and_mul(torch.cat((gate, torch.ones_like(gate)), -1))
    # Far below zero silu is gate * 2^-126 at most: gone beside anything else.
    assert torch.allclose(out, torch.nn.functional.silu(gate), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", UNIT, ids=str)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (32, 16), (80, 20), (96, 96), (100, 50), (128, 128), (256, 64)])
def test_rotary_embedding(head_dim, rotary, neox, dtype, isa):
    query, key = make(6, 3 * head_dim, dtype=dtype, gap=5), make(6, 2 * head_dim, dtype=dtype, gap=1, seed=4)
    cache = make(50, rotary, dtype=dtype, seed=5)
    positions = torch.tensor([0, 49, 7, 7, 3, 20])
    before = [x.clone() for x in (query, key)]
    SmallOps(isa).rotate(query, key, cache, positions, head_dim, neox=neox)
    cos, sin = cache.double()[positions][:, None].split(rotary // 2, -1)
    for x, old in zip((query, key), before, strict=True):
        heads = old.double().unflatten(1, (-1, head_dim))
        part = heads[..., :rotary]
        one, two = part.split(rotary // 2, -1) if neox else (part[..., ::2], part[..., 1::2])
        turned = (one * cos - two * sin, two * cos + one * sin)
        want = torch.cat((torch.cat(turned, -1) if neox else torch.stack(turned, -1).flatten(-2), heads[..., rotary:]), -1)
        terms = part.abs().amax(-1, keepdim=True) * 2 * cache.double().abs().max()
        assert_rounded_once(x.unflatten(1, (-1, head_dim)), want, terms.expand_as(want), 4)
