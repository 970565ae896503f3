"""Numbers to codes of pages: what `sgl_kernels.codes` defines, in Triton, with integer operations and fp32 only.

Quotients are products with a reciprocal, one for each scale: they differ from those of the reference by a rounding, so a
number that lies on the border between two codes, to the last bit of fp32, may get the other one.
"""

import triton
import triton.language as tl

from sgl_kernels.triton.codes import E2M1, E4M3, INT2, INT4, LLOYD2, code_value, scale_value

ROUNDER = tl.constexpr(12582912.0)
"""1.5 x 2^23: adding it rounds fp32 to an integer, ties to even, which then lies in the lowest bits."""
SATURATION = tl.constexpr(2.0**15)
LLOYD2_BOUNDARY = tl.constexpr(0.9816)


@triton.jit
def finite(x):
    """fp32 `x` as pages keep it: NaN and infinities are 0, magnitudes saturate."""
    x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    return tl.minimum(tl.maximum(x, -SATURATION), SATURATION)


@triton.jit
def encode_e4m3(value):
    """int32 E4M3 codes of fp32 `value`, to nearest even, saturating at 448."""
    bits = tl.minimum(tl.maximum(value, -448.0), 448.0).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - (120 << 23)) >> 20
    # The last bit of 2^14 is worth 2^-9, the step of subnormal codes.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(magnitude < (121 << 23), subnormal, normal) | ((bits >> 24) & 0x80)


@triton.jit
def decode_e4m3(code):
    """fp32 value of E4M3 codes in int32."""
    return code_value(code, E4M3) * 256.0


@triton.jit
def encode_ue5m3(scale, ROUND_UP: tl.constexpr):
    """int32 UE5M3 codes of non-negative fp32 `scale`: the nearest, or the next one above."""
    clamped = tl.minimum(tl.maximum(scale, 2.0**-15), 1.875 * 2.0**16)
    bits = clamped.to(tl.int32, bitcast=True) + ((1 << 20) - 1 if ROUND_UP else 1 << 19)
    return tl.minimum((bits >> 20) - (112 << 3), 255)


@triton.jit
def encode_codes(value, KIND: tl.constexpr):
    """int32 codes of fp32 `value`, already divided by its scale."""
    if KIND == E4M3:
        return encode_e4m3(value)
    elif KIND == E2M1:
        # Steps of 1/2 up to 2, of 1 up to 4 and of 2 beyond: the least of the three counts is the code.
        magnitude = tl.minimum(tl.abs(value), 6.0)
        count = tl.minimum(tl.minimum(magnitude * 2 + 0.5, magnitude + 2.5), magnitude * 0.5 + 4.5)
        return count.to(tl.int32) | tl.where(value < 0, 8, 0)
    elif KIND == INT4:
        return (tl.minimum(tl.maximum(value, -7.0), 7.0) + (ROUNDER + 8)).to(tl.int32, bitcast=True) & 15
    elif KIND == LLOYD2:
        outer = (value > -LLOYD2_BOUNDARY).to(tl.int32) + (value > LLOYD2_BOUNDARY).to(tl.int32)
        return outer + (value > 0).to(tl.int32)
    elif KIND == INT2:
        return (tl.minimum(tl.maximum(value + 1.5, 0.0), 3.0) + ROUNDER).to(tl.int32, bitcast=True) & 3
    else:
        return (tl.minimum(tl.maximum(value + 7.5, 0.0), 15.0) + ROUNDER).to(tl.int32, bitcast=True) & 15


@triton.jit
def largest_code(KIND: tl.constexpr):
    """A scale is the largest magnitude over this."""
    if KIND == E4M3:
        return 448.0
    elif KIND == E2M1:
        return 6.0
    elif KIND == INT4:
        return 7.0
    elif KIND == INT2:
        return 1.5
    else:
        return 7.5


@triton.jit
def encode_entries(y, CHANNELS: tl.constexpr, KIND: tl.constexpr):
    """Codes of scales (E,) and of `y` (E, C) fp32, a scale for each row; columns from CHANNELS on are 0."""
    if KIND == LLOYD2:
        size = tl.sqrt_rn(tl.div_rn(tl.sum(y * y, 1), CHANNELS * 1.0))
    else:
        size = tl.div_rn(tl.max(tl.abs(y), 1), largest_code(KIND))
    scales = encode_ue5m3(size, False)
    return scales, encode_codes(y * tl.div_rn(1.0, scale_value(scales))[:, None], KIND)


@triton.jit
def encode_channels(y, KIND: tl.constexpr):
    """Codes of midpoints (D,), of scales (D,) and of `y` (E, D) fp32, a midpoint and a scale for each column."""
    means = encode_e4m3((tl.min(y, 0) + tl.max(y, 0)) * 0.5)
    y -= decode_e4m3(means)[None, :]
    # Rounded up, so that no extreme is clipped.
    scales = encode_ue5m3(tl.div_rn(tl.max(tl.abs(y), 0), largest_code(KIND)), True)
    return means, scales, encode_codes(y * tl.div_rn(1.0, scale_value(scales))[None, :], KIND)
