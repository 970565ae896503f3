"""What the compressed cache must know of a model of transformers: whether it can serve it, and its geometry."""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from csa2.codec.channels import Rotation
from csa2.codec.rope import config_rotation
from csa2.errors import UnsupportedModelError
from csa2.formats import MODEL_DTYPES
from csa2.impl import INTERPRETER, resolve_impl
from csa2.key_bias import SURVIVING_BIAS_THRESHOLD, surviving_bias_ratio, surviving_share
from csa2.options import PAGE_SIZE, Impl
from sgl_kernels.page_layout import PageGeometry

logger = logging.getLogger(__name__)


def head_dim_of(config: Any) -> int:
    """Channels of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def check_model(model: PreTrainedModel, impl: Impl) -> None:
    """Refuse a model whose attention compressed pages cannot serve, or not by `impl`.

    Raises:
        UnsupportedModelError: names the reason.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if not kinds else None
    reasons = {
        f'it lies on {model.device}, where only impl="cuda" can serve it, which nobody has run yet': (
            model.device.type != "cpu" and (model.device.type, impl) != ("cuda", "cuda")
        ),
        'it lies on the CPU and impl="cuda" does not': (
            model.device.type == "cpu" and impl == "cuda" and resolve_impl(impl).detail != INTERPRETER
        ),
        "it is spread over several devices": len({parameter.device for parameter in model.parameters()}) > 1,
        f"its dtype is {model.dtype}: load it as one of {', '.join(MODEL_DTYPES)}": _name(model.dtype) not in MODEL_DTYPES,
        "it has an encoder": model.config.is_encoder_decoder,
        f"some of its layers are {', '.join(sorted(kinds - {'full_attention'}))}": bool(kinds - {"full_attention"}),
        f"it has a sliding window of {window}": window is not None and getattr(config, "use_sliding_window", True),
        "its attention logits are capped": bool(getattr(config, "attn_logit_softcapping", None)),
        "it caches latents instead of keys and values": bool(getattr(config, "kv_lora_rank", None)),
        "some of its layers read the keys of others": bool(getattr(config, "num_kv_shared_layers", None)),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedModelError(
                f"CompressedCache does not support {type(model).__name__}: {reason}. Use a cache of transformers itself"
            )


def geometry_of(model: PreTrainedModel) -> tuple[PageGeometry, Rotation]:
    """Geometry of its pages, and which channels of its keys rotate together."""
    config = model.config.get_text_config()
    head_dim = head_dim_of(config)
    rotation = config_rotation(config, head_dim)
    geometry = PageGeometry(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        page_size=PAGE_SIZE,
        dtype=model.dtype,
        identity_layers=_identity_layers(model, head_dim, rotation),
    )
    return geometry, rotation


def _identity_layers(model: PreTrainedModel, head_dim: int, rotation: Rotation) -> tuple[int, ...]:
    """Layers whose key bias survives the page mean, see `csa2.key_bias`."""
    if rotation.is_none:
        return ()
    blocks = [block for block in model.modules() if hasattr(block, "self_attn") and hasattr(block, "input_layernorm")]
    flagged = []
    for layer, block in enumerate(blocks):
        projection = getattr(block.self_attn, "k_proj", None)
        if projection is None or getattr(projection, "bias", None) is None:
            continue
        ratio = _bias_ratio(projection, block.input_layernorm.weight, head_dim, _shares(model, rotation))
        if float(ratio.max()) > SURVIVING_BIAS_THRESHOLD:
            logger.info("csa2: layer %d keeps a key bias of %.1f times its content", layer, float(ratio.max()))
            flagged.append(layer)
    return tuple(flagged)


def _shares(model: PreTrainedModel, rotation: Rotation) -> Tensor:
    rope = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
    cos, sin = rope(torch.zeros(1, 1, 1), torch.arange(PAGE_SIZE)[None])
    pairs = len(rotation.pairs)
    return surviving_share(cos[0, :, :pairs], sin[0, :, :pairs])


def _bias_ratio(projection: nn.Linear, norm_weight: Tensor, head_dim: int, shares: Tensor) -> Tensor:
    weight, bias, norm = (value.detach().float().cpu() for value in (projection.weight, projection.bias, norm_weight))
    keys = weight.view(-1, head_dim, weight.shape[-1])
    return surviving_bias_ratio(bias.view(-1, head_dim), keys, norm, shares, neox=True)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
