"""What the plugin reads from a loaded model: layers it must refuse, and key biases that survive a page mean."""

import logging
import math
from typing import Any

import pytest
import torch
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.layers.linear import QKVParallelLinear  # noqa: E402 - after the platform is chosen
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding  # noqa: E402
from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from csa2.codec.channels import make_rotation  # noqa: E402
from csa2.errors import UnsupportedModelError  # noqa: E402
from csa2.key_bias import SURVIVING_BIAS_THRESHOLD, surviving_share  # noqa: E402
from csa2.options import PAGE_SIZE  # noqa: E402
from sglang_csa2.model import attention_layers, check_attention, identity_layers, rotation_of  # noqa: E402

HIDDEN, HEADS, KV_HEADS, DIM = 48, 4, 2, 64


class Qkv(QKVParallelLinear):
    """The weights of the layer without the process groups it asks for."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)


class Norm(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)


class Attention(nn.Module):
    def __init__(self, layer_id: int, qkv: nn.Module | None = None, rope: nn.Module | None = None, **changes: Any) -> None:
        super().__init__()
        if qkv is not None:
            self.qkv_proj = qkv
        if rope is not None:
            self.rotary_emb = rope
        self.attn = RadixAttention(HEADS, DIM, DIM**-0.5, num_kv_heads=KV_HEADS, layer_id=layer_id, **changes)


class Block(nn.Module):
    def __init__(self, attention: nn.Module, norm: nn.Module | None = None, norm_name: str = "input_layernorm") -> None:
        super().__init__()
        self.self_attn = attention
        self.post_attention_layernorm = Norm(torch.full((HIDDEN,), 1e-3))  # not the one in front
        if norm is not None:
            setattr(self, norm_name, norm)


def model_of(*blocks: nn.Module) -> nn.Module:
    model = nn.Module()
    model.layers = nn.ModuleList(blocks)
    return model


# Layers that compressed pages cannot serve.


def test_plain_layers_are_accepted() -> None:
    model = model_of(Block(Attention(0)), Block(Attention(1, sliding_window_size=0)))
    check_attention(model, 0, 2)
    assert [name for name, _, _ in attention_layers(model)] == ["layers.0.self_attn", "layers.1.self_attn"]


def test_layers_of_another_rank_are_not_missed() -> None:
    check_attention(model_of(Block(Attention(4)), Block(Attention(5))), 4, 2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logit_cap": 30.0}, "its logits are capped at 30.0"),
        ({"sliding_window_size": 128}, "it has a sliding window of 128"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "not causal"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "not causal"),
        ({"v_head_dim": 32}, "keys have 64 channels and values 32"),
    ],
    ids=["logit cap", "sliding window", "cross attention", "encoder", "bidirectional", "value dim"],
)
def test_one_such_layer_refuses_the_model(changes: dict[str, Any], reason: str) -> None:
    model = model_of(Block(Attention(0)), Block(Attention(1, **changes)), Block(Attention(2)))
    with pytest.raises(UnsupportedModelError, match=reason) as refusal:
        check_attention(model, 0, 3)
    assert "'layers.1.self_attn'" in str(refusal.value)
    assert "without --kv-compress" in str(refusal.value)


def test_queries_scaled_with_the_position_are_refused() -> None:
    model = model_of(Block(Attention(0)))
    model.layers[0].self_attn.attn.xai_temperature_len = 1024  # models set it after they made the layer
    with pytest.raises(UnsupportedModelError, match="scaled with the position"):
        check_attention(model, 0, 1)


def test_a_layer_without_attention_module_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"layers \[1, 2\] have no RadixAttention"):
        check_attention(model_of(Block(Attention(0)), Block(nn.Linear(2, 2))), 0, 3)


# Rotation.


@pytest.mark.parametrize(("neox", "first"), [(True, (0, DIM // 2)), (False, (0, 1))])
def test_pairs_are_those_of_the_rotary_embedding(neox: bool, first: tuple[int, int]) -> None:
    model = model_of(Block(Attention(0, rope=rotary(neox))))
    rotation = rotation_of(model, DIM)
    assert rotation == make_rotation(DIM, neox=neox)
    assert rotation.pairs[0] == first


def test_pairs_of_the_rotated_part_only() -> None:
    rotation = rotation_of(model_of(Block(Attention(0, rope=rotary(rotary_dim=32)))), DIM)
    assert rotation.pairs[0] == (0, 16)
    assert len(rotation.pairs) == 16


def test_the_first_layer_that_rotates_decides() -> None:
    """Some models leave rotation out in every fourth layer."""
    model = model_of(Block(Attention(0)), Block(Attention(1, rope=rotary(False))), Block(Attention(2, rope=rotary())))
    assert rotation_of(model, DIM) == make_rotation(DIM, neox=False)


def test_a_model_without_rotation() -> None:
    assert rotation_of(model_of(Block(Attention(0))), DIM).is_none


@pytest.mark.parametrize("neox", [True, False])
def test_the_embedding_turns_the_pairs_that_it_is_said_to(neox: bool) -> None:
    """A key in one channel stays in the two channels of its pair; the slowest pair turns least."""
    rope = rotary(neox)
    rotation = rotation_of(model_of(Block(Attention(0, rope=rope))), DIM)
    turned = []
    for a, b in rotation.pairs:
        key = torch.zeros(1, DIM)
        key[0, a] = 1.0
        rotated = rope.forward_native(torch.tensor([40]), key.clone(), key)[1][0]
        assert set(torch.nonzero(rotated.abs() > 1e-6).squeeze(-1).tolist()) <= {a, b}
        turned.append(float(rotated[a]))
    assert turned[-1] == max(turned) > 0.99


# Key biases.


def weights(kv_head: int, channels: dict[int, float]) -> tuple[Tensor, Tensor, float]:
    """QKV weight and bias, and the content of `kv_head`; the bias at `channels` of that head counts in contents.

    Query and value rows are large and biased: reading the wrong rows would show.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, generator=generator) * 100
    keys = slice(HEADS * DIM, (HEADS + KV_HEADS) * DIM)
    weight[keys] /= 100
    bias = torch.full((weight.shape[0],), 1e6)
    bias[keys] = 0
    rows = slice((HEADS + kv_head) * DIM, (HEADS + kv_head + 1) * DIM)
    content = weight[rows].norm().item()
    for channel, size in channels.items():
        bias[rows.start + channel] = size * content
    return weight, bias, content


def rotary(neox: bool = True, rotary_dim: int = DIM) -> RotaryEmbedding:
    return RotaryEmbedding(DIM, rotary_dim, 256, 10000, neox, torch.float32)


def flagged(rope: nn.Module, channels: dict[int, float], kv_head: int = 1, norm: nn.Module | None = None) -> bool:
    """Whether the second of two layers is flagged; the first has no bias."""
    weight, bias, _ = weights(kv_head, channels)
    blocks = (
        Block(Attention(0, Qkv(weight, torch.zeros_like(bias)), rope), norm),
        Block(Attention(1, Qkv(weight, bias), rope), norm),
    )
    found = identity_layers(model_of(*blocks), 0, 2)
    assert found in ((), (1,))
    return found == (1,)


def shares(rope: RotaryEmbedding) -> Tensor:
    cos, sin = rope.cos_sin_cache[:PAGE_SIZE].chunk(2, -1)
    return surviving_share(cos, sin)


@pytest.mark.parametrize(("kv_head", "part"), [(0, 0), (1, 0), (1, DIM // 2)])
def test_the_threshold_is_where_it_says(kv_head: int, part: int) -> None:
    """In either half of the fastest pair, of either head."""
    edge = SURVIVING_BIAS_THRESHOLD / math.sqrt(shares(rotary())[0])
    assert flagged(rotary(), {part: 1.01 * edge}, kv_head)
    assert not flagged(rotary(), {part: 0.99 * edge}, kv_head)


def test_slow_pairs_are_harmless() -> None:
    assert not flagged(rotary(), {20: 20.0, 31: 20.0, 63: -20.0})


@pytest.mark.parametrize(("channel", "neox", "interleaved"), [(14, False, True), (32, True, False), (1, True, True)])
def test_pairs_follow_the_style_of_the_rotation(channel: int, neox: bool, interleaved: bool) -> None:
    # Channel 14 belongs to pair 14 (slow) or 7 (fast), channel 32 to pair 0 (fast) or 16 (slow).
    assert flagged(rotary(neox=True), {channel: 4.0}) == neox
    assert flagged(rotary(neox=False), {channel: 4.0}) == interleaved


def test_channels_that_do_not_rotate_are_harmless() -> None:
    partial = rotary(rotary_dim=32)
    assert flagged(partial, {16: 4.0})  # second half of pair 0 of 16
    assert not flagged(partial, {32: 50.0, 63: 50.0})


def test_a_scaling_rotation_does_not_hide_the_bias() -> None:
    """YaRN multiplies cos and sin: slow pairs then counted less than nothing and cancelled fast ones."""
    yarn = YaRNScalingRotaryEmbedding(DIM, DIM, 256, 1000000, True, 4.0, torch.float32)
    assert yarn.mscale > 1.1
    assert flagged(yarn, {0: 4.0, 31: 20.0, 63: 20.0})
    assert not flagged(yarn, {31: 20.0, 63: 20.0})


@pytest.mark.parametrize("name", ["input_layernorm", "ln_1"])
def test_the_norm_in_front_scales_the_content(name: str) -> None:
    weight, bias, _ = weights(1, {0: 1.5})
    qkv = Qkv(weight, bias)
    for scale, found in ((1.0, ()), (0.25, (0,))):
        block = Block(Attention(0, qkv, rotary()), Norm(torch.full((HIDDEN,), scale)), name)
        assert identity_layers(model_of(block), 0, 1) == found


def test_without_a_norm_the_weights_alone_are_the_content() -> None:
    assert flagged(rotary(), {0: 3.1}, norm=None)
    assert not flagged(rotary(), {0: 2.9}, norm=None)
    assert not flagged(rotary(), {0: 2.9}, norm=Norm(torch.full((HIDDEN // 2,), 0.1)))  # a norm of something else


@pytest.mark.parametrize("with_bias", [True, False])
def test_the_bias_of_the_norm_is_a_constant_of_the_keys(with_bias: bool) -> None:
    weight, bias, content = weights(1, {})
    row = weight[(HEADS + 1) * DIM]  # pair 0 of the second head
    shift = row / row.norm() ** 2 * content * 4
    qkv = Qkv(weight, bias if with_bias else None)
    for factor, found in ((1.0, (0,)), (0.5, ())):
        block = Block(Attention(0, qkv, rotary()), Norm(torch.ones(HIDDEN), shift * factor))
        assert identity_layers(model_of(block), 0, 1) == found


def test_keys_without_bias_or_rotation_are_not_examined(caplog: pytest.LogCaptureFixture) -> None:
    weight, bias, _ = weights(1, {0: 50.0})
    learned = Block(Attention(0, Qkv(weight, bias)))  # GPT-2: the constant does not rotate, the mean takes all of it
    unbiased = Block(Attention(1, Qkv(weight, None), rotary()))
    split = Block(Attention(2, nn.Linear(HIDDEN, 8), rotary()))
    assert identity_layers(model_of(learned, unbiased, split), 0, 3) == ()
    assert not caplog.records


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_packed_weights_are_left_alone_with_a_warning(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    weight, bias, _ = weights(1, {0: 50.0})
    model = model_of(Block(Attention(0, Qkv(weight.to(dtype), bias), rotary())))
    assert identity_layers(model, 0, 1) == ()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "layer 0 has packed QKV weights" in record.getMessage()


def test_the_log_names_the_layer_and_counting_starts_at_the_rank(caplog: pytest.LogCaptureFixture) -> None:
    weight, bias, _ = weights(0, {0: 5.0})
    blocks = [
        Block(Attention(8, Qkv(weight, torch.zeros_like(bias)), rotary())),
        Block(Attention(9, Qkv(weight, bias), rotary())),
    ]
    with caplog.at_level(logging.INFO, "sglang_csa2"):
        assert identity_layers(model_of(*blocks), 8, 2) == (1,)
    assert "layer 9 keeps a key bias of 5.0 times its content" in caplog.text
