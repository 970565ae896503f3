"""Pages that break naive codecs, in every format, in a model with a flat and an identity layer."""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from sgl_kernels.basis import orthonormal_basis
from sgl_kernels.page_codec.reference import CodecBases, Entries, open_pages, seal_pages
from sgl_kernels.page_layout import (
    HeadLayout,
    KeyClass,
    PageGeometry,
    PageLayout,
    coded_layout,
    identity_head,
    reduced_layout,
)
from sgl_kernels.rope import Rope

CODED = {"fp8": ("e4m3", "e4m3"), "k8v4": ("e4m3", "e2m1"), "fp4": ("e2m1", "e2m1"), "int4": ("int4", "int4")}
REDUCED = {"csa2-2x": 1, "csa2-4x": 2, "csa2-8x": 4}
"""Tokens to an entry."""
BUDGETS = "fp4-budgets"
"""Four bits on average: heads in the flat basis with codes of their own."""
FORMATS = (*CODED, BUDGETS, *REDUCED)
EXACT_ZERO = ("fp8", "k8v4", "fp4", "int4")
"""Formats whose codes have a zero."""
DIMS = [32, 64, 80, 96, 100, 112, 128, 256]
PAGE_SIZES = [32, 64, 128]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FLAT, IDENTITY = 0, 1


def geometry(dim: int, heads: int = 1, dtype: torch.dtype = torch.bfloat16, size: int = 64) -> PageGeometry:
    """Two layers: layer 0 flat, layer 1 in the identity basis."""
    return PageGeometry(2, heads, dim, size, dtype, (IDENTITY,))


def classes_of(g: PageGeometry) -> tuple[tuple[KeyClass, ...], ...]:
    """Key classes of each head: in turn two kinds, one kind, and three that are no multiple of anything."""
    eighth = g.head_dim // 8
    kinds = (
        (KeyClass("int4", 3 * eighth), KeyClass("lloyd2", 3 * eighth)),
        (KeyClass("lloyd2", g.head_dim),),
        (KeyClass("e4m3", 1), KeyClass("e2m1", eighth + 1), KeyClass("lloyd2", 2 * eighth + 3)),
    )
    heads = range(g.num_layers * g.num_kv_heads)
    return tuple(() if h // g.num_kv_heads in g.identity_layers else kinds[h % 3] for h in heads)


def layout_of(name: str, g: PageGeometry, *, separated: bool = False) -> PageLayout:
    if name == UNEVEN:
        layout = uneven_layout(g)
    elif name == BUDGETS:
        layout = PageLayout(name, g, budgets_heads(g))
    elif name in CODED:
        layout = coded_layout(name, *CODED[name], g)
    else:
        layout = reduced_layout(name, classes_of(g), "lloyd2", REDUCED[name], g)
    return replace(layout, is_separated=separated)


def budgets_heads(g: PageGeometry) -> tuple[HeadLayout, ...]:
    """Flat heads, in turn with 8-bit keys, with 2-bit values, and with 8-bit values."""
    kinds = (("e4m3", "e2m1"), ("e2m1", "lloyd2"), ("int4", "e4m3"))
    flat = [coded_layout("head", *kind, g).heads[0] for kind in kinds]
    of_identity = identity_head("e2m1", "e2m1", g)
    heads = range(g.num_layers * g.num_kv_heads)
    return tuple(of_identity if h // g.num_kv_heads in g.identity_layers else flat[h % 3] for h in heads)


UNEVEN = "uneven"
"""Every head with a budget of its own: not in `FORMATS`, because heads come back with padding."""


def uneven_layout(g: PageGeometry) -> PageLayout:
    """Heads with all, half and a quarter of the entries, all channels or few, values of 2, 4 and 8 bits."""
    few, all_channels = (KeyClass("int4", g.head_dim // 4), KeyClass("lloyd2", g.head_dim // 4)), g.head_dim
    size, dim = g.page_size, g.head_dim
    kinds = (
        HeadLayout("reduced", size // 4, dim, few, "lloyd2", merged=True),
        HeadLayout("reduced", size, dim, (KeyClass("e4m3", all_channels),), "int4", merged=False),
        HeadLayout("reduced", size // 2, dim, (KeyClass("int4", all_channels),), "e4m3", merged=True),
    )
    identity = (
        identity_head("int4", "lloyd2", g),
        identity_head("int4", "lloyd2", g, 4),
        identity_head("e4m3", "int4", g, 2),
    )
    heads = range(g.num_layers * g.num_kv_heads)
    return PageLayout(
        UNEVEN, g, tuple((identity if h // g.num_kv_heads in g.identity_layers else kinds)[h % 3] for h in heads)
    )


def bases_of(g: PageGeometry, seed: int = 0) -> CodecBases:
    """The flat basis, and for the reduced formats any columns that are orthonormal, different in each head."""
    heads = g.num_layers * g.num_kv_heads
    random = torch.randn(heads, g.head_dim, g.head_dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return CodecBases(orthonormal_basis(g.head_dim), torch.linalg.qr(random).Q.float(), rope_of(g.head_dim))


@cache
def rope_of(dim: int) -> Rope:
    """A rotation of three quarters of the channels, in two halves, with the usual frequencies."""
    pairs = 3 * dim // 8
    return Rope(tuple((j, j + pairs) for j in range(pairs)), 10000.0 ** (-torch.arange(pairs).double() / pairs))


def positions_of(layout: PageLayout, n: int, first: int, seed: int = 0) -> Tensor | None:
    """(N, L x G, E) positions of pages that follow each other from `first` on; in merged ones those of some tokens, others
    in every head. None if `layout` stores none."""
    if not layout.is_separated:
        return None
    size, heads = layout.geometry.page_size, len(layout.heads)
    order = torch.rand(n, heads, size, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    slots = torch.zeros(n, heads, layout.entries, dtype=torch.int64)
    for index, head in enumerate(layout.heads):
        slots[:, index, : head.entries] = order[:, index, : head.entries].sort(-1).values
    return slots + first + size * torch.arange(n)[:, None, None]


def normal(layout: PageLayout, n: int, seed: int = 0) -> Tensor:
    """(N, L x G, E, D) fp32."""
    g = layout.geometry
    shape = (n, g.num_layers * g.num_kv_heads, layout.entries, g.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def biases(layout: PageLayout, n: int, seed: int = 0) -> Tensor | None:
    """(N, L x G, E) of a merged layout, sometimes more than it can hold."""
    if not layout.is_merged:
        return None
    shape = (n, len(layout.heads), layout.entries)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).square() * 17


def weights(layout: PageLayout, n: int, seed: int = 0) -> Tensor:
    """(N, L x G, E) attention of each entry, as uneven as softmax makes it; 0 in every third page, which has no sample."""
    shape = (n, len(layout.heads), layout.entries)
    weight = torch.softmax(3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)), -1)
    weight[2::3] = 0
    return weight


def entries_of(keys: Tensor, values: Tensor, layout: PageLayout) -> Entries:
    return Entries(keys, values, biases(layout, keys.shape[0]))


def hard_pages(layout: PageLayout, seed: int = 0) -> dict[str, Tensor]:
    """One page of each kind that breaks naive codecs, (L x G, E, D) in the model dtype."""
    base = normal(layout, 1, seed)[0]
    channel, token, both = base.clone(), base.clone(), base + 3
    channel[..., 3] *= 1000
    token[..., 5, :] *= 1000
    both[..., 7] += 40
    both[..., 6, :] *= 20
    pages = {
        "normal": base,
        "zeros": torch.zeros_like(base),
        "constant": base[..., :1, :].expand_as(base) * 5,
        "channel x1000": channel,
        "token x1000": token,
        "shifted, with outliers": both,
        "tiny": base * 1e-6,
        "large": base * 1e4,
        "one nonzero value": torch.zeros_like(base).index_fill_(-1, torch.tensor([4]), 2.5) * (base == base.max()),
    }
    return {name: page.to(layout.geometry.dtype) for name, page in pages.items()}


def hard_entries(layout: PageLayout, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values (N, L x G, E, D) of all hard pages, different ones beside each other."""
    keys, values = (torch.stack(list(hard_pages(layout, seed + i).values())) for i in (0, 1))
    return keys, values.roll(1, 0)


def in_layer(x: Tensor, layout: PageLayout, layer: int) -> Tensor:
    """(N, G, ...) of x (N, L x G, ...)."""
    g = layout.geometry.num_kv_heads
    return x[:, layer * g : (layer + 1) * g]


def sealed_and_opened(
    keys: Tensor, values: Tensor, layout: PageLayout, weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed bytes, then keys and values that came back, float64."""
    bases = bases_of(layout.geometry)
    packed = seal_pages(entries_of(keys, values, layout), layout, bases, weight)
    opened = open_pages(packed, layout, bases)
    return packed, opened.keys.double(), opened.values.double()
