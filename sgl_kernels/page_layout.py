"""Where the parts of a stored page lie: the binary contract between whoever writes pages and whoever reads them.

A page is one contiguous envelope with all layers and local KV heads. Axes: L layers, G KV heads, S page size, D head
dim. Per layer a plain page holds K then V, each (G, S, D) in the model dtype. A coded page holds, per layer, in this order:

    k_codes (G, S, code_bytes)   v_codes (G, S, code_bytes)
    k_scales (G, scale_slots)    v_scales (G, S)
    k_means (G, D)               v_means (G, D)

Codes of an entry are channels in order, 4-bit codes two a byte with the even channel low. Scales are unsigned E5M3,
means E4M3. In a layer with the flat basis keys have one scale per entry; in a layer with the identity basis one scale
per channel, and `k_means` holds the midpoints of the channels.
"""

from dataclasses import dataclass

import torch

ALIGNMENT = 256
"""Bytes to which the block of a layer is padded, so that every block starts on a cache line and is one row of a view."""


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
class PageLayout:
    """Byte offsets of one format. `code_bits` is 16 or 32 for a plain page."""

    name: str
    codes: str
    """ "plain", "e4m3", "e2m1" or "int4"."""
    code_bits: int
    geometry: PageGeometry
    layer_bytes: int
    metadata_bytes: int
    """Bytes of a page that are neither codes nor values: scales, means, padding."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.layer_bytes * self.geometry.num_layers

    @property
    def bits_per_value(self) -> float:
        """Stored bits per K or V value, metadata counted."""
        return 8 * self.layer_bytes / self.geometry.layer_elements

    @property
    def is_plain(self) -> bool:
        """Whether the page holds values as the model wrote them."""
        return self.codes == "plain"

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of one entry."""
        return self.geometry.head_dim * self.code_bits // 8

    @property
    def scale_slots(self) -> int:
        """Key scales kept per head: entries, or channels too where a layer needs one scale per channel."""
        geometry = self.geometry
        return max(geometry.page_size, geometry.head_dim) if geometry.identity_layers else geometry.page_size

    @property
    def offsets(self) -> dict[str, int]:
        """Start of each part inside the block of a layer, in bytes."""
        g = self.geometry
        sizes = {
            "k_codes": g.num_kv_heads * g.page_size * self.code_bytes,
            "v_codes": g.num_kv_heads * g.page_size * self.code_bytes,
            "k_scales": g.num_kv_heads * self.scale_slots,
            "v_scales": g.num_kv_heads * g.page_size,
            "k_means": g.num_kv_heads * g.head_dim,
            "v_means": g.num_kv_heads * g.head_dim,
        }
        starts, position = {}, 0
        for part, size in sizes.items():
            starts[part] = position
            position += size
        starts["end"] = position
        return starts


def plain_layout(name: str, geometry: PageGeometry) -> PageLayout:
    """Layout of a page in the model dtype."""
    itemsize = geometry.dtype.itemsize
    return PageLayout(name, "plain", 8 * itemsize, geometry, geometry.layer_elements * itemsize, 0)


def coded_layout(name: str, codes: str, geometry: PageGeometry) -> PageLayout:
    """Layout of a quantised page; `codes` is "e4m3", "e2m1" or "int4"."""
    code_bits = 8 if codes == "e4m3" else 4
    draft = PageLayout(name, codes, code_bits, geometry, 0, 0)
    layer_bytes = -(-draft.offsets["end"] // ALIGNMENT) * ALIGNMENT
    metadata = layer_bytes - geometry.layer_elements * code_bits // 8
    return PageLayout(name, codes, code_bits, geometry, layer_bytes, metadata * geometry.num_layers)
