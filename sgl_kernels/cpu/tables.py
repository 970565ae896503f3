"""Page layouts as the table of integers that the kernels read (`csrc/layout.h`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_kernels.page_layout import PageLayout

FIELDS = 24
MODEL, FLAT, IDENTITY = 0, 1, 2
ROW_ORDER = 0
CODES = {"plain": 0, "e4m3": 1, "e2m1": 2, "int4": 3, "int4_asymmetric": 4}
LANES = 16


def piece_table(layouts: Sequence[PageLayout]) -> Tensor:
    """(L, F, G, FIELDS) int64: for each layer, format and head where the parts of a page lie."""
    geometry = layouts[0].geometry
    rows = [
        [[_piece(layout, layer, head) for head in range(geometry.num_kv_heads)] for layout in layouts]
        for layer in range(geometry.num_layers)
    ]
    return torch.tensor(rows, dtype=torch.int64)


def basis_lines(basis: Tensor) -> Tensor:
    """(ceil(D / 16), D, 16) fp32: the columns of the (D, D) basis, sixteen at a time, padded with zeros."""
    dim = basis.shape[0]
    blocks = -(-dim // LANES)
    padded = torch.nn.functional.pad(basis.float(), (0, blocks * LANES - dim))
    return padded.view(dim, blocks, LANES).transpose(0, 1).contiguous()


def _piece(layout: PageLayout, layer: int, head: int) -> list[int]:
    geometry = layout.geometry
    entries, dim = geometry.page_size, geometry.head_dim
    start = layer * layout.layer_bytes
    if layout.is_plain:
        head_bytes = entries * dim * geometry.dtype.itemsize
        keys = start + head * head_bytes
        values = keys + geometry.num_kv_heads * head_bytes
        return _row(MODEL, entries, [keys, values, -1, -1, -1, -1, -1], CODES["plain"], CODES["plain"], dim)
    identity = layer in geometry.identity_layers
    at = layout.offsets
    sizes = {
        **dict.fromkeys(("k_codes", "v_codes"), entries * layout.code_bytes),
        "k_scales": layout.scale_slots,
        "v_scales": entries,
        **dict.fromkeys(("k_means", "v_means"), dim),
    }
    parts = [start + at[name] + head * size for name, size in sizes.items()]
    key_kind = "int4_asymmetric" if identity and layout.codes != "e4m3" else layout.codes
    return _row(IDENTITY if identity else FLAT, entries, [*parts, -1], CODES[key_kind], CODES[layout.codes], dim)


def _row(basis: int, entries: int, parts: list[int], key_kind: int, value_kind: int, channels: int) -> list[int]:
    row = [basis, ROW_ORDER, entries, *parts, value_kind, 0, 1, key_kind, 0, 0, 0, channels]
    return row + [0] * (FIELDS - len(row))
