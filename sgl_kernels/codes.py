"""Number formats of stored pages: code tables and their rounding.

E2M1 is the 4-bit float of the OCP Microscaling specification (v1.0), E4M3 its 8-bit float. Scales are unsigned
E5M3: like E4M3 without the sign, so that one more exponent bit covers every model and decoding is one shift. The 2-bit
levels of `lloyd2` are those of Max (1960) for a normal distribution, in units of its standard deviation. Integers have even
steps and one scale from the largest magnitude: `int4` and `int3` keep zero and leave the lowest code unused, `int2` is
four levels around zero, because -1, 0 and 1 would waste a quarter of its codes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
INT4_MAX = 7.0
"""Symmetric codes -7..7; the sixteenth code, -8, is left unused so that zero stays exact and both signs reach as far."""
INT4_ASYMMETRIC_MAX = 7.5
"""Asymmetric codes are the sixteen levels -7.5 .. 7.5 around a midpoint."""
INT3_MAX = 3.0
"""Symmetric codes -3..3; the eighth, -4, is left unused as in `INT4_MAX`."""
INT2_MAX = 1.5
"""The four levels -1.5, -0.5, 0.5, 1.5: even steps without a zero."""
E4M3_MAX = 448.0
LLOYD2_LEVELS = (-1.510, -0.4528, 0.4528, 1.510)
LLOYD2_BOUNDARY = 0.9816
"""Between the inner and the outer level; the other boundary is 0."""
CODE_BITS = {"e4m3": 8, "e2m1": 4, "int4": 4, "int4_asymmetric": 4, "int3": 3, "int2": 2, "lloyd2": 2}
"""Bits of each kind of code. A page holds those whose bits fill bytes: all but `int3`."""

UE5M3_MIN = 2.0**-15
UE5M3_MAX = 1.875 * 2.0**16
_UE5M3_SHIFT = 20  # fp32 keeps 23 mantissa bits, three stay
_UE5M3_BIAS = (127 - 15) << 3

SATURATION = 2.0**15
"""Largest magnitude that a sealed page keeps. Anything beyond (inf included) saturates and NaN becomes 0, so that one
broken token cannot spread through the page mean. With it every scale stays inside UE5M3 for head_dim up to 256."""


def encode_ue5m3(scale: Tensor, *, round_up: bool = False) -> Tensor:
    """Nearest unsigned E5M3 byte of non-negative fp32 `scale` (or the next one above), clamped to its range."""
    clamped = scale.clamp(UE5M3_MIN, UE5M3_MAX)
    bits = clamped.contiguous().view(torch.int32)
    bits = bits + ((1 << _UE5M3_SHIFT) - 1 if round_up else 1 << (_UE5M3_SHIFT - 1))
    return ((bits >> _UE5M3_SHIFT) - _UE5M3_BIAS).clamp_(0, 255).to(torch.uint8)


def decode_ue5m3(code: Tensor) -> Tensor:
    """fp32 value of unsigned E5M3 bytes: 2^(e-15) (1 + m/8), without zero or denormals."""
    return ((code.to(torch.int32) + _UE5M3_BIAS) << _UE5M3_SHIFT).view(torch.float32)


def encode_e4m3(value: Tensor) -> Tensor:
    """E4M3 bytes of fp32 `value`, saturating at 448 (the plain conversion would give NaN beyond it)."""
    return value.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(code: Tensor) -> Tensor:
    """fp32 value of E4M3 bytes."""
    return code.view(torch.float8_e4m3fn).to(torch.float32)


def round_e2m1(value: Tensor) -> Tensor:
    """4-bit E2M1 codes (0..15, sign in bit 3) of fp32 `value`, to nearest, ties away from zero, saturating at 6."""
    magnitude = value.abs().clamp_(max=E2M1_MAX)
    # The grid has steps of 1/2 up to 2, of 1 up to 4 and of 2 beyond. The code counted in each of the three steps is right
    # in its own range and too large elsewhere, so the least of them is the code.
    code = (magnitude * 2).add_(0.5).floor_()
    torch.minimum(code, (magnitude + 2.5).floor_(), out=code)
    torch.minimum(code, magnitude.mul_(0.5).add_(4.5).floor_(), out=code)
    return code.to(torch.uint8) | ((value < 0).to(torch.uint8) << 3)


def round_int4(value: Tensor) -> Tensor:
    """4-bit offset codes (value + 8: 1..15) of fp32 `value`, to nearest, saturating at +-7."""
    return (value.round().clamp_(-INT4_MAX, INT4_MAX) + 8).to(torch.uint8)


def round_int4_asymmetric(value: Tensor) -> Tensor:
    """4-bit codes (value + 7.5: 0..15) of fp32 `value`, to nearest, saturating at +-7.5."""
    return (value + INT4_ASYMMETRIC_MAX).round_().clamp_(0, 15).to(torch.uint8)


def round_int3(value: Tensor) -> Tensor:
    """3-bit offset codes (value + 4: 1..7) of fp32 `value`, to nearest, saturating at +-3."""
    return (value.round().clamp_(-INT3_MAX, INT3_MAX) + 4).to(torch.uint8)


def round_int2(value: Tensor) -> Tensor:
    """2-bit codes (value + 1.5: 0..3) of fp32 `value`, to nearest, saturating at +-1.5."""
    return (value + INT2_MAX).round_().clamp_(0, 3).to(torch.uint8)


def round_lloyd2(value: Tensor) -> Tensor:
    """2-bit codes 0..3 of fp32 `value`: the nearest of `LLOYD2_LEVELS`."""
    return (value > -LLOYD2_BOUNDARY).to(torch.uint8) + (value > 0) + (value > LLOYD2_BOUNDARY)


def encode_codes(value: Tensor, kind: str) -> Tensor:
    """uint8 codes of fp32 `value`, already divided by its scale."""
    return _ENCODERS[kind](value)


def decode_codes(code: Tensor, kind: str) -> Tensor:
    """fp32 value of uint8 codes, in units of their scale."""
    if kind == "e4m3":
        return decode_e4m3(code)
    if kind in _OFFSETS:
        return code.to(torch.float32).sub_(_OFFSETS[kind])
    levels = torch.tensor(_LEVELS[kind], device=code.device)
    return levels.index_select(0, code.reshape(-1).to(torch.int32)).view(code.shape)


def entry_scales(value: Tensor, kind: str) -> Tensor:
    """(...) fp32 scale of each row of `value` (..., C) before it is rounded to a byte."""
    if kind == "lloyd2":
        return value.square().mean(-1).sqrt_()
    return value.abs().amax(-1) / _LARGEST[kind]


_LARGEST = {"e4m3": E4M3_MAX, "e2m1": E2M1_MAX, "int4": INT4_MAX, "int3": INT3_MAX, "int2": INT2_MAX}
_OFFSETS = {"int4": 8.0, "int4_asymmetric": INT4_ASYMMETRIC_MAX, "int3": 4.0, "int2": INT2_MAX}
"""Code of 0, for codes that are numbers with even steps."""
_LEVELS = {
    "e2m1": (*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)),
    "lloyd2": LLOYD2_LEVELS,
}
_ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "e4m3": encode_e4m3,
    "e2m1": round_e2m1,
    "int4": round_int4,
    "int4_asymmetric": round_int4_asymmetric,
    "int3": round_int3,
    "int2": round_int2,
    "lloyd2": round_lloyd2,
}
