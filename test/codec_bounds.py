"""What sealing a page may change, derived from the number formats, and pages decoded by the letter of the layout.

Nothing here calls the codec. Bounds are float64 functions of what was sealed; all of them follow from four facts.

1. *E4M3* rounds to nearest with three mantissa bits. Between two neighbours 1 and 1 + 1/8 the worst value is 17/16, off
   by 1/17 of itself; below 2^-6 the grid is even with steps of 2^-9. So |error| <= max(|x| / 17, 2^-10) up to 448, and
   |x| - 448 beyond.
2. *A scale* is UE5M3: three mantissa bits, at least 2^-15. To nearest, the stored scale s' of a wanted s is in
   [16/17 s, 18/17 s] or is 2^-15; rounded up it is in [s, 9/8 s] or is 2^-15.
3. *Codes of an entry* r, with s = max|r| / top, see r / s', at most top * 17/16, so that the largest may be clipped:
   - int4 (top 7): half a step is s' / 2; clipping costs 7/16 s' at most, which is less. |error| <= s' / 2.
   - e2m1 (top 6): from 1 on one mantissa bit, worst value 5/4, off by 1/5 of itself; below 1 even steps of 1/2. Clipping
     6.375 to 6 is off by 1/17. |error| <= max(|r| / 5, s' / 4).
   - e4m3 (top 448): fact 1, and clipping 476 to 448 is off by 1/17 too. |error| <= max(|r| / 17, 2^-10 s').
   *Codes of a channel* (identity layers) are never clipped, because s' is rounded up: s' / 2 with s = max|r| / 7.5, or
   e4m3 as above.
4. *The mean* (midpoint) is stored as E4M3 before the residual r is taken from it, so its rounding does not reach the
   result; it only makes r larger, by at most fact 1.

The flat basis is orthonormal: the error of an entry has the same L2 norm before and after it.
"""

import numpy as np
import torch
from torch import Tensor

from sgl_kernels.page_layout import PageLayout

U32 = 2.0**-24
"""Unit roundoff of fp32."""
U16 = 2.0**-8
"""Unit roundoff of bf16."""
_TOP = {"e4m3": 448.0, "e2m1": 6.0, "int4": 7.0}


def e4m3_error(x: Tensor) -> Tensor:
    """Largest error of storing `x` as E4M3 (fact 1)."""
    x = x.abs()
    return torch.maximum((x / 17).clamp(min=2.0**-10), x - 448)


def entry_error(y: Tensor, kind: str) -> Tensor:
    """Largest error of each channel of coded entries; y (..., S, D) float64 in the flat basis (facts 2 to 4)."""
    mean = y.mean(-2, keepdim=True)
    residual = (y - mean).abs() + e4m3_error(mean)
    scale = (residual.amax(-1, keepdim=True) / _TOP[kind] * 18 / 17).clamp(min=2.0**-15)
    if kind == "int4":
        return (scale / 2).expand_as(y)
    return torch.maximum(residual / 5, scale / 4) if kind == "e2m1" else torch.maximum(residual / 17, scale * 2.0**-10)


def channel_error(y: Tensor, kind: str) -> Tensor:
    """The same for keys of identity layers: midpoint and scale per channel; y (..., S, D) float64."""
    low, high = torch.aminmax(y.transpose(-1, -2), dim=-1)
    middle = ((low + high) / 2).unsqueeze(-2)
    residual = (y - middle).abs() + e4m3_error(middle)
    top = 448.0 if kind == "e4m3" else 7.5
    scale = (residual.amax(-2, keepdim=True) / top * 9 / 8).clamp(min=2.0**-15)
    return torch.maximum(residual / 17, scale * 2.0**-10) if kind == "e4m3" else (scale / 2).expand_as(y)


def rounding_slack(x: Tensor) -> Tensor:
    """(..., 1, 1) fp32 rounding of one trip through the codec, per value.

    Two products with the basis (dot products of length D of vectors with L2 norm N and 1: at most D U N each), and a
    dozen elementwise roundings of numbers no larger than the mean and the residual: each at most 2 N, with N the largest
    norm of an entry, and the mean's own rounding less than N again.
    """
    norm = x.norm(dim=-1).amax(-1)[..., None, None]
    return (2 * x.shape[-1] + 16) * U32 * (4 * norm + 2.0**-10)


def kept(x: Tensor) -> Tensor:
    """What the codec promises to keep of `x`, in float64: NaN is 0, magnitudes saturate at 2^15."""
    return torch.nan_to_num(x.double(), nan=0.0).clamp(-(2.0**15), 2.0**15)


def entry_norm_bounds(keys: Tensor, values: Tensor, layout: PageLayout, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Largest L2 error of every entry after sealing; keys and values (N, L, G, S, D), bounds (N, L, G, S)."""
    k, v, wide = kept(keys), kept(values), basis.double()

    def norm(error: Tensor, x: Tensor) -> Tensor:
        return (error + rounding_slack(x)).norm(dim=-1)

    k_bound = norm(entry_error(k @ wide, layout.codes), k)
    for layer in layout.geometry.identity_layers:
        k_bound[:, layer] = norm(channel_error(k[:, layer], layout.codes), k[:, layer])
    return k_bound, norm(entry_error(v @ wide, layout.codes), v)


# Decoding by the letter: the tables of the specifications, written out, and the offsets of the layout. Numpy only.

E4M3_VALUES = np.array(
    [
        np.nan
        if byte & 0x7F == 0x7F
        else (-1.0) ** (byte >> 7)
        * ((byte & 7) / 8 * 2.0**-6 if byte & 0x78 == 0 else (1 + (byte & 7) / 8) * 2.0 ** (((byte >> 3) & 15) - 7))
        for byte in range(256)
    ]
)
UE5M3_VALUES = np.array([(1 + (byte & 7) / 8) * 2.0 ** ((byte >> 3) - 15) for byte in range(256)])
NIBBLE_VALUES = {
    "e2m1": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]),
    "int4": np.arange(16) - 8.0,
    "int4_asymmetric": np.arange(16) - 7.5,
}


def open_by_the_letter(packed: Tensor, layout: PageLayout, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (N, L, G, S, D) float64 of coded pages (N, page_bytes), in the model's own basis."""
    g = layout.geometry
    n, heads, size, dim = packed.shape[0], g.num_kv_heads, g.page_size, g.head_dim
    blocks = packed.numpy().reshape(n, g.num_layers, layout.layer_bytes)
    wide = basis.double().numpy()
    code_bytes = dim if layout.codes == "e4m3" else dim // 2
    slots = max(size, dim) if g.identity_layers else size
    keys, values = np.empty((n, g.num_layers, heads, size, dim)), np.empty((n, g.num_layers, heads, size, dim))
    for layer in range(g.num_layers):
        identity = layer in g.identity_layers

        def part(name: str, *shape: int, block: np.ndarray = blocks[:, layer]) -> np.ndarray:
            start = layout.offsets[name]
            return block[:, start : start + heads * int(np.prod(shape))].reshape(n, heads, *shape)

        def codes(name: str, kind: str, part=part) -> np.ndarray:
            data = part(name, size, code_bytes)
            if kind == "e4m3":
                return E4M3_VALUES[data]
            nibbles = np.stack((data & 15, data >> 4), -1).reshape(n, heads, size, dim)
            return NIBBLE_VALUES[kind][nibbles]

        k_kind = "int4_asymmetric" if identity and layout.codes != "e4m3" else layout.codes
        scales = UE5M3_VALUES[part("k_scales", slots)]
        k_scales = scales[:, :, None, :dim] if identity else scales[:, :, :size, None]
        k = codes("k_codes", k_kind) * k_scales + E4M3_VALUES[part("k_means", 1, dim)]
        keys[:, layer] = k if identity else k @ wide
        v = codes("v_codes", layout.codes) * UE5M3_VALUES[part("v_scales", size, 1)]
        values[:, layer] = (v + E4M3_VALUES[part("v_means", 1, dim)]) @ wide
    return torch.from_numpy(keys), torch.from_numpy(values)
