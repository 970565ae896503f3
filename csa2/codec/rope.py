"""Rotary embeddings that keys can be separated from: which kinds, and the frequencies of each.

The names and parameters are those of `rope_parameters` in the configuration of a model.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from csa2.codec.channels import Rotation, make_rotation
from csa2.errors import OptionError
from sgl_kernels.rope import Rope

ROPE_TYPES = ("default", "linear", "llama3")
"""Kinds whose angles are a fixed frequency times the position. Others change with the length of the text (dynamic,
longrope), scale keys (yarn, longrope) or have several positions a token (mrope)."""
_OTHER_KINDS = {"mrope_section": "mrope", "use_fope": "fope"}
"""Parameters that make another kind of "default"."""


def config_rotation(config: Any, head_dim: int) -> Rotation:
    """Which channels of keys rotate together in a model of transformers: the two halves of the rotated part.

    Args:
        config: its text configuration.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    if getattr(config, "rope_theta", None) is None and not parameters:
        return Rotation(())
    share = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    return make_rotation(int(head_dim * share), neox=True)


def rope_type_of(parameters: Mapping[str, Any]) -> str:
    """The kind of rotary embedding that `parameters` describe."""
    other = next((kind for name, kind in _OTHER_KINDS.items() if parameters.get(name)), None)
    return other or str(parameters.get("rope_type") or parameters.get("type") or "default")


def check_rope_type(rope_type: str) -> None:
    """Refuse what keys cannot be separated from.

    Raises:
        OptionError: names the kind and those that can.
    """
    if rope_type not in ROPE_TYPES:
        raise OptionError(
            f"--csa2-rope separated does not know the rotary embedding {rope_type!r} of this model: it puts back "
            f"{', '.join(ROPE_TYPES)}. Leave --csa2-rope out, which works with every rotary embedding"
        )


def make_rope(rotation: Rotation, parameters: Mapping[str, Any]) -> Rope:
    """The rotary embedding that `parameters` describe.

    Args:
        rotation: which channels rotate together.
        parameters: "rope_type", "rope_theta", "factor", and those of llama3.

    Raises:
        OptionError: a kind that keys cannot be separated from, or a model without rotation.
    """
    kind = rope_type_of(parameters)
    check_rope_type(kind)
    if rotation.is_none:
        raise OptionError(
            "--csa2-rope separated needs a model with a rotary embedding, and this one has none that was found: leave "
            "--csa2-rope out"
        )
    pairs = len(rotation.pairs)
    # In fp32 where models compute in fp32: at position 100000 the last bit of a frequency is a hundredth of a radian.
    frequencies = 1.0 / float(parameters["rope_theta"]) ** (torch.arange(pairs).float() / pairs)
    if kind == "linear":
        frequencies = frequencies / float(parameters["factor"])
    elif kind == "llama3":
        frequencies = _llama3(frequencies, parameters)
    return Rope(rotation.pairs, frequencies)


def _llama3(frequencies: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """Slow pairs are slowed down by a factor, fast ones are not, those between are blended (Llama 3.1)."""
    factor = float(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    turns = float(parameters["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    # Turns inside the original window: all of a frequency is kept from `high` on and 1 / factor of it up to `low`.
    keep = ((turns - low) / (high - low)).clamp(0, 1) if high != low else (turns > high).float()
    return frequencies * (keep + (1 - keep) / factor)
