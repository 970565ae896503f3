"""What the plugin must know of the loaded model: which attention layers it can serve, which keep a key bias.

UPSTREAM(sglang 0.5.23): reads `RadixAttention`, `QKVParallelLinear`, `RotaryEmbedding` modules by type and attribute.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from csa2.codec.channels import Rotation, make_rotation
from csa2.errors import UnsupportedModelError
from csa2.key_bias import SURVIVING_BIAS_THRESHOLD, surviving_bias_ratio, surviving_share
from csa2.options import PAGE_SIZE

logger = logging.getLogger(__name__)

NORMS = ("input_layernorm", "ln_1")
"""Names that SGLang's models give the norm in front of the attention."""


def attention_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Every attention layer: dotted name and module of its parent, and the `RadixAttention` itself."""
    from sglang.srt.layers.radix_attention import RadixAttention

    modules = dict(model.named_modules())
    for name, module in modules.items():
        if isinstance(module, RadixAttention):
            parent = name.rpartition(".")[0]
            yield parent, modules[parent], module


def check_attention(model: nn.Module, start_layer: int, num_layers: int) -> list[Any]:
    """Refuse a model with an attention layer that compressed pages cannot serve; the layers asked for, `RadixAttention`.

    Raises:
        UnsupportedModelError: names the layer and the reason.
    """
    from sglang.srt.layers.radix_attention import AttentionType

    layers = []
    for name, _, layer in attention_layers(model):
        reasons = {
            "it attends to another sequence (cross attention)": layer.is_cross_attention,
            "it is not causal (encoder)": layer.attn_type != AttentionType.DECODER,
            f"it has a sliding window of {layer.sliding_window_size}": layer.sliding_window_size > -1,
            f"its logits are capped at {layer.logit_cap}": bool(layer.logit_cap),
            "its queries are scaled with the position (xai_temperature_len)": layer.xai_temperature_len > 0,
            f"keys have {layer.qk_head_dim} channels and values {layer.v_head_dim}": layer.qk_head_dim != layer.v_head_dim,
        }
        for reason, holds in reasons.items():
            if holds:
                raise UnsupportedModelError(
                    f"--kv-compress csa2 does not support this model: attention layer {name!r}: {reason}. Serve it "
                    f"without --kv-compress"
                )
        layers.append(layer)
    asked = range(start_layer, start_layer + num_layers)
    missing = set(asked) - {layer.layer_id for layer in layers}
    if missing:
        raise UnsupportedModelError(
            f"--kv-compress csa2 does not support this model: layers {sorted(missing)} have no RadixAttention module. "
            f"Serve it without --kv-compress"
        )
    return [layer for layer in layers if layer.layer_id in asked]


def identity_layers(model: nn.Module, start_layer: int, num_layers: int, page_size: int = PAGE_SIZE) -> tuple[int, ...]:
    """Layers of this rank (counted from 0) whose key bias survives the page mean; their keys keep the identity basis."""
    flagged = set()
    parents = dict(model.named_modules())
    for name, parent, layer in attention_layers(model):
        ratio = _bias_ratio(parents.get(name.rpartition(".")[0]), parent, layer, page_size)
        if ratio is not None and float(ratio.max()) > SURVIVING_BIAS_THRESHOLD:
            flagged.add(layer.layer_id - start_layer)
            logger.info(
                "csa2: layer %d keeps a key bias of %.1f times its content; its keys are stored per channel",
                layer.layer_id,
                float(ratio.max()),
            )
    return tuple(sorted(layer for layer in flagged if 0 <= layer < num_layers))


def rotation_of(model: nn.Module, head_dim: int) -> Rotation:
    """Which channels of keys rotate together. Where layers differ, the first one that rotates decides."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    for _, parent, _ in attention_layers(model):
        for module in parent.children():
            if isinstance(module, RotaryEmbedding):
                return make_rotation(min(module.rotary_dim, head_dim), neox=module.is_neox_style)
    return Rotation(())


def _bias_ratio(block: nn.Module | None, parent: nn.Module, layer: Any, page_size: int) -> Tensor | None:
    """(G,) ratio of one layer, or None where keys have no bias or do not rotate (a constant is then removed exactly)."""
    from sglang.srt.layers.linear import QKVParallelLinear
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    qkv = next((m for m in parent.children() if isinstance(m, QKVParallelLinear)), None)
    rope = next((m for m in parent.children() if isinstance(m, RotaryEmbedding)), None)
    norm = next((getattr(block, name) for name in NORMS if hasattr(block, name)), None)
    # The bias of a LayerNorm goes through the projection and ends as a constant of the keys too.
    has_bias = getattr(qkv, "bias", None) is not None or getattr(norm, "bias", None) is not None
    if qkv is None or rope is None or not has_bias or not hasattr(qkv, "weight"):
        return None
    heads, dim = layer.tp_k_head_num, layer.qk_head_dim
    start = layer.tp_q_head_num * dim
    rows = slice(start, start + heads * dim)
    weight = qkv.weight.detach()
    if weight.is_mkldnn:
        weight = weight.to_dense()
    if weight.shape[0] < start + heads * dim or not weight.is_floating_point() or weight.dtype.itemsize < 2:
        # Quantised or packed weights: the content is not readable here, and a missed flag only costs quality.
        logger.warning("csa2: layer %d has packed QKV weights; its key bias cannot be examined", layer.layer_id)
        return None
    hidden = weight.shape[1]
    norm_weight, norm_bias = (
        value.detach().float().cpu() if value is not None and value.numel() == hidden else default
        for value, default in (
            (getattr(norm, "weight", None), torch.ones(hidden)),
            (getattr(norm, "bias", None), torch.zeros(hidden)),
        )
    )
    keys = weight[rows].float().cpu()
    bias = keys @ norm_bias
    if qkv.bias is not None:
        bias += qkv.bias.detach()[rows].float().cpu()
    cos, sin = rope.cos_sin_cache[:page_size].float().chunk(2, dim=-1)
    return surviving_bias_ratio(
        bias.view(heads, dim),
        keys.view(heads, dim, hidden),
        norm_weight,
        surviving_share(cos.cpu(), sin.cpu()),
        neox=rope.is_neox_style,
    )
