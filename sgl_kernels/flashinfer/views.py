"""Layers of the arena as FlashInfer takes them: strided views, nothing is copied."""

import torch
from torch import Tensor

from sgl_kernels.errors import KernelLayoutError
from sgl_kernels.flashinfer.plan import DenseFormat

KV_LAYOUT = "HND"
"""FlashInfer's name for the order of a plain page: heads, then entries, then channels."""
ROW_ALIGNMENT = 16
"""Bytes that FlashInfer loads at once."""
MAX_STRIDE = 2**32 - 1
"""FlashInfer keeps strides as uint32, in elements."""


def layer_view(arena: Tensor, one: DenseFormat, layer: int) -> Tensor:
    """One layer of every place that a page of a dense format can have.

    Args:
        arena: (bytes,) uint8, contiguous.
        layer: counted from 0 on this rank.

    Returns:
        (pages, 2, G, E, D) of the dtype of the format: keys, then values. Page i starts at byte i x page bytes; what lies in
        places of other formats is their bytes.

    Raises:
        KernelLayoutError: rows or pages that FlashInfer cannot address.
    """
    g, name = one.layout.geometry, one.layout.name
    size = g.dtype.itemsize
    page = one.layout.page_bytes // size
    if page > MAX_STRIDE:
        raise KernelLayoutError(
            f"pages of format {name!r} have {page} values, and FlashInfer takes {MAX_STRIDE}: smaller pages"
        )
    start = one.layout.layer_range(layer)[0]
    starts = (g.head_dim * size, start, one.layout.page_bytes, arena.data_ptr())
    if any(byte % ROW_ALIGNMENT for byte in starts):
        raise KernelLayoutError(
            f"format {name!r} has rows of {g.head_dim * size} bytes, layer {layer} at byte {start} of pages of "
            f"{one.layout.page_bytes} bytes and an arena at address {starts[3]:#x}; FlashInfer needs multiples of "
            f"{ROW_ALIGNMENT}: leave the format to the Triton kernels"
        )
    pages = arena.numel() // one.layout.page_bytes
    values = arena[: pages * one.layout.page_bytes].view(g.dtype)
    head, half = one.entries * g.head_dim, g.num_kv_heads * one.entries * g.head_dim
    shape = (pages, 2, g.num_kv_heads, one.entries, g.head_dim)
    return values.as_strided(shape, (page, half, head, g.head_dim, 1), values.storage_offset() + start // size)


def bias_slab(arena_bytes: int, one: DenseFormat, device: torch.device | str) -> Tensor:
    """Room for the biases of merged entries, beside the arena: (pages, L, G, E) uint8 steps of 1/16 nat, all 0.

    One row for each place that a page can have, so that page ids find both.
    """
    g = one.layout.geometry
    shape = (arena_bytes // one.layout.page_bytes, g.num_layers, g.num_kv_heads, one.entries)
    return torch.zeros(shape, dtype=torch.uint8, device=device)
