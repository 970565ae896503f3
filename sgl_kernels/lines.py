"""Packing codes into lines and back; `page_layout` says what a line is."""

import torch
from torch import Tensor

from sgl_kernels.codes import CODE_BITS
from sgl_kernels.page_layout import LANES, contraction_width


def pack_lines(codes: Tensor, kind: str) -> Tensor:
    """(..., lanes, contraction) uint8 codes -> (..., bytes) uint8."""
    width, bits = contraction_width(kind), CODE_BITS[kind]
    lanes, contraction = codes.shape[-2:]
    full, half = _groups(contraction, width)
    padded = width * full + width // 2 * half
    codes = torch.nn.functional.pad(codes, (0, padded - contraction, 0, -lanes % LANES))
    lead = codes.shape[:-2]
    blocks = codes.shape[-2] // LANES
    # (..., lane block, lane, group, bit field, byte); the bit fields of a byte are merged, then groups go outermost.
    lines = codes[..., : width * full].reshape(*lead, blocks, LANES, full, 8 // bits, 4)
    parts = [_merge_fields(lines, bits).movedim(-2, -4).flatten(-4)]
    if half:
        words = codes[..., width * full :].reshape(*lead, blocks, LANES, 8 // bits, 2)
        parts.append(_merge_fields(words, bits).flatten(-3))
    return torch.cat(parts, -1)


def unpack_lines(packed: Tensor, kind: str, lanes: int, contraction: int) -> Tensor:
    """(..., bytes) uint8 -> (..., lanes, contraction) uint8 codes."""
    width, bits = contraction_width(kind), CODE_BITS[kind]
    full, half = _groups(contraction, width)
    lead = packed.shape[:-1]
    blocks = -(-lanes // LANES)
    end = full * blocks * LANES * 4
    lines = packed[..., :end].reshape(*lead, full, blocks, LANES, 4).movedim(-4, -2)
    parts = [_split_fields(lines, bits).flatten(-3)]
    if half:
        words = packed[..., end:].reshape(*lead, blocks, LANES, 2)
        parts.append(_split_fields(words, bits).flatten(-2))
    codes = torch.cat(parts, -1) if half else parts[0]
    return codes.flatten(-3, -2)[..., :lanes, :contraction]


def _groups(contraction: int, width: int) -> tuple[int, int]:
    """Whole groups of a contraction, and whether a half group follows."""
    halves = -(-2 * contraction // width)
    return halves // 2, halves % 2


def _merge_fields(codes: Tensor, bits: int) -> Tensor:
    """(..., fields, bytes) codes -> (..., bytes)."""
    merged = codes[..., 0, :]
    for field in range(1, 8 // bits):
        merged = merged | (codes[..., field, :] << (bits * field))
    return merged


def _split_fields(merged: Tensor, bits: int) -> Tensor:
    """(..., bytes) -> (..., fields, bytes) codes."""
    if bits == 8:
        return merged.unsqueeze(-2)
    mask = (1 << bits) - 1
    return torch.stack([(merged >> (bits * field)) & mask for field in range(8 // bits)], -2)
