"""The rotary embedding of the served model, for `--csa2-rope separated`.

Looked at twice: in the configuration, before anything is loaded, and in the modules, which are what rotates.

UPSTREAM(sglang 0.5.23): reads `RotaryEmbedding` modules by type, attribute and their `cos_sin_cache`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from csa2.codec.channels import Rotation
from csa2.codec.rope import check_rope_type, make_rope, rope_type_of
from csa2.errors import OptionError
from csa2.options import CacheOptions
from sgl_kernels.rope import Rope
from sglang_csa2.model import attention_layers

CHECKED_POSITIONS = 256
"""Most rows of the module's own table that ours is compared with."""


def check_rope(options: CacheOptions, model_config: Any) -> None:
    """Refuse a rotary embedding that keys cannot be separated from, as the model's configuration names it.

    Raises:
        OptionError: names the kind and those that can.
    """
    if options.rope != "separated":
        return
    config = model_config.hf_text_config
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # Some models have one set of parameters for each kind of layer.
    for each in [value for value in parameters.values() if isinstance(value, dict)] or [parameters]:
        check_rope_type(rope_type_of(each))


def separable_rope(options: CacheOptions, model: nn.Module, rotation: Rotation) -> Rope | None:
    """The rotary embedding that all layers of `model` share, or None where keys keep it.

    Raises:
        OptionError: layers rotate differently, or in a way that cannot be put back, or not at all.
    """
    if options.rope != "separated":
        return None
    modules = {}
    for name, parent, _ in attention_layers(model):
        found = [
            module for module in parent.children() if hasattr(module, "cos_sin_cache") or "Rotary" in type(module).__name__
        ]
        modules[name] = found[0] if found else None
    if len({id(module) for module in modules.values()}) > 1:
        first, *others = modules
        other = next(name for name in others if modules[name] is not modules[first])
        raise OptionError(
            f"--csa2-rope separated needs the same rotary embedding in every layer, but layers {first!r} and {other!r} of "
            f"this model rotate differently: leave --csa2-rope out"
        )
    module: Any = next(iter(modules.values()), None)
    rope = make_rope(rotation, {} if module is None else _parameters(module))
    _compare(rope, module)
    return rope


def _parameters(module: Any) -> dict[str, Any]:
    """What a rotary module computes, in the words of a model's configuration."""
    from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding, RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding

    # Exact types: a class derived from one of these rotates in another way.
    known: dict[type, Callable[[], dict[str, Any]]] = {
        RotaryEmbedding: lambda: {"rope_type": "default"},
        LinearScalingRotaryEmbedding: lambda: {"rope_type": "linear", "factor": module.scaling_factors[0]},
        Llama3RotaryEmbedding: lambda: {
            "rope_type": "llama3",
            "factor": module.scaling_factor,
            "low_freq_factor": module.low_freq_factor,
            "high_freq_factor": module.high_freq_factor,
            "original_max_position_embeddings": module.orig_max_position,
        },
    }
    describe = known.get(type(module), lambda: {"rope_type": type(module).__name__})
    return {**describe(), "rope_theta": getattr(module, "base", None)}


def _compare(rope: Rope, module: Any) -> None:
    """Hold our angles against the table that the module rotates by.

    Raises:
        OptionError: they differ by more than the rounding of that table.
    """
    # Rows beyond those are reserved for requests that the model was not made for, and do not scale with LinearScaling.
    table = module.cos_sin_cache[: module.max_position_embeddings]
    rows = torch.arange(0, table.shape[0], -(-table.shape[0] // CHECKED_POSITIONS))
    theirs = table[rows.to(table.device)].float().cpu()
    ours = torch.cat(rope.cos_sin(rows + module.position_start), -1)
    # Its angles are products in fp32, rounded twice, and its entries are in the dtype of the table.
    angles = rows[:, None] * rope.frequencies.repeat(2)
    allowed = torch.finfo(table.dtype).eps + 2.0**-22 * angles
    if theirs.shape != ours.shape or bool(((theirs - ours).abs() > allowed).any()):
        raise OptionError(
            f"--csa2-rope separated does not reproduce the angles of this model's {type(module).__name__}: leave "
            f"--csa2-rope out"
        )
