"""Where the parts of a stored page lie: the binary contract between whoever writes pages and whoever reads them.

A page is one contiguous envelope with all layers and local KV heads. Axes: L layers, G KV heads, S page size, D head dim.

A *plain* page holds, per layer, K then V, each (G, S, D) in the model dtype.

A *coded* page holds one piece per layer and head, layer-major, each starting on 64 bytes. With E entries (tokens, or
groups of merged tokens) a piece holds, in this order:

    k_codes, class by class     v_codes
    k_scales (classes, E), or (D,) with channel scales     v_scales (E,)
    k_mean (D,)     v_mean (D,)     bias (E,) if merged

Scales are unsigned E5M3 bytes, means E4M3, biases unsigned steps of 1/16 nat.

Keys are *rotated* at their positions, or *separated* from them: un-rotated, so that readers put the rotation back. Behind
the pieces of such a page lie, padded to 64 bytes, the position of its first token (int32, little endian) and, if some piece
is merged, the offsets of all pieces, (E,) each: how many tokens behind it entry e lies, an unsigned byte; otherwise that
is e.

Codes lie in *lines* of 64 bytes: 16 lanes of one dword, each with the codes of 4, 8 or 16 (8, 4 or 2 bits) consecutive
contraction indices, index 4 j + b of them in byte b at the j-th bit field from below. Keys have the entry in the lane and
contract over channels; values have the channel in the lane and contract over entries. Lines are ordered by contraction
group, then by lane block. That is what a dot product instruction over bytes reads. A last group of at most half the indices
is a half line: 16 lanes of one word, index 2 j + b in byte b. Indices beyond the end are code 0.

Three bases of keys. *flat*: all channels in the orthonormal basis of `basis.orthonormal_basis`, one class, mean in that
basis. *identity*: all channels as the model wrote them, one class, always with channel scales.
*reduced*: the columns of a (D, C) matrix per head, C <= D, in classes of different precision; the mean stays in the model's
own basis with all channels, so what is left out lives on in it. Values always have the flat basis.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from sgl_kernels.codes import CODE_BITS
from sgl_kernels.errors import PageLayoutError

ALIGNMENT = 64
"""Bytes on which every piece and every page starts: a cache line, and one line of codes."""
LANES = 16
STORED_KINDS = tuple(kind for kind, bits in CODE_BITS.items() if 8 % bits == 0)
"""Kinds of codes that lines hold."""
POSITION_BYTES = 4
"""Of the position of the first token of a separated page."""


def contraction_width(kind: str) -> int:
    """Codes of one dword: how many contraction indices a lane of a line holds.

    Raises:
        PageLayoutError: codes of this kind cannot be stored, or there is no such kind.
    """
    if kind not in STORED_KINDS:
        why = "has codes of 3 bits, which do not fill a byte" if CODE_BITS.get(kind) == 3 else "does not exist"
        raise PageLayoutError(f"code kind {kind!r} {why}: a page can hold {', '.join(STORED_KINDS)}")
    return 32 // CODE_BITS[kind]


def code_bytes(kind: str, lanes: int, contraction: int) -> int:
    """Bytes of the lines that hold `lanes` x `contraction` codes."""
    width = contraction_width(kind)
    half_groups = -(-2 * contraction // width)
    return ALIGNMENT // 2 * half_groups * -(-lanes // LANES)


@dataclass(frozen=True)
class PageGeometry:
    """What is fixed for one model and rank."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    identity_layers: tuple[int, ...] = ()
    """Layers (counted from 0 on this rank) whose keys stay in the identity basis."""

    @property
    def layer_elements(self) -> int:
        """K and V values of one layer of a page."""
        return 2 * self.num_kv_heads * self.page_size * self.head_dim


@dataclass(frozen=True)
class KeyClass:
    """Consecutive channels of the key basis that share a kind of code and, per entry, a scale."""

    kind: str
    channels: int


@dataclass(frozen=True)
class HeadLayout:
    """One piece: the keys and values of one layer and head.

    Raises:
        PageLayoutError: a kind of code that pages cannot hold, as the 3 bits of "int3".
    """

    basis: str
    """ "flat", "identity" or "reduced"."""
    entries: int
    head_dim: int
    key_classes: tuple[KeyClass, ...]
    value_kind: str
    merged: bool
    channel_scales: bool = False
    """Whether keys have one scale per channel and `k_mean` holds midpoints, instead of a scale per class and entry."""

    def __post_init__(self) -> None:
        for kind in (*(c.kind for c in self.key_classes), self.value_kind):
            contraction_width(kind)  # refuses what cannot be stored

    @property
    def key_channels(self) -> int:
        """C: channels that keys keep."""
        return sum(c.channels for c in self.key_classes)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Start of each part in bytes: "k_codes0", "k_codes1", ..., "v_codes", "k_scales", ..., "end"."""
        starts, position = {}, 0
        for part, size in self._sizes():
            starts[part] = position
            position += size
        starts["end"] = position
        return starts

    @property
    def piece_bytes(self) -> int:
        """Bytes of the piece, padding included."""
        return -(-self.offsets["end"] // ALIGNMENT) * ALIGNMENT

    @property
    def value_bits(self) -> int:
        """Bits that code channels and values themselves; the rest of the piece is metadata."""
        keys = sum(CODE_BITS[c.kind] * c.channels for c in self.key_classes)
        return self.entries * (keys + CODE_BITS[self.value_kind] * self.head_dim)

    def _sizes(self) -> Iterator[tuple[str, int]]:
        for index, key_class in enumerate(self.key_classes):
            yield f"k_codes{index}", code_bytes(key_class.kind, self.entries, key_class.channels)
        yield "v_codes", code_bytes(self.value_kind, self.head_dim, self.entries)
        yield "k_scales", self.head_dim if self.channel_scales else len(self.key_classes) * self.entries
        yield "v_scales", self.entries
        yield "k_mean", self.head_dim
        yield "v_mean", self.head_dim
        yield "bias", self.entries if self.merged else 0


@dataclass(frozen=True)
class PageLayout:
    """Byte offsets of one format."""

    name: str
    geometry: PageGeometry
    heads: tuple[HeadLayout, ...]
    """L x G pieces, layer-major; empty for a plain page."""
    is_separated: bool = False
    """Whether keys are stored without their rotation, positions beside them."""
    basis_set: int = 0
    """Which set of reduced bases its heads have: head i uses row `first_basis` + i of all of them."""
    min_page_bytes: int = 0
    """Bytes of the page on the rank where it is largest; the rest of it is unused here."""

    @property
    def first_basis(self) -> int:
        """Row of the reduced basis of its first head."""
        return self.basis_set * len(self.heads)

    @property
    def is_plain(self) -> bool:
        """Whether the page holds values as the model wrote them."""
        return not self.heads

    @property
    def entries(self) -> int:
        """E: entries of a page; of the piece that has most, where heads keep different numbers."""
        return self.geometry.page_size if self.is_plain else max(head.entries for head in self.heads)

    @property
    def is_merged(self) -> bool:
        """Whether entries of some head are groups of tokens, with a bias each."""
        return any(head.merged for head in self.heads)

    @property
    def position_bytes(self) -> int:
        """Bytes of the positions of a separated page, from `piece_offsets[-1]` on, padding left out."""
        if not self.is_separated:
            return 0
        return POSITION_BYTES + (sum(head.entries for head in self.heads) if self.is_merged else 0)

    @cached_property
    def piece_offsets(self) -> tuple[int, ...]:
        """Start of each piece in the page, L x G + 1 of them."""
        starts = [0]
        for head in self.heads:
            starts.append(starts[-1] + head.piece_bytes)
        return tuple(starts)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        if self.is_plain:
            return self.geometry.layer_elements * self.geometry.dtype.itemsize * self.geometry.num_layers
        return max(self.piece_offsets[-1] + -(-self.position_bytes // ALIGNMENT) * ALIGNMENT, self.min_page_bytes)

    @property
    def metadata_bytes(self) -> int:
        """Bytes of a page that are neither codes nor values: scales, means, biases, positions, padding."""
        return 0 if self.is_plain else self.page_bytes - sum(head.value_bits for head in self.heads) // 8

    def layer_range(self, layer: int) -> tuple[int, int]:
        """First byte of a layer in the page, and the number of its bytes."""
        if self.is_plain:
            size = self.geometry.layer_elements * self.geometry.dtype.itemsize
            return layer * size, size
        g = self.geometry.num_kv_heads
        start, end = self.piece_offsets[layer * g], self.piece_offsets[(layer + 1) * g]
        return start, end - start

    def layer_heads(self, layer: int) -> tuple[HeadLayout, ...]:
        """The pieces of a layer."""
        g = self.geometry.num_kv_heads
        return self.heads[layer * g : (layer + 1) * g]

    def layer_basis(self, layer: int) -> str:
        """Basis of the keys of a layer, the same for its heads; a plain page has "identity"."""
        return "identity" if self.is_plain else self.layer_heads(layer)[0].basis

    def folds_keys(self, layer: int) -> bool:
        """Whether queries can be turned into the flat basis instead of the keys of a layer out of it."""
        return self.layer_basis(layer) == "flat" and not self.is_separated

    @cached_property
    def head_groups(self) -> tuple[tuple[HeadLayout, tuple[int, ...]], ...]:
        """Pieces with the same layout: (layout, their indices)."""
        groups: dict[HeadLayout, list[int]] = {}
        for index, head in enumerate(self.heads):
            groups.setdefault(head, []).append(index)
        return tuple((head, tuple(indices)) for head, indices in groups.items())


def plain_layout(name: str, geometry: PageGeometry) -> PageLayout:
    """Layout of a page in the model dtype."""
    return PageLayout(name, geometry, ())


def coded_layout(
    name: str, key_kind: str, value_kind: str, geometry: PageGeometry, *, channel_scales: bool = False
) -> PageLayout:
    """Layout of a page with all channels at one precision: flat basis, or identity where the geometry says so.

    Args:
        key_kind, value_kind: "e4m3", "e2m1" or "int4". Identity layers have asymmetric 4-bit keys instead of the symmetric.
        channel_scales: keys have a scale and a midpoint per channel and asymmetric 4-bit codes everywhere.
    """
    flat = HeadLayout(
        "flat",
        geometry.page_size,
        geometry.head_dim,
        _all("int4_asymmetric" if channel_scales else key_kind, geometry),
        value_kind,
        merged=False,
        channel_scales=channel_scales,
    )
    identity = identity_head(key_kind, value_kind, geometry)
    return PageLayout(name, geometry, _by_layer(geometry, flat, identity))


def reduced_layout(
    name: str, classes: tuple[tuple[KeyClass, ...], ...], value_kind: str, merge: int, geometry: PageGeometry
) -> PageLayout:
    """Layout of a page with reduced key channels and `merge` tokens to an entry.

    Args:
        classes: for each of the L x G heads its key classes; an empty one keeps all channels in the identity basis.
    """
    entries = geometry.page_size // merge
    heads = tuple(
        HeadLayout("reduced", entries, geometry.head_dim, of_head, value_kind, merged=merge > 1)
        if of_head
        else identity_head("int4", value_kind, geometry, merge)
        for of_head in classes
    )
    return PageLayout(name, geometry, heads)


def identity_head(key_kind: str, value_kind: str, geometry: PageGeometry, merge: int = 1) -> HeadLayout:
    """Piece of a layer whose key bias survives: every channel kept, with its own scale."""
    kind = key_kind if key_kind == "e4m3" else "int4_asymmetric"
    entries = geometry.page_size // merge
    classes = _all(kind, geometry)
    return HeadLayout("identity", entries, geometry.head_dim, classes, value_kind, merged=merge > 1, channel_scales=True)


def _all(kind: str, geometry: PageGeometry) -> tuple[KeyClass, ...]:
    return (KeyClass(kind, geometry.head_dim),)


def _by_layer(geometry: PageGeometry, flat: HeadLayout, identity: HeadLayout) -> tuple[HeadLayout, ...]:
    marked = set(geometry.identity_layers)
    return tuple(
        identity if layer in marked else flat for layer in range(geometry.num_layers) for _ in range(geometry.num_kv_heads)
    )
