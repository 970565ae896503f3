"""The codec of one model: entries of any format in, bytes of any smaller format out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from csa2.codec.channels import Rotation, reduced_bases
from csa2.codec.finite import finite
from csa2.codec.importance import attention_share, observed_attention
from csa2.codec.merging import merge_heads
from csa2.codec.scorer import Scorer
from csa2.formats import HeadClasses
from sgl_kernels.basis import orthonormal_basis
from sgl_kernels.page_codec.reference import CodecBases, Entries, open_pages, seal_pages
from sgl_kernels.page_layout import PageGeometry, PageLayout
from sgl_kernels.rope import Rope


@dataclass(frozen=True)
class PageCodec:
    """What sealing and opening pages of one model and rank needs."""

    bases: CodecBases
    scorer: Scorer | None = None
    """Of the L x G heads; None: the training-free score."""

    def to(self, device: torch.device | str) -> "PageCodec":
        """This codec on `device`."""
        flat, reduced, rope = self.bases.flat.to(device), self.bases.reduced, self.bases.rope
        bases = CodecBases(flat, None if reduced is None else reduced.to(device), None if rope is None else rope.to(device))
        return PageCodec(bases, None if self.scorer is None else self.scorer.to(device))

    def seal(self, entries: Entries, layout: PageLayout, queries: Tensor | None = None) -> Tensor:
        """(N, page_bytes) uint8: full pages in a coded format, heads merged first that have fewer entries there.

        Args:
            entries: rotated keys, with their positions if `layout` separates them.
            queries: (N, L x G, M, D) sample of queries to each page, softmax scale included; a page without one has zeros.
        """
        entries = Entries(finite(entries.keys), finite(entries.values), entries.bias, entries.positions)
        entries, observed = self.merged(entries, layout, queries)
        return seal_pages(entries, layout, self.bases, observed)

    def merged(
        self,
        entries: Entries,
        layout: PageLayout,
        queries: Tensor | None,
        merge: Callable[[Entries, Tensor, Sequence[int]], Entries] = merge_heads,
    ) -> tuple[Entries, Tensor]:
        """The entries that heads have in `layout`, and (N, L x G, E) the share of attention that the sample pays to each.

        Args:
            entries: finite; see `seal`.
            merge: what merges, as `merge_heads` does.
        """
        observed = observed_attention(entries, queries)
        if layout.is_merged:
            importance = attention_share(entries, observed) * entries.values.norm(dim=-1)
            if self.scorer is not None:
                importance = importance * self.scorer.correction(entries, observed)
            entries = merge(entries, importance, [head.entries for head in layout.heads])
            observed = observed_attention(entries, queries)
        return entries, observed

    def open(self, packed: Tensor, layout: PageLayout) -> Entries:
        """Entries of N pages (N, page_bytes) uint8, in the model's own basis, fp32; heads is L x G."""
        if not layout.is_plain:
            return open_pages(packed, layout, self.bases)
        g = layout.geometry
        pair = packed.view(g.dtype).view(-1, g.num_layers, 2, g.num_kv_heads, g.page_size, g.head_dim).float()
        return Entries(pair[:, :, 0].flatten(1, 2), pair[:, :, 1].flatten(1, 2), None)


def make_codec(
    geometry: PageGeometry,
    rotation: Rotation,
    classes: HeadClasses,
    orders: list[list[int]] | None = None,
    rope: Rope | None = None,
    scorer: Scorer | None = None,
) -> PageCodec:
    """The codec of a model.

    Args:
        classes: key classes of each of the L x G heads in each reduced format, format by format; empty for one that keeps
            the identity basis.
        orders: for each of the L x G heads its channels, the most important first; None: the slowest rotary pairs first.
        rope: how keys rotate, for formats that separate them from their positions.
        scorer: of these heads, for formats that merge.
    """
    if orders is None:
        orders = [rotation.prior_order(geometry.head_dim)] * (geometry.num_layers * geometry.num_kv_heads)
    orders = orders * (len(classes) // len(orders)) if classes else []
    reduced = reduced_bases(classes, orders, geometry.head_dim)
    return PageCodec(CodecBases(orthonormal_basis(geometry.head_dim), reduced, rope), scorer)
