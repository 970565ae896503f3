"""Key biases that survive the page mean: against rotating the bias through a page and taking the mean off."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from csa2.key_bias import SURVIVING_BIAS_THRESHOLD, surviving_bias_ratio, surviving_share

SIZE = 64
fixed = settings(derandomize=True, deadline=None, max_examples=60)


def rotation(pairs: int, start: int = 0, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """cos and sin (S, pairs) at the positions of one page."""
    frequency = base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    angle = torch.outer(torch.arange(start, start + SIZE, dtype=torch.float64), frequency)
    return angle.cos().float(), angle.sin().float()


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, neox: bool) -> Tensor:
    """(S, D): the constant `x` (D,) as RoPE turns it at each position; channels beyond the pairs do not turn."""
    pairs = cos.shape[1]
    out = x.double().repeat(cos.shape[0], 1)
    first = torch.arange(pairs) if neox else torch.arange(0, 2 * pairs, 2)
    second = first + (pairs if neox else 1)
    a, b, c, s = out[:, first].clone(), out[:, second].clone(), cos.double(), sin.double()
    out[:, first], out[:, second] = a * c - b * s, b * c + a * s
    return out


def left_by_the_mean(x: Tensor, cos: Tensor, sin: Tensor, *, neox: bool) -> float:
    """Size (root mean square over the page) of what the page mean leaves of the turning constant."""
    turned = rotated(x, cos, sin, neox=neox)
    return float((turned - turned.mean(0)).square().sum(-1).mean().sqrt())


def unit_content(heads: int, dim: int, hidden: int = 16) -> tuple[Tensor, Tensor]:
    """Projection and norm weights whose content has size 1 in every head."""
    weight = torch.randn(heads, dim, hidden, generator=torch.Generator().manual_seed(0))
    norm = torch.rand(hidden, generator=torch.Generator().manual_seed(1)) + 0.5
    size = (weight.double() * norm.double()).flatten(1).norm(dim=1)
    return (weight.double() / size[:, None, None]), norm


@fixed
@given(st.integers(0, 2**31), st.sampled_from([8, 16, 32]), st.sampled_from([0, 4]), st.booleans(), st.integers(0, 4096))
def test_the_ratio_is_what_the_page_mean_leaves(seed, pairs, unrotated, neox, start):
    dim = 2 * pairs + 2 * unrotated
    bias = torch.randn(3, dim, generator=torch.Generator().manual_seed(seed)) * torch.tensor([[1.0], [30.0], [0.01]])
    cos, sin = rotation(pairs, start)
    weight, norm = unit_content(3, dim)
    ratio = surviving_bias_ratio(bias, weight, norm, surviving_share(cos, sin), neox=neox)
    for head in range(3):
        # cos and sin in fp32: their squares are off by 2 U, which shows where nearly everything is removed.
        slack = 1e-3 * float(bias[head].norm())
        assert float(ratio[head]) == pytest.approx(left_by_the_mean(bias[head], cos, sin, neox=neox), rel=1e-5, abs=slack)


@fixed
@given(st.integers(0, 2**31), st.floats(0.01, 100))
def test_content_is_measured_behind_the_norm(seed, factor):
    bias = torch.randn(1, 16, generator=torch.Generator().manual_seed(seed))
    weight, norm = unit_content(1, 16)
    share = surviving_share(*rotation(8))
    once = surviving_bias_ratio(bias, weight, norm, share, neox=True)
    assert torch.allclose(surviving_bias_ratio(bias, weight, norm * factor, share, neox=True) * factor, once)
    assert torch.allclose(surviving_bias_ratio(bias, weight * factor, norm, share, neox=True) * factor, once)
    assert torch.allclose(surviving_bias_ratio(bias * factor, weight, norm, share, neox=True), once * factor)


def test_content_is_the_size_of_projected_normed_activations():
    """Activations of unit variance, times the norm's weight, through the projection: root mean square of the key."""
    random = torch.Generator().manual_seed(2)
    weight, norm = torch.randn(2, 16, 48, generator=random), torch.rand(48, generator=random) + 0.5
    x = torch.randn(20000, 48, generator=random)
    content = torch.einsum("th,gdh->tgd", x * norm, weight).square().sum(-1).mean(0).sqrt()
    bias = torch.zeros(2, 16)
    bias[:, 0] = 1.0
    ratio = surviving_bias_ratio(bias, weight, norm, torch.ones(8), neox=True)
    assert torch.allclose(1 / ratio, content.double(), rtol=0.02)


def test_no_bias_no_ratio():
    weight, norm = unit_content(2, 16)
    ratio = surviving_bias_ratio(torch.zeros(2, 16), weight, norm, surviving_share(*rotation(8)), neox=True)
    assert ratio.tolist() == [0.0, 0.0]


def test_a_head_without_content_is_flagged_and_not_divided_by_zero():
    norm = torch.ones(4)
    ratio = surviving_bias_ratio(torch.ones(1, 16), torch.zeros(1, 16, 4), norm, torch.ones(8), neox=True)
    assert float(ratio) > SURVIVING_BIAS_THRESHOLD
    assert not ratio.isnan().any()
    zero = surviving_bias_ratio(torch.zeros(1, 16), torch.zeros(1, 16, 4), norm, torch.ones(8), neox=True)
    assert float(zero) == 0.0


def test_slow_pairs_are_removed_and_fast_ones_survive():
    """The numbers measured on Qwen2.5-0.5B: head_dim 64, base 1000000."""
    share = surviving_share(*rotation(32, base=1e6))
    assert share.shape == (32,)
    assert bool((share[:7] > 0.92).all())
    assert [round(float(x), 2) for x in share[7:11]] == [0.59, 0.30, 0.14, 0.06]
    assert float(share[12:].abs().max()) < 0.02
    assert bool((share <= 1).all())


def test_the_share_does_not_depend_on_where_the_page_starts():
    early, late = (surviving_share(*rotation(32, start)) for start in (0, 640))
    assert torch.allclose(early, late, atol=1e-6)


def test_the_share_does_not_depend_on_the_scale_of_the_rotation():
    """YaRN multiplies cos and sin, which scales content and constant alike."""
    cos, sin = rotation(32)
    assert torch.allclose(surviving_share(1.35 * cos, 1.35 * sin), surviving_share(cos, sin), atol=1e-6)


@pytest.mark.parametrize("neox", [True, False])
def test_layouts_of_the_pairs(neox):
    """The same constant in the fastest pair: channels 0 and 8 of neox, 0 and 1 of the interleaved layout."""
    weight, norm = unit_content(1, 16)
    share = torch.tensor([1.0, *[0.0] * 7])
    for channel in range(16):
        bias = torch.zeros(1, 16)
        bias[0, channel] = 2.0
        fast = channel in ((0, 8) if neox else (0, 1))
        ratio = surviving_bias_ratio(bias, weight, norm, share, neox=neox)
        assert float(ratio) == pytest.approx(2.0 if fast else 0.0)


def test_channels_that_do_not_rotate_are_removed_exactly():
    weight, norm = unit_content(1, 16)
    bias = torch.zeros(1, 16)
    bias[0, 8:] = 1000.0
    share = surviving_share(*rotation(4))
    assert float(surviving_bias_ratio(bias, weight, norm, share, neox=True)) == 0.0
    assert left_by_the_mean(bias[0], *rotation(4), neox=True) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("pair", "flagged"), [(0, True), (6, True), (31, False)])
def test_the_threshold_looks_at_the_fast_pairs_only(pair, flagged):
    """A bias of 16 times the content: the fault of Qwen2.5-0.5B in a fast pair, harmless in a slow one."""
    weight, norm = unit_content(1, 64)
    bias = torch.zeros(1, 64)
    bias[0, pair] = 16.0
    share = surviving_share(*rotation(32, base=1e6))
    ratio = float(surviving_bias_ratio(bias, weight, norm, share, neox=True))
    assert (ratio > SURVIVING_BIAS_THRESHOLD) == flagged
    # A mean over the page leaves sqrt(share) of it.
    assert ratio == pytest.approx(16 * math.sqrt(max(0.0, float(share[pair]))), rel=1e-6)


def test_half_precision_weights_are_measured_in_full():
    weight, norm = unit_content(1, 16)
    bias, share = torch.full((1, 16), 300.0), torch.ones(8)
    half = surviving_bias_ratio(bias.half(), (weight * 1e-3).half(), norm.half(), share, neox=True)
    full = surviving_bias_ratio(bias, weight * 1e-3, norm, share, neox=True)
    assert torch.allclose(half, full, rtol=1e-2)
