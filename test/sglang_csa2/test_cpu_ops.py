"""Compiled small operators in SGLang's own modules, against their `forward_native`."""

import pytest
import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
from sglang.srt.layers.rotary_embedding import base, rope_variant
from sglang.srt.platforms import current_platform

from sglang_csa2 import cpu_ops

needs_platform = pytest.mark.skipif(
    not current_platform.is_out_of_tree() or current_platform.device_type != "cpu", reason="our CPU platform is not active"
)
EPS_BF16 = 2.0**-7
"""One step of bf16 beside 1."""


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(BaseFusedOp, "_oot_forward_registry", {})
    monkeypatch.setattr(cpu_ops, "_installed", None)
    cpu_ops.install()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_near(out: torch.Tensor, native: torch.Tensor, roundings: int) -> None:
    """Native rounds `roundings` times on the way, ours once."""
    assert out.dtype == native.dtype
    size = native.float().abs().amax(-1, keepdim=True)
    assert bool(((out.float() - native.float()).abs() <= (roundings + 1) * EPS_BF16 * size).all())


def test_nothing_is_registered_without_being_asked():
    assert RMSNorm not in BaseFusedOp._oot_forward_registry.get(current_platform.get_dispatch_key_name(), {})


@needs_platform
@pytest.mark.parametrize("shape", [(5, 96), (2, 3, 96)])
def test_rms_norm(installed, shape):
    norm = RMSNorm(96, eps=1e-5)
    norm.weight.data = random(96, seed=1)
    x = random(*shape)
    assert norm._resolve_forward_method().__func__ is cpu_ops.rms_norm
    assert_near(norm(x), norm.forward_native(x), 1)
    residual = random(*shape, seed=2)
    want, want_residual = norm.forward_native(x.clone(), residual.clone())
    out, total = norm(x, residual)
    assert_near(out, want, 1)
    assert torch.equal(total, want_residual)


@needs_platform
def test_variants_of_rms_norm_stay_native(installed):
    assert GemmaRMSNorm(32)._resolve_forward_method().__func__ is GemmaRMSNorm.forward_native
    odd = RMSNorm(32, var_hidden_size=16)
    x = random(3, 32)
    assert torch.equal(odd(x), odd.forward_native(x))
    wide = RMSNorm(32, fp32_residual=True)
    _, residual = wide(x.clone(), random(3, 32, seed=1).float())
    assert residual.dtype == torch.float32
    with pytest.raises(ValueError, match="Expected hidden_size"):
        RMSNorm(32)(random(3, 16))


@needs_platform
@pytest.mark.parametrize("shape", [(5, 64), (4, 3, 64)])
def test_silu_and_mul(installed, shape):
    op = SiluAndMul()
    x = random(*shape)
    assert op._resolve_forward_method().__func__ is cpu_ops.silu_and_mul
    assert_near(op(x), op.forward_native(x), 2)


@needs_platform
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary", [64, 32])
def test_rotary_embedding(installed, rotary, neox):
    rope = base.RotaryEmbedding(64, rotary, 128, 10000, neox, torch.bfloat16)
    qkv = random(7, 5 * 64)
    query, key, _ = qkv.split([3 * 64, 64, 64], -1)
    positions = torch.arange(7) * 9
    want = rope.forward_native(positions, query.clone(), key.clone())
    out = rope(positions, query, key)
    assert rope._forward_method.__func__ is cpu_ops.rotate
    for one, other in zip(out, want, strict=True):
        assert_near(one, other, 3)


@needs_platform
def test_classes_that_rotate_in_another_way_keep_theirs(installed):
    registered = BaseFusedOp._oot_forward_registry[current_platform.get_dispatch_key_name()]
    assert rope_variant.Llama3RotaryEmbedding in registered
    assert rope_variant.DeepseekScalingRotaryEmbedding not in registered


@needs_platform
def test_rotary_embedding_of_other_arguments_stays_native(installed):
    rope = base.RotaryEmbedding(64, 64, 128, 10000, True, torch.bfloat16)
    query, key, positions = random(4, 128), random(4, 64, seed=1), torch.arange(4)
    want = rope.forward_native(positions, query.clone(), key.clone(), torch.tensor(3))
    out = rope(positions, query, key, torch.tensor(3))
    assert all(torch.equal(a, b) for a, b in zip(out, want, strict=True))
