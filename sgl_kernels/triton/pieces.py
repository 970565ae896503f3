"""Layouts of heads as the kernels take them: constants of compilation, and tables of where pieces lie."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kernels.codes import CODE_BITS
from sgl_kernels.errors import KernelLayoutError
from sgl_kernels.page_layout import ALIGNMENT, LANES, HeadLayout, PageLayout
from sgl_kernels.triton.codes import code_unit

TILE = 64
"""Entries that meet a query at a time: the rows of one `wgmma`."""
MIN_CONTRACTION = 16
"""Channels that a matrix product takes at least."""
MAX_PADDING = 1.34
"""Up to so many times the channels that there are, a power of two of them is opened at once."""
MAX_HEAD_DIM = 256
KINDS = ("e4m3", "e2m1", "int4", "int4_asymmetric", "lloyd2")
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Chunk:
    """Consecutive channels of a class of keys: a power of two of dwords of each entry, or one word."""

    kind: str
    unit: float
    width: int
    """Codes of a dword."""
    first: int
    """Its first channel in the basis of the keys."""
    valid: int
    """Channels there are, at most `groups` x `width`."""
    groups: int
    """Dwords of an entry, a power of two; those beyond `valid` do not exist."""
    half: bool
    """Words instead of dwords, with codes of two bytes: `sgl_kernels.page_layout` has the order."""
    codes_at: int
    """First byte of its codes in the piece."""
    scales_at: int
    """First byte of the scales of its entries in the piece."""
    opens_class: bool
    """Whether a scale begins here that the chunks before it do not have."""
    closes_class: bool

    @property
    def rows(self) -> int:
        """Contraction indices of the product."""
        return self.groups * self.width


@dataclass(frozen=True)
class Piece:
    """A `HeadLayout`, or rows of a plain page. Offsets are bytes from the start of the piece."""

    basis: str
    """ "plain", "flat", "identity" or "reduced"."""
    entries: int
    head_dim: int
    dim: int
    """The next power of two of `head_dim`."""
    dtype: str
    """Of a plain page."""
    chunks: tuple[Chunk, ...]
    key_stride: int
    """Bytes from a dword of an entry to its next."""
    channel_scales: bool
    value_kind: str
    value_unit: float
    value_width: int
    value_half: bool
    """Values of an entry group in one word: its entries fill half a dword."""
    value_stride: int
    v_codes: int
    k_scales: int
    v_scales: int
    k_mean: int
    v_mean: int
    bias: int
    """-1 where entries are tokens."""

    @property
    def tile(self) -> int:
        """Entries that are read at a time."""
        if self.channel_scales:
            # A scaled query belongs to one page.
            return max(MIN_CONTRACTION, min(TILE, self.entries))
        return TILE

    @property
    def tile_pages(self) -> int:
        """Pages of a tile."""
        return 1 if self.channel_scales else max(1, TILE // self.entries)

    @property
    def page_tiles(self) -> int:
        """Tiles of a page."""
        return max(1, self.entries // TILE)


def plain_piece(layout: PageLayout) -> Piece:
    """Keys of one head of a plain page; its values lie `v_codes` bytes behind them."""
    g = layout.geometry
    size, dim = g.page_size, g.head_dim
    _check_entries(layout.name, size)
    half = g.num_kv_heads * size * dim * g.dtype.itemsize
    padded = _power_of_two(dim)
    return Piece(
        "plain", size, dim, padded, DTYPES[g.dtype], (), 0, False, "", 1.0, 0, False, 0, half, -1, -1, -1, -1, -1
    )  # fmt: skip


def coded_piece(head: HeadLayout) -> Piece:
    """The piece of a coded page.

    Raises:
        KernelLayoutError: entries that are no power of two, or codes that the kernels do not open.
    """
    _check_entries("coded", head.entries)
    for kind in (*(c.kind for c in head.key_classes), head.value_kind):
        if kind not in KINDS:
            raise KernelLayoutError(
                f"code kind {kind!r}: the Triton kernels open {', '.join(KINDS)}; use the torch reference"
            )
    at, width = head.offsets, 32 // CODE_BITS[head.value_kind]
    return Piece(
        head.basis,
        head.entries,
        head.head_dim,
        _power_of_two(head.head_dim),
        "",
        tuple(_chunks(head)),
        -(-head.entries // LANES) * ALIGNMENT,
        head.channel_scales,
        head.value_kind,
        code_unit(head.value_kind),
        width,
        2 * head.entries <= width,
        -(-head.head_dim // LANES) * ALIGNMENT,
        at["v_codes"],
        at["k_scales"],
        at["v_scales"],
        at["k_mean"],
        at["v_mean"],
        at["bias"] if head.merged else -1,
    )


def _check_entries(name: str, entries: int) -> None:
    if entries < 8 or entries & (entries - 1):
        raise KernelLayoutError(
            f"{entries} entries of a {name} page: the Triton kernels take 8 or a larger power of two; use --page-size 64"
        )


def _power_of_two(n: int) -> int:
    return max(MIN_CONTRACTION, 1 << (n - 1).bit_length())


def _chunks(head: HeadLayout) -> list[Chunk]:
    chunks, channel, stride = [], 0, -(-head.entries // LANES) * ALIGNMENT
    for index, key_class in enumerate(head.key_classes):
        kind, width = key_class.kind, 32 // CODE_BITS[key_class.kind]
        halves = -(-2 * key_class.channels // width)
        parts = _power_parts(halves // 2, MIN_CONTRACTION // width)
        least = max(1, MIN_CONTRACTION // width)
        sizes = [(group * width, min(key_class.channels - group * width, count * width), _at_least(count, least), False)
                 for group, count in parts]  # fmt: skip
        if halves % 2:
            done = halves // 2 * width
            sizes.append((done, key_class.channels - done, least, True))
        scales_at = head.offsets["k_scales"] + (0 if head.channel_scales else index * head.entries)
        for i, (start, valid, groups, half) in enumerate(sizes):
            codes_at = head.offsets[f"k_codes{index}"] + start // width * stride
            ends = i == 0, i == len(sizes) - 1
            chunks.append(
                Chunk(kind, code_unit(kind), width, channel + start, valid, groups, half, codes_at, scales_at, *ends)
            )
        channel += key_class.channels
    return chunks


def _power_parts(groups: int, least: int) -> list[tuple[int, int]]:
    """(first, count) of parts of `groups`; a count that is no power of two is padded to the next."""
    parts, start = [], 0
    while groups - start > 0:
        count = 1 << ((groups - start).bit_length() - 1)
        # A product more costs more than a third of the channels.
        if 2 * count <= MAX_PADDING * (groups - start) or count < least:
            count = groups - start
        parts.append((start, count))
        start += count
    return parts


def _at_least(count: int, least: int) -> int:
    return max(least, 1 << (count - 1).bit_length())


@dataclass(frozen=True)
class FormatPieces:
    """One format of a ladder as the kernels take it."""

    pieces: tuple[Piece, ...]
    """The different ones of all layers and heads."""
    table: Tensor
    """(L, G, 2) int32: which of them a head has, and where it starts in the page, in units of 64 bytes."""
    bases: tuple[str, ...]
    """Basis of the keys of each layer."""
    first_basis: int
    """Row of the reduced basis of its first head."""


def format_pieces(layouts: Sequence[PageLayout]) -> tuple[FormatPieces, ...]:
    """What the kernels read of each format.

    Raises:
        KernelLayoutError: see `coded_piece`; or keys that are separated from their positions, pieces of a plain page that do
            not start on 64 bytes, heads of more than 256 channels.
    """
    return tuple(_format_pieces(layout) for layout in layouts)


def _format_pieces(layout: PageLayout) -> FormatPieces:
    g = layout.geometry
    if layout.is_separated:
        raise KernelLayoutError(
            f"format {layout.name!r} has keys that are separated from their positions, and the Triton kernels read rotated "
            f"keys only: use the torch reference, or rotated keys"
        )
    if g.head_dim > MAX_HEAD_DIM or g.head_dim % 4:
        raise KernelLayoutError(f"head_dim {g.head_dim}: the Triton kernels take multiples of 4 up to {MAX_HEAD_DIM}")
    shape = (g.num_layers, g.num_kv_heads)
    pieces: tuple[Piece, ...]
    if layout.is_plain:
        row = g.page_size * g.head_dim * g.dtype.itemsize
        starts = [layout.layer_range(layer)[0] + head * row for layer in range(shape[0]) for head in range(shape[1])]
        pieces, kinds = (plain_piece(layout),), [0] * len(starts)
    else:
        starts = list(layout.piece_offsets[:-1])
        of_heads = [coded_piece(head) for head in layout.heads]
        pieces = tuple(dict.fromkeys(of_heads))
        kinds = [pieces.index(piece) for piece in of_heads]
    if any(start % ALIGNMENT for start in starts):
        raise KernelLayoutError(f"pieces of format {layout.name!r} do not start on {ALIGNMENT} bytes")
    table = torch.tensor([[kind, start // ALIGNMENT] for kind, start in zip(kinds, starts, strict=True)], dtype=torch.int32)
    bases = tuple(layout.layer_basis(layer) for layer in range(g.num_layers))
    return FormatPieces(pieces, table.view(*shape, 2), bases, layout.first_basis)
