"""Pages that break naive codecs, in a model with a flat and an identity layer."""

import torch
from torch import Tensor

from sgl_kernels.basis import orthonormal_basis
from sgl_kernels.page_codec.reference import open_pages, seal_pages
from sgl_kernels.page_layout import PageGeometry, PageLayout, coded_layout

FORMATS = {"fp8": "e4m3", "fp4": "e2m1", "int4": "int4"}
DIMS = [32, 64, 80, 96, 100, 112, 128, 256]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FLAT, IDENTITY = 0, 1


def geometry(dim: int, heads: int = 1, dtype: torch.dtype = torch.bfloat16) -> PageGeometry:
    """Two layers: layer 0 flat, layer 1 in the identity basis."""
    return PageGeometry(2, heads, dim, 64, dtype, (IDENTITY,))


def layout_of(name: str, g: PageGeometry) -> PageLayout:
    return coded_layout(name, FORMATS[name], g)


def normal(g: PageGeometry, n: int, seed: int = 0) -> Tensor:
    shape = (n, g.num_layers, g.num_kv_heads, g.page_size, g.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hard_pages(g: PageGeometry, seed: int = 0) -> dict[str, Tensor]:
    """One page of each kind that breaks naive codecs, (L, G, S, D) in the model dtype."""
    base = normal(g, 1, seed)[0]
    channel, token, both = base.clone(), base.clone(), base + 3
    channel[..., 3] *= 1000
    token[..., 5, :] *= 1000
    both[..., 7] += 40
    both[..., 9, :] *= 20
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
    return {name: page.to(g.dtype) for name, page in pages.items()}


def sealed_and_opened(keys: Tensor, values: Tensor, layout: PageLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Packed bytes, then keys and values that came back, float64."""
    basis = orthonormal_basis(layout.geometry.head_dim)
    packed = seal_pages(keys, values, layout, basis)
    k, v = open_pages(packed, layout, basis)
    return packed, k.double(), v.double()
