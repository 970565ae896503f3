"""The page codec in torch: values -> packed bytes -> values.

Coded keys and values of a page are y = (x - mean) H: page mean removed, flat basis H, one scale per entry. Layers named
in `PageGeometry.identity_layers` keep keys in the identity basis with one scale and one midpoint per channel, because
there a large constant survives in a few channels and the flat basis would spread it over all.

Nothing has to be undone per entry when reading: with q' = H q the logit of entry e is q' . mean + s_e (q' . code_e), and
values come back through H once per query, after the weighted sum.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kernels import codes as num
from sgl_kernels.page_layout import PageLayout

_FP16_MAX = torch.finfo(torch.float16).max
_MAX_CODE = {"e4m3": num.E4M3_MAX, "e2m1": num.E2M1_MAX, "int4": num.INT4_MAX}
_QUADS: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


@dataclass(frozen=True)
class OpenedLayer:
    """One layer of N coded pages, still factored. Axes (N, G, S, D); values are in the flat basis.

    Keys of a flat layer are `k_codes * k_scales + k_means` in the flat basis; of an identity layer the same in the
    identity basis, with `k_scales` (N, G, 1, D) instead of (N, G, S, 1).
    """

    k_codes: Tensor
    k_scales: Tensor
    k_means: Tensor
    v_codes: Tensor
    v_scales: Tensor
    v_means: Tensor

    def keys(self) -> Tensor:
        """(N, G, S, D) fp32 keys in the basis of the layer."""
        return self.k_codes * self.k_scales + self.k_means

    def values(self) -> Tensor:
        """(N, G, S, D) fp32 values in the flat basis."""
        return self.v_codes * self.v_scales + self.v_means


def seal_pages(keys: Tensor, values: Tensor, layout: PageLayout, basis: Tensor) -> Tensor:
    """Encode N full pages, all layers at once.

    Args:
        keys: (N, L, G, S, D) any float dtype, rotated at their positions.
        values: (N, L, G, S, D).
        layout: a coded layout of this geometry.
        basis: (D, D) fp32 from `orthonormal_basis`.

    Returns:
        (N, page_bytes) uint8. NaN is stored as 0 and magnitudes beyond `codes.SATURATION` saturate.
    """
    geometry = layout.geometry
    n = keys.shape[0]
    packed = torch.zeros(n, geometry.num_layers, layout.layer_bytes, dtype=torch.uint8, device=keys.device)
    k_codes, k_scales, k_means = _encode_entries(_finite(keys) @ basis, layout.codes)
    v_codes, v_scales, v_means = _encode_entries(_finite(values) @ basis, layout.codes)
    starts = layout.offsets

    def put(part: str, data: Tensor, layers: Tensor | None = None) -> None:
        flat = data.flatten(2)
        target = packed[:, :, starts[part] : starts[part] + flat.shape[-1]]
        if layers is None:
            target.copy_(flat)
        else:
            target.index_copy_(1, layers, flat)

    put("k_codes", k_codes)
    put("k_scales", _pad_slots(k_scales, layout.scale_slots))
    put("k_means", k_means)
    put("v_codes", v_codes)
    put("v_scales", v_scales)
    put("v_means", v_means)
    if geometry.identity_layers:
        layers = torch.tensor(geometry.identity_layers, device=keys.device)
        k_codes, k_scales, k_means = _encode_channels(_finite(keys.index_select(1, layers)), layout.codes)
        put("k_codes", k_codes, layers)
        put("k_scales", _pad_slots(k_scales, layout.scale_slots), layers)
        put("k_means", k_means, layers)
    return packed.view(n, layout.page_bytes)


def open_layer(block: Tensor, layout: PageLayout, layer: int) -> OpenedLayer:
    """Decode one layer of N coded pages without leaving their basis.

    Args:
        block: (N, layer_bytes) uint8, the block of `layer` in each page.
        layer: layer on this rank, counted from 0.
    """
    return _open(block, layout, layer, torch.float32, head_first=False)


def open_dense(block: Tensor, layout: PageLayout, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys in the basis of the layer and values in the flat basis, (G, N * S, D) in `dtype`, of N coded pages.

    For bfloat16 all is computed in it and rounded once: a code has at most 4 significant bits and so has a scale, so their
    product is exact in 8. Float16 lacks the range for the largest scales and takes the way through float32.
    """
    wide = torch.float32 if dtype == torch.float16 else dtype
    opened = _open(block, layout, layer, wide, head_first=True)
    g, d = layout.geometry.num_kv_heads, layout.geometry.head_dim
    keys = torch.addcmul(opened.k_means, opened.k_codes, opened.k_scales)
    values = torch.addcmul(opened.v_means, opened.v_codes, opened.v_scales)
    if dtype == torch.float16:
        # A saturated entry can exceed float16 in the flat basis, and infinity would become NaN in the attention.
        keys, values = keys.clamp(-_FP16_MAX, _FP16_MAX), values.clamp(-_FP16_MAX, _FP16_MAX)
    return keys.view(g, -1, d).to(dtype), values.view(g, -1, d).to(dtype)


def open_pages(packed: Tensor, layout: PageLayout, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of N coded pages as (N, L, G, S, D) fp32 in the model's own basis."""
    blocks = packed.view(packed.shape[0], layout.geometry.num_layers, layout.layer_bytes)
    keys, values = [], []
    for layer in range(layout.geometry.num_layers):
        opened = open_layer(blocks[:, layer], layout, layer)
        k = opened.keys()
        keys.append(k if layer in layout.geometry.identity_layers else k @ basis)
        values.append(opened.values() @ basis)
    return torch.stack(keys, 1), torch.stack(values, 1)


def _open(block: Tensor, layout: PageLayout, layer: int, dtype: torch.dtype, *, head_first: bool) -> OpenedLayer:
    """The parts of one layer, (N, G, ...) or with `head_first` (G, N, ...): reordered while still packed, 2 to 8 times less
    to move."""
    geometry = layout.geometry
    n, g, s, d = block.shape[0], geometry.num_kv_heads, geometry.page_size, geometry.head_dim
    starts = layout.offsets
    identity = layer in geometry.identity_layers

    def part(name: str, *shape: int) -> Tensor:
        size = g
        for axis in shape:
            size *= axis
        taken = block[:, starts[name] : starts[name] + size].view(n, g, *shape)
        return (taken.transpose(0, 1) if head_first else taken).contiguous()

    key_kind = "int4_asymmetric" if identity and layout.codes != "e4m3" else layout.codes
    k_scales = num.decode_ue5m3(part("k_scales", layout.scale_slots)).to(dtype)
    return OpenedLayer(
        k_codes=_decode(part("k_codes", s, layout.code_bytes), key_kind, dtype),
        k_scales=k_scales[..., None, :d] if identity else k_scales[..., :s, None],
        k_means=num.decode_e4m3(part("k_means", 1, d)).to(dtype),
        v_codes=_decode(part("v_codes", s, layout.code_bytes), layout.codes, dtype),
        v_scales=num.decode_ue5m3(part("v_scales", s, 1)).to(dtype),
        v_means=num.decode_e4m3(part("v_means", 1, d)).to(dtype),
    )


def _finite(x: Tensor) -> Tensor:
    x = x.to(torch.float32)
    return torch.nan_to_num(x, nan=0.0).clamp_(-num.SATURATION, num.SATURATION)


def _encode_entries(y: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Page mean, one scale per entry. y (..., S, D) -> codes (..., S, code_bytes), scales (..., S), means (..., D)."""
    means = num.encode_e4m3(y.mean(-2))
    residual = y.sub_(num.decode_e4m3(means).unsqueeze(-2))
    scales = num.encode_ue5m3(residual.abs().amax(-1) / _MAX_CODE[kind])
    residual.div_(num.decode_ue5m3(scales).unsqueeze(-1))
    return _encode(residual, kind), scales, means


def _encode_channels(y: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Midpoint and scale per channel, sixteen even levels (or E4M3). Same result shapes, scales (..., D)."""
    low, high = torch.aminmax(y.transpose(-1, -2), dim=-1)
    means = num.encode_e4m3((low + high) / 2)
    residual = y - num.decode_e4m3(means).unsqueeze(-2)
    top = num.E4M3_MAX if kind == "e4m3" else num.INT4_ASYMMETRIC_MAX
    # Rounded up: a clipped channel extreme would be an error of its own in every entry that holds the constant.
    scales = num.encode_ue5m3(residual.abs().amax(-2) / top, round_up=True)
    residual = residual / num.decode_ue5m3(scales).unsqueeze(-2)
    return _encode(residual, kind if kind == "e4m3" else "int4_asymmetric"), scales, means


def _encode(value: Tensor, kind: str) -> Tensor:
    if kind == "e4m3":
        return num.encode_e4m3(value)
    rounding = {"e2m1": num.round_e2m1, "int4": num.round_int4, "int4_asymmetric": num.round_int4_asymmetric}[kind]
    return num.pack_nibbles(rounding(value))


def _decode(packed: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    if kind == "e4m3":
        return packed.view(torch.float8_e4m3fn).to(dtype)
    key = (kind, dtype, packed.device)
    if key not in _QUADS:
        _QUADS[key] = num.nibble_quads(kind, dtype).to(packed.device)
    return num.unpack_nibbles(packed, _QUADS[key], dtype)


def _pad_slots(scales: Tensor, slots: int) -> Tensor:
    missing = slots - scales.shape[-1]
    return scales if missing == 0 else torch.nn.functional.pad(scales, (0, missing))
