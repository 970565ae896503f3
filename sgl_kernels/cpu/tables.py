"""Page layouts as the tables that the kernels read (`csrc/layout.h`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_kernels.errors import KernelLayoutError
from sgl_kernels.page_codec.reference import CodecBases
from sgl_kernels.page_layout import LANES, HeadLayout, PageLayout

FIELDS = 28
MAX_CLASSES = 4
BASES = {"model": 0, "flat": 1, "identity": 2, "reduced": 3}
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
CODES = {"plain": 0, "e4m3": 1, "e2m1": 2, "int4": 3, "int4_asymmetric": 4, "lloyd2": 5}


def piece_table(layouts: Sequence[PageLayout], bases: CodecBases) -> Tensor:
    """(L, F, G, FIELDS) int64: for each layer, format and head where the parts of a page lie.

    Raises:
        KernelLayoutError: keys are stored without their rotation, which the kernels would not put back.
        ValueError: a head has more key classes than the kernels take, or codes that they do not read.
    """
    for layout in layouts:
        if layout.is_separated:
            raise KernelLayoutError(
                f"format {layout.name!r} has keys that are separated from their positions, and the compiled kernels read "
                f"rotated keys only: use the torch reference, or rotated keys"
            )
    g = layouts[0].geometry
    # Every head has as many floats in the lines of the reduced bases.
    stride = 0 if bases.reduced is None else -(-bases.reduced.shape[-1] // LANES) * LANES * g.head_dim
    rows = [
        [[_piece(layout, layer, head, stride) for head in range(g.num_kv_heads)] for layout in layouts]
        for layer in range(g.num_layers)
    ]
    return torch.tensor(rows, dtype=torch.int64)


def column_lines(matrix: Tensor) -> Tensor:
    """(..., ceil(C / 16), D, 16) fp32: the columns of (..., D, C), sixteen at a time, padded with zeros."""
    columns = matrix.shape[-1]
    blocks = -(-columns // LANES)
    padded = torch.nn.functional.pad(matrix.float(), (0, blocks * LANES - columns))
    return padded.view(*matrix.shape[:-1], blocks, LANES).transpose(-2, -3).contiguous()


def basis_tables(bases: CodecBases) -> tuple[Tensor, Tensor]:
    """The lines of the flat basis, and (sets x L x G, ...) those of the reduced bases, empty if there are none."""
    reduced = torch.empty(0) if bases.reduced is None else column_lines(bases.reduced)
    return column_lines(bases.flat), reduced


def _piece(layout: PageLayout, layer: int, head: int, stride: int) -> list[int]:
    g = layout.geometry
    if layout.is_plain:
        start, size = layout.layer_range(layer)
        keys = start + head * g.page_size * g.head_dim * g.dtype.itemsize
        row = [BASES["model"], g.page_size, keys, keys + size // 2, -1, -1, -1, -1, -1, CODES["plain"], 0, 0, g.head_dim]
        return row + [0] * (FIELDS - len(row))
    index = layer * g.num_kv_heads + head
    return _coded(layout.heads[index], layout.piece_offsets[index], layout.first_basis + index, stride)


def _coded(head: HeadLayout, start: int, basis: int, stride: int) -> list[int]:
    classes = head.key_classes
    if len(classes) > MAX_CLASSES:
        raise ValueError(f"{len(classes)} key classes: the compiled kernels take up to {MAX_CLASSES}")
    for kind in (*(c.kind for c in classes), head.value_kind):
        if kind not in CODES:
            raise ValueError(f"code kind {kind!r}: the compiled kernels read {', '.join(CODES)}; use --csa2-impl reference")
    at = {name: start + offset for name, offset in head.offsets.items()}
    parts = [at[name] for name in ("k_codes0", "v_codes", "k_scales", "v_scales", "k_mean", "v_mean")]
    parts.append(at["bias"] if head.merged else -1)
    row = [BASES[head.basis], head.entries, *parts, CODES[head.value_kind], int(head.channel_scales)]
    row += [basis * stride if head.basis == "reduced" else 0, head.key_channels, len(classes)]
    none = [0] * (MAX_CLASSES - len(classes))
    row += [CODES[c.kind] for c in classes] + none
    row += [c.channels for c in classes] + none
    row += [at[f"k_codes{i}"] for i in range(len(classes))] + none
    row.append(basis if head.basis == "reduced" else 0)
    return row + [0] * (FIELDS - len(row))
