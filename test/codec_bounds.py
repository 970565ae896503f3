"""What sealing a page may change, derived from the number formats, and pages decoded by the letter of the layout.

Nothing here calls the codec. Bounds are float64 functions of what was sealed; all of them follow from four facts.

1. *E4M3* rounds to nearest with three mantissa bits. Between two neighbours 1 and 1 + 1/8 the worst value is 17/16, off
   by 1/17 of itself; below 2^-6 the grid is even with steps of 2^-9. So |error| <= max(|x| / 17, 2^-10) up to 448, and
   |x| - 448 beyond.
2. *A scale* is UE5M3: three mantissa bits, at least 2^-15. To nearest, the stored scale s' of a wanted s is in
   [16/17 s, 18/17 s] or is 2^-15; rounded up it is in [s, 9/8 s] or is 2^-15.
3. *Codes of an entry* r (or of its channels in one class of keys), with s = max|r| / top, see r / s', at most
   top * 17/16, so that the largest may be clipped:
   - int4 (top 7): half a step is s' / 2; clipping costs 7/16 s' at most, which is less. |error| <= s' / 2.
   - e2m1 (top 6): from 1 on one mantissa bit, worst value 5/4, off by 1/5 of itself; below 1 even steps of 1/2. Clipping
     6.375 to 6 is off by 1/17. |error| <= max(|r| / 5, s' / 4).
   - e4m3 (top 448): fact 1, and clipping 476 to 448 is off by 1/17 too. |error| <= max(|r| / 17, 2^-10 s').
   - lloyd2 has s = rms(r). Between the levels the worst value is the border 0.9816, farther from 0.4528: 0.5288 s'.
     Beyond the last level it is clipped. |error| <= max(0.5288 s', |r| - 1.51 s').
   *Codes of a channel* (identity layers) are never clipped, because s' is rounded up: s' / 2 with s = max|r| / 7.5, or
   e4m3 as above.
4. *The mean* (midpoint) is stored as E4M3 before the residual r is taken from it, so its rounding does not reach the
   result; it only makes r larger, by at most fact 1. Means are weighted by attention; without weights keys have the plain
   mean and values none. What the reduced basis leaves out of r is lost.

The bases are orthonormal: the error of an entry has the same L2 norm before and after them. A bias is off by half a step of
1/16 nat, up to 255 of them.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from sgl_kernels.page_codec.reference import CodecBases
from sgl_kernels.page_layout import HeadLayout, PageLayout
from sgl_kernels.rope import Rope

U32 = 2.0**-24
"""Unit roundoff of fp32."""
U16 = 2.0**-8
"""Unit roundoff of bf16."""
_TOP = {"e4m3": 448.0, "e2m1": 6.0, "int4": 7.0}


def e4m3_error(x: Tensor) -> Tensor:
    """Largest error of storing `x` as E4M3 (fact 1)."""
    x = x.abs()
    return torch.maximum((x / 17).clamp(min=2.0**-10), x - 448)


def code_error(y: Tensor, off: Tensor | float, kind: str) -> Tensor:
    """Largest error of each channel of rows that are coded with one scale each; fact 3.

    Args:
        y: (..., E, C) float64, what should be coded if the mean were stored exactly.
        off: how far the stored mean may be off, in each channel.
    """
    largest = y.abs() + off
    if kind == "lloyd2":
        least = (y.abs() - off).clamp(min=0)
        below, above = (x.square().mean(-1, keepdim=True).sqrt() for x in (least, largest))
        return torch.maximum(0.5288 * _to_nearest(above), largest - 1.51 * 16 / 17 * below)
    scale = _to_nearest(largest.amax(-1, keepdim=True) / _TOP[kind])
    if kind == "int4":
        return (scale / 2).expand_as(y)
    return torch.maximum(largest / 5, scale / 4) if kind == "e2m1" else torch.maximum(largest / 17, scale * 2.0**-10)


def shares_of(weight: Tensor | None, y: Tensor, *, plain: bool) -> Tensor:
    """(N, heads, E, 1) float64 weights that add up to 1, for y (N, heads, E, D).

    Args:
        plain: whether a page without weights has the plain mean, or else none.
    """
    share = torch.zeros(y.shape[:-1], dtype=torch.float64) if weight is None else weight.double()
    total = share.sum(-1, keepdim=True)
    share = torch.where(total > 0, share / total, 1 / y.shape[-2] if plain else 0.0)
    return share.unsqueeze(-1)


def mean_error(mean: Tensor) -> Tensor:
    """Largest error of a stored mean; a mean that there is not is stored exactly."""
    return torch.where(mean == 0, 0.0, e4m3_error(mean))


def entry_error(y: Tensor, kind: str, share: Tensor) -> Tensor:
    """Largest error of each channel of entries coded as a whole; y (..., E, D) float64 in the basis of the codes, `share`
    (..., E, 1) the weights of its mean."""
    mean = (y * share).sum(-2, keepdim=True)
    return code_error(y - mean, mean_error(mean), kind)


def channel_error(y: Tensor, kind: str) -> Tensor:
    """The same for keys with a midpoint and a scale per channel; y (..., E, D) float64."""
    low, high = torch.aminmax(y.transpose(-1, -2), dim=-1)
    middle = ((low + high) / 2).unsqueeze(-2)
    residual = (y - middle).abs() + e4m3_error(middle)
    top = 448.0 if kind == "e4m3" else 7.5
    scale = (residual.amax(-2, keepdim=True) / top * 9 / 8).clamp(min=2.0**-15)
    return torch.maximum(residual / 17, scale * 2.0**-10) if kind == "e4m3" else (scale / 2).expand_as(y)


def reduced_error(y: Tensor, head: HeadLayout, columns: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Of keys with reduced channels: largest error of each kept channel (..., E, C), and of what is left out, per entry
    (..., E), as an L2 norm.

    Args:
        y: (..., E, D) float64 in the model's own basis.
        columns: (..., D, C) orthonormal.
        share: (..., E, 1) weights of the mean.
    """
    wide = columns.double()
    mean = (y * share).sum(-2, keepdim=True)
    off = mean_error(mean)
    inside = (y - mean) @ wide
    inside_off, start, errors = off @ wide.abs(), 0, []
    for key_class in head.key_classes:
        part = slice(start, start + key_class.channels)
        errors.append(code_error(inside[..., part], inside_off[..., part], key_class.kind))
        start += key_class.channels
    outside = (y - mean) - inside @ wide.transpose(-1, -2)
    return torch.cat(errors, -1), outside.norm(dim=-1) + off.norm(dim=-1)


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


def entry_norm_bounds(
    keys: Tensor, values: Tensor, layout: PageLayout, bases: CodecBases, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Largest L2 error of every entry after sealing; keys and values (N, L x G, E, D), `weight` and bounds (N, L x G, E)."""
    k, v, wide = kept(keys), kept(values), bases.flat.double()
    k_share, v_share = shares_of(weight, k, plain=True), shares_of(weight, v, plain=False)
    k_bound, v_bound = torch.empty(k.shape[:-1], dtype=torch.float64), torch.empty(v.shape[:-1], dtype=torch.float64)
    for head, indices in layout.head_groups:
        chosen = list(indices)
        x, share = k[:, chosen], k_share[:, chosen]
        lost: Tensor | float = 0.0
        if head.basis == "reduced":
            assert bases.reduced is not None
            error, lost = reduced_error(x, head, bases.reduced[chosen, :, : head.key_channels], share)
        else:
            y = x @ wide if head.basis == "flat" else x
            kind = head.key_classes[0].kind
            error = channel_error(y, kind) if head.channel_scales else entry_error(y, kind, share)
        k_bound[:, chosen] = (error + rounding_slack(x)).norm(dim=-1) + lost
        x = v[:, chosen]
        v_bound[:, chosen] = (entry_error(x @ wide, head.value_kind, v_share[:, chosen]) + rounding_slack(x)).norm(dim=-1)
    return k_bound, v_bound


def bias_error(bias: Tensor) -> Tensor:
    """Largest error of a stored bias of at least 0."""
    return (bias.double() - 255 / 16).clamp(min=1 / 32)


def _to_nearest(scale: Tensor) -> Tensor:
    """The largest that a scale can be when it is stored (fact 2)."""
    return (scale * 18 / 17).clamp(min=2.0**-15)


# Decoding by the letter: the tables of the specifications, written out, and the docstring of the layout. Numpy only.

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
CODE_VALUES = {
    "e4m3": E4M3_VALUES,
    "e2m1": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]),
    "int4": np.arange(16) - 8.0,
    "int4_asymmetric": np.arange(16) - 7.5,
    "int3": np.arange(8) - 4.0,
    "int2": np.arange(4) - 1.5,
    "lloyd2": np.array([-1.510, -0.4528, 0.4528, 1.510]),
}
BITS = {kind: {256: 8, 16: 4, 8: 3, 4: 2}[len(table)] for kind, table in CODE_VALUES.items()}


@dataclass(frozen=True)
class Opened:
    """Entries in float64, axes (N, L x G, E, D), in the model's own basis."""

    keys: Tensor
    values: Tensor
    bias: Tensor | None
    key_means: Tensor
    """(N, L x G, D) in the basis in which they are stored."""
    value_means: Tensor
    """(N, L x G, D) in the flat basis."""
    positions: Tensor | None = None
    """(N, L x G, E) of separated keys."""


def rotated(keys: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """float64 `keys` (..., E, D) at `positions` (..., E): each pair a complex number, turned by the angle position x
    frequency."""
    out = keys.double().clone()
    for (a, b), frequency in zip(rope.pairs, rope.frequencies.tolist(), strict=True):
        angle = positions.double() * frequency
        turned = torch.complex(out[..., a], out[..., b]) * torch.polar(torch.ones_like(angle), angle)
        out[..., a], out[..., b] = turned.real, turned.imag
    return out


def rotation_slack(x: Tensor) -> Tensor:
    """(..., E) fp32 rounding of one turn of keys `x` (..., E, D), as an L2 norm.

    Of a pair (a, b): cosine and sine are rounded once, so are both products and their sum; each time at most U times
    |a| + |b|, which is at most sqrt(2) of the pair's norm, in both channels: 3 sqrt(2) sqrt(2) U.
    """
    return 6 * U32 * x.double().norm(dim=-1)


@cache
def code_places(kind: str, lanes: int, contraction: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Byte (lanes, contraction) and lowest bit (contraction,) of every code, and the bytes that they take."""
    fields = 8 // BITS[kind]
    width, blocks = 4 * fields, -(-lanes // 16)
    whole = contraction // width
    rest = contraction - whole * width
    half = 0 < rest <= width // 2
    byte, bit = np.empty((lanes, contraction), dtype=np.int64), np.empty(contraction, dtype=np.int64)
    for c in range(contraction):
        group, index = divmod(c, width)
        word = 2 if half and group == whole else 4
        for lane in range(lanes):
            block, place = divmod(lane, 16)
            byte[lane, c] = group * blocks * 64 + block * 16 * word + place * word + index % word
        bit[c] = index // word * BITS[kind]
    return byte, bit, blocks * (64 * whole + (32 if half else 64 if rest else 0))


def piece_parts(head: HeadLayout) -> dict[str, tuple[int, int]]:
    """Start and bytes of each part of a piece; "piece" is all of it."""
    e, d = head.entries, head.head_dim
    sizes = {f"k_codes{i}": code_places(c.kind, e, c.channels)[2] for i, c in enumerate(head.key_classes)}
    sizes["v_codes"] = code_places(head.value_kind, d, e)[2]
    sizes["k_scales"] = d if head.channel_scales else len(head.key_classes) * e
    sizes["v_scales"] = e
    sizes["k_mean"] = sizes["v_mean"] = d
    if head.merged:
        sizes["bias"] = e
    parts, start = {}, 0
    for name, size in sizes.items():
        parts[name] = start, size
        start += size
    return {**parts, "piece": (0, -(-start // 64) * 64)}


def open_by_the_letter(packed: Tensor, layout: PageLayout, bases: CodecBases) -> Opened:
    """Entries of coded pages (N, page_bytes)."""
    n, e, d = packed.shape[0], layout.entries, layout.geometry.head_dim
    opened = [np.zeros((n, len(layout.heads), *shape)) for shape in ((e, d), (e, d), (e,), (d,), (d,))]
    opened[2][:] = -np.inf  # where a head has fewer entries than another
    start = 0
    for index, head in enumerate(layout.heads):
        end = start + piece_parts(head)["piece"][1]
        columns = None if bases.reduced is None else bases.reduced[index, :, : head.key_channels].double().numpy()
        piece = _open_piece(packed[:, start:end].numpy(), head, bases.flat.double().numpy(), columns)
        for whole, part in zip(opened[:3], piece[:3], strict=True):
            whole[:, index, : head.entries] = part
        for whole, part in zip(opened[3:], piece[3:], strict=True):
            whole[:, index] = part
        start = end
    keys, values, bias, key_means, value_means = map(torch.from_numpy, opened)
    positions = None
    if layout.is_separated:
        assert bases.rope is not None
        positions = _positions_by_the_letter(packed, layout, start)
        keys = rotated(keys, positions, bases.rope)
    return Opened(keys, values, bias if layout.is_merged else None, key_means, value_means, positions)


def _positions_by_the_letter(packed: Tensor, layout: PageLayout, end: int) -> Tensor:
    """(N, L x G, E) positions of separated pages, whose pieces end at byte `end`."""
    first = packed[:, end : end + 4].numpy().astype(np.int64) @ (256 ** np.arange(4))
    offsets = np.zeros((packed.shape[0], len(layout.heads), layout.entries), dtype=np.int64)
    start = end + 4
    for index, head in enumerate(layout.heads):
        offsets[:, index, : head.entries] = np.arange(head.entries)
        if layout.is_merged:
            offsets[:, index, : head.entries] = packed[:, start : start + head.entries].numpy()
            start += head.entries
    return torch.from_numpy(first[:, None, None] + offsets)


def _open_piece(
    data: np.ndarray, head: HeadLayout, flat: np.ndarray, columns: np.ndarray | None
) -> tuple[np.ndarray | float, ...]:
    parts, e, d = piece_parts(head), head.entries, head.head_dim

    def part(name: str) -> np.ndarray:
        start, size = parts[name]
        return data[:, start : start + size]

    def codes(name: str, kind: str, lanes: int, contraction: int) -> np.ndarray:
        byte, bit, _ = code_places(kind, lanes, contraction)
        return CODE_VALUES[kind][(part(name)[:, byte] >> bit) & ((1 << BITS[kind]) - 1)]

    k_scales, classes = UE5M3_VALUES[part("k_scales")], []
    for i, key_class in enumerate(head.key_classes):
        scale = k_scales[:, None] if head.channel_scales else k_scales[:, i * e : (i + 1) * e, None]
        classes.append(codes(f"k_codes{i}", key_class.kind, e, key_class.channels) * scale)
    keys, k_mean = np.concatenate(classes, -1), E4M3_VALUES[part("k_mean")]
    if head.basis == "reduced":
        assert columns is not None
        keys = keys @ columns.T
    keys = keys + k_mean[:, None]
    if head.basis == "flat":
        keys = keys @ flat
    values = codes("v_codes", head.value_kind, d, e).swapaxes(-1, -2) * UE5M3_VALUES[part("v_scales")][..., None]
    v_mean = E4M3_VALUES[part("v_mean")]
    bias = part("bias") / 16 if head.merged else 0.0
    return keys, (values + v_mean[:, None]) @ flat, bias, k_mean, v_mean
