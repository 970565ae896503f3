"""The page codec in torch: entries -> packed bytes -> entries.

Coded keys and values of a page are y = (x - mean) B: page mean removed, basis B, one scale per class and entry. Layers with
the identity basis keep keys with one scale and one midpoint per channel, because there a large constant survives in a few
channels and the flat basis would spread it over all.

Nothing has to be undone per entry when reading: with q' = q B the logit of entry e is q . mean + s_e (q' . code_e), and
values come back through the basis once per query, after the weighted sum. Layouts with separated keys give that up: keys
are coded without their rotation, which reading puts back entry by entry.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_kernels import codes as num
from sgl_kernels.lines import pack_lines, unpack_lines
from sgl_kernels.page_codec.positions import put_positions, take_positions
from sgl_kernels.page_layout import HeadLayout, PageLayout, code_bytes
from sgl_kernels.rope import Rope

BIAS_STEP = 1 / 16
"""Nat per step of a stored bias."""


@dataclass(frozen=True)
class CodecBases:
    """The matrices of one model and rank, fixed once."""

    flat: Tensor
    """(D, D) fp32, symmetric and orthonormal."""
    reduced: Tensor | None = None
    """(sets x L x G, D, C) fp32 with orthonormal columns, one set or more of all heads, see `PageLayout.basis_set`; a head
    that keeps fewer than C channels uses its first ones."""
    rope: Rope | None = None
    """Rotation of the keys; needed by layouts that separate it from them."""


@dataclass(frozen=True)
class Entries:
    """Entries of N pages of one format. Axes (N, heads, E, D)."""

    keys: Tensor
    values: Tensor
    bias: Tensor | None
    """(N, heads, E) in nat: log of how many times its own weight an entry stands for. None: 0 everywhere. Minus infinity:
    no entry. Heads may keep different numbers of entries; those that keep fewer end with such padding."""
    positions: Tensor | None = None
    """(N, heads, E) int64 position at which each key is rotated; needed where a layout separates it."""


def seal_pages(entries: Entries, layout: PageLayout, bases: CodecBases, weight: Tensor | None = None) -> Tensor:
    """Encode N full pages, all layers at once.

    Args:
        entries: keys and values (N, L x G, E, D) of any float dtype, rotated at their positions, in the model's own basis;
            merged already, with a bias, if `layout` is. A head that keeps fewer than E has its own first.
        layout: a coded layout of this geometry.
        weight: (N, L x G, E) share of attention that each entry is expected to draw. The means that are taken out before
            quantisation are weighted by it, so that what is left of entries that matter is small and gets small scales. A
            page without weights (all zero, or None) has the plain mean of keys and no mean of values, because much attention
            goes to tokens whose value is near zero.

    Returns:
        (N, page_bytes) uint8. NaN is stored as 0 and magnitudes beyond `codes.SATURATION` saturate.

    Raises:
        ValueError: the bias, the positions or the matrices that `layout` needs are missing, or positions are not those of
            a page.
    """
    keys, values = _finite(entries.keys), _finite(entries.values)
    n = keys.shape[0]
    packed = torch.zeros(n, layout.page_bytes, dtype=torch.uint8, device=keys.device)
    if layout.is_separated:
        if entries.positions is None:
            raise ValueError("a layout with separated keys needs the positions of its entries")
        put_positions(packed, layout, entries.positions)
        keys = _rope(bases).unrotate(keys, entries.positions)
    for head, indices in layout.head_groups:
        chosen, kept = torch.tensor(indices, device=keys.device), slice(head.entries)
        piece = torch.zeros(n, chosen.numel(), head.piece_bytes, dtype=torch.uint8, device=keys.device)
        share = _shares(weight[:, chosen, kept] if weight is not None else torch.zeros_like(keys[:, chosen, kept, 0]))
        _put_keys(piece, keys[:, chosen, kept], head, bases, layout.first_basis + chosen, share)
        _put_values(piece, values[:, chosen, kept] @ bases.flat, head, share)
        if head.merged:
            if entries.bias is None:
                raise ValueError("a merged layout needs the bias of its entries")
            steps = (entries.bias[:, chosen, kept] / BIAS_STEP).round().clamp(0, 255)
            _put(piece, head, "bias", steps.to(torch.uint8))
        for i, index in enumerate(indices):
            packed[:, layout.piece_offsets[index] : layout.piece_offsets[index + 1]] = piece[:, i]
    return packed


def open_layer(block: Tensor, layout: PageLayout, layer: int, bases: CodecBases, positions: Tensor | None = None) -> Entries:
    """Decode one layer of N coded pages: keys in the flat basis if `layout.folds_keys(layer)` and in the model's own
    otherwise, rotated; values in the flat basis.

    Args:
        block: (N, bytes of the layer) uint8.
        layer: layer on this rank, counted from 0.
        positions: (N, G, E) int64 position of each entry, for separated keys.
    """
    opened = _open_layer(block, layout, layer, bases)
    if not layout.is_separated:
        return opened
    if positions is None:
        raise ValueError("separated keys are opened without their positions")
    keys = opened.keys @ bases.flat if layout.layer_basis(layer) == "flat" else opened.keys
    return Entries(_rope(bases).rotate(keys, positions), opened.values, opened.bias, positions)


def _open_layer(block: Tensor, layout: PageLayout, layer: int, bases: CodecBases) -> Entries:
    """The same as stored: keys in the flat basis if that is the basis of the layer, without rotation if they are
    separated."""
    g = layout.geometry.num_kv_heads
    first = layer * g
    start, row = layout.piece_offsets[first], layout.first_basis + first
    heads = layout.layer_heads(layer)
    if all(head == heads[0] for head in heads):
        return _open_pieces(block.view(-1, g, heads[0].piece_bytes), heads[0], bases, slice(row, row + g))
    opened = []
    for i, head in enumerate(heads):
        piece = block[:, layout.piece_offsets[first + i] - start : layout.piece_offsets[first + i + 1] - start]
        opened.append(_open_pieces(piece[:, None], head, bases, slice(row + i, row + i + 1)))
    return side_by_side(opened)


def side_by_side(parts: Sequence[Entries]) -> Entries:
    """Heads of the same N pages in one; those with fewer entries than others are padded."""
    most = max(part.keys.shape[-2] for part in parts)
    some_bias = any(part.bias is not None or part.keys.shape[-2] < most for part in parts)
    some_positions = all(part.positions is not None for part in parts)
    keys, values, bias, positions = [], [], [], []
    for part in parts:
        missing = most - part.keys.shape[-2]
        keys.append(F.pad(part.keys, (0, 0, 0, missing)))
        values.append(F.pad(part.values, (0, 0, 0, missing)))
        own = part.keys.new_zeros(part.keys.shape[:3]) if part.bias is None else part.bias
        bias.append(F.pad(own, (0, missing), value=-math.inf))
        if part.positions is not None:
            positions.append(F.pad(part.positions, (0, missing)))
    return Entries(
        torch.cat(keys, 1),
        torch.cat(values, 1),
        torch.cat(bias, 1) if some_bias else None,
        torch.cat(positions, 1) if some_positions else None,
    )


def open_pages(packed: Tensor, layout: PageLayout, bases: CodecBases) -> Entries:
    """Entries of N coded pages in the model's own basis, all layers: heads is L x G, fp32."""
    g = layout.geometry.num_kv_heads
    positions = take_positions(packed, layout) if layout.is_separated else None
    layers = []
    for layer in range(layout.geometry.num_layers):
        start, size = layout.layer_range(layer)
        most = max(head.entries for head in layout.layer_heads(layer))
        at = None if positions is None else positions[:, layer * g : (layer + 1) * g, :most]
        opened = open_layer(packed[:, start : start + size].contiguous(), layout, layer, bases, at)
        keys = opened.keys @ bases.flat if layout.folds_keys(layer) else opened.keys
        layers.append(Entries(keys, opened.values @ bases.flat, opened.bias))
    return replace(side_by_side(layers), positions=positions)


def _put_values(piece: Tensor, y: Tensor, head: HeadLayout, share: Tensor) -> None:
    """Encode values (N, heads, E, D) in the flat basis into `piece`."""
    mean = num.encode_e4m3((y * share).sum(-2))
    scales, coded = _encode_class(y - num.decode_e4m3(mean).unsqueeze(-2), head.value_kind)
    _put(piece, head, "v_codes", pack_lines(coded.transpose(-1, -2), head.value_kind))
    _put(piece, head, "v_scales", scales)
    _put(piece, head, "v_mean", mean)


def _put_keys(piece: Tensor, keys: Tensor, head: HeadLayout, bases: CodecBases, index: Tensor, share: Tensor) -> None:
    """Encode keys (N, heads, E, D) into `piece`."""
    y = keys @ bases.flat if head.basis == "flat" else keys
    if head.channel_scales:
        mean, scales, coded = _encode_channels(y, head.key_classes[0].kind)
        _put(piece, head, "k_mean", mean)
        _put(piece, head, "k_scales", scales)
        _put(piece, head, "k_codes0", pack_lines(coded, head.key_classes[0].kind))
        return
    weighted = share.sum(-2, keepdim=True) > 0
    mean = num.encode_e4m3((y * torch.where(weighted, share, 1 / head.entries)).sum(-2))
    y = y - num.decode_e4m3(mean).unsqueeze(-2)
    if head.basis == "reduced":
        y = y @ _columns(bases, index, head.key_channels)
    _put(piece, head, "k_mean", mean)
    start, class_scales = 0, []
    for i, key_class in enumerate(head.key_classes):
        scales, coded = _encode_class(y[..., start : start + key_class.channels], key_class.kind)
        _put(piece, head, f"k_codes{i}", pack_lines(coded, key_class.kind))
        class_scales.append(scales)
        start += key_class.channels
    _put(piece, head, "k_scales", torch.cat(class_scales, -1))


def _put(piece: Tensor, head: HeadLayout, part: str, data: Tensor) -> None:
    start = head.offsets[part]
    piece[..., start : start + data.shape[-1]] = data


def _open_pieces(piece: Tensor, head: HeadLayout, bases: CodecBases, heads: slice) -> Entries:
    """Decode pieces (N, heads, piece_bytes) of one layout; `heads` are their rows in `bases.reduced`."""
    e, d = head.entries, head.head_dim

    def part(name: str, size: int) -> Tensor:
        return piece[..., head.offsets[name] : head.offsets[name] + size]

    mean = num.decode_e4m3(part("k_mean", d).contiguous()).unsqueeze(-2)
    columns = []
    for i, key_class in enumerate(head.key_classes):
        kind, channels = key_class.kind, key_class.channels
        packed = part(f"k_codes{i}", code_bytes(kind, e, channels))
        code = num.decode_codes(unpack_lines(packed, kind, e, channels), kind)
        if head.channel_scales:
            columns.append(code * num.decode_ue5m3(part("k_scales", d)).unsqueeze(-2))
        else:
            scales = num.decode_ue5m3(part("k_scales", (i + 1) * e)[..., i * e :])
            columns.append(code * scales.unsqueeze(-1))
    keys = torch.cat(columns, -1) if len(columns) > 1 else columns[0]
    if head.basis == "reduced":
        keys = keys @ _columns(bases, heads, head.key_channels).transpose(-1, -2)
    packed = part("v_codes", code_bytes(head.value_kind, d, e))
    values = num.decode_codes(unpack_lines(packed, head.value_kind, d, e), head.value_kind).transpose(-1, -2)
    values = values * num.decode_ue5m3(part("v_scales", e)).unsqueeze(-1)
    values = values + num.decode_e4m3(part("v_mean", d).contiguous()).unsqueeze(-2)
    return Entries(keys + mean, values, part("bias", e).to(torch.float32) * BIAS_STEP if head.merged else None)


def _rope(bases: CodecBases) -> Rope:
    if bases.rope is None:
        raise ValueError("a layout with separated keys needs the rotation of the model")
    return bases.rope


def _columns(bases: CodecBases, heads: Tensor | slice, channels: int) -> Tensor:
    if bases.reduced is None:
        raise ValueError("a layout with reduced keys needs the reduced bases of the model")
    return bases.reduced[heads, :, :channels]


def _finite(x: Tensor) -> Tensor:
    x = x.to(torch.float32)
    return torch.nan_to_num(x, nan=0.0).clamp_(-num.SATURATION, num.SATURATION)


def _shares(weight: Tensor) -> Tensor:
    """(N, heads, E, 1) weights that add up to 1, or to 0 where all are 0."""
    total = weight.sum(-1, keepdim=True)
    return torch.where(total > 0, weight / total, torch.zeros_like(weight)).unsqueeze(-1)


def _encode_class(y: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """y (..., E, C) -> scale bytes (..., E) and codes (..., E, C)."""
    scales = num.encode_ue5m3(num.entry_scales(y, kind))
    return scales, num.encode_codes(y / num.decode_ue5m3(scales).unsqueeze(-1), kind)


def _encode_channels(y: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Midpoint and scale per channel, sixteen even levels (or E4M3). Same result as above, scales (..., C)."""
    low, high = torch.aminmax(y.transpose(-1, -2), dim=-1)
    means = num.encode_e4m3((low + high) / 2)
    residual = y - num.decode_e4m3(means).unsqueeze(-2)
    top = num.E4M3_MAX if kind == "e4m3" else num.INT4_ASYMMETRIC_MAX
    # Rounded up: a clipped channel extreme would be an error of its own in every entry that holds the constant.
    scales = num.encode_ue5m3(residual.abs().amax(-2) / top, round_up=True)
    return means, scales, num.encode_codes(residual / num.decode_ue5m3(scales).unsqueeze(-2), kind)
