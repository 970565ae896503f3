"""Layouts of heads as sealing and opening take them: where each part of a piece lies, as constants of compilation.

`pieces` describes the same for attention, cut into what a matrix product takes; here a class of keys stays whole, because
its entries share a scale.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kernels.codes import CODE_BITS
from sgl_kernels.errors import KernelLayoutError
from sgl_kernels.page_layout import ALIGNMENT, LANES, HeadLayout, PageLayout
from sgl_kernels.triton.codes import code_unit
from sgl_kernels.triton.launch import padded
from sgl_kernels.triton.pieces import MAX_HEAD_DIM

WARP_ELEMENTS = 2048
"""Numbers of a tile that a warp holds: 64 in each thread."""
MAX_WARPS = 16
REGISTERS = 65536
"""Of a multiprocessor, which a program can have all; a thread has 255 at most."""


@dataclass(frozen=True)
class StoredClass:
    """A class of keys. Offsets are bytes from the start of the piece."""

    kind: str
    unit: float
    bits: int
    first: int
    """Its first channel in the basis of the keys."""
    channels: int
    dim: int
    """The next power of two of `channels`, at least 16."""
    whole: int
    """Groups of dwords."""
    half: bool
    """Whether a group of words follows."""
    stride: int
    """Bytes from a group to the next."""
    codes_at: int
    scales_at: int
    """Of its entries, or of channels."""


@dataclass(frozen=True)
class StoredPiece:
    """A `HeadLayout`. Offsets are bytes from the start of the piece."""

    basis: str
    """ "flat", "identity" or "reduced"."""
    entries: int
    head_dim: int
    dim: int
    """The next power of two of `head_dim`."""
    classes: tuple[StoredClass, ...]
    channel_scales: bool
    value_kind: str
    value_unit: float
    value_bits: int
    value_whole: int
    value_stride: int
    v_codes: int
    v_scales: int
    k_mean: int
    v_mean: int
    bias: int
    """-1 where entries are tokens."""


def launch_options(rows: int, columns: int) -> dict[str, int]:
    """How a program is compiled that has so many fp32 numbers in its registers."""
    warps = min(MAX_WARPS, max(4, rows * columns // WARP_ELEMENTS))
    return {"num_warps": warps, "maxnreg": min(255, REGISTERS // (32 * warps))}


@dataclass(frozen=True)
class HeadGroup:
    """Heads of a page with the same layout, of all layers."""

    piece: StoredPiece
    table: Tensor
    """(K, 3) int32: which head, where its piece starts in units of 64 bytes, its row of the reduced bases."""


def head_groups(layout: PageLayout, device: torch.device) -> tuple[HeadGroup, ...]:
    """The heads of a coded layout by what they are like.

    Raises:
        KernelLayoutError: keys that are separated from their positions, entries that are no power of two of 8 or more, or
            heads of more than 256 channels.
    """
    check_layout(layout)
    groups = []
    for head, indices in layout.head_groups:
        rows = [[i, layout.piece_offsets[i] // ALIGNMENT, layout.first_basis + i] for i in indices]
        groups.append(HeadGroup(stored_piece(head), torch.tensor(rows, dtype=torch.int32, device=device)))
    return tuple(groups)


def check_layout(layout: PageLayout) -> None:
    """See `head_groups`."""
    if layout.is_separated:
        raise KernelLayoutError(
            f"format {layout.name!r} has keys that are separated from their positions, and the Triton kernels seal rotated "
            f"keys only: use the torch reference, or rotated keys"
        )
    if layout.geometry.head_dim > MAX_HEAD_DIM:
        raise KernelLayoutError(f"head_dim {layout.geometry.head_dim}: the Triton kernels take up to {MAX_HEAD_DIM}")
    sizes = {layout.geometry.page_size, *(head.entries for head in layout.heads)}
    wrong = sorted(size for size in sizes if size < 8 or size & (size - 1))
    if wrong:
        raise KernelLayoutError(
            f"{wrong[0]} entries of a page of format {layout.name!r}: the Triton kernels take 8 or a larger power of two; "
            f"use --page-size 64"
        )


def stored_piece(head: HeadLayout) -> StoredPiece:
    """The constants of one layout."""
    at, first, classes = head.offsets, 0, []
    for index, key_class in enumerate(head.key_classes):
        kind, channels = key_class.kind, key_class.channels
        halves = _halves(channels, kind)
        scales_at = at["k_scales"] + (0 if head.channel_scales else index * head.entries)
        of_lines = halves // 2, halves % 2 == 1, _stride(head.entries), at[f"k_codes{index}"], scales_at
        classes.append(StoredClass(kind, code_unit(kind), CODE_BITS[kind], first, channels, padded(channels), *of_lines))
        first += channels
    return StoredPiece(
        head.basis,
        head.entries,
        head.head_dim,
        padded(head.head_dim),
        tuple(classes),
        head.channel_scales,
        head.value_kind,
        code_unit(head.value_kind),
        CODE_BITS[head.value_kind],
        _halves(head.entries, head.value_kind) // 2,
        _stride(head.head_dim),
        at["v_codes"],
        at["v_scales"],
        at["k_mean"],
        at["v_mean"],
        at["bias"] if head.merged else -1,
    )


def _halves(contraction: int, kind: str) -> int:
    """Half groups of the lines of a contraction."""
    return -(-2 * contraction * CODE_BITS[kind] // 32)


def _stride(lanes: int) -> int:
    return -(-lanes // LANES) * ALIGNMENT
