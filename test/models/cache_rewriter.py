"""SGLang's own cache, holding what compressed pages would give back."""

from typing import Any

import torch
from codec_bounds import open_by_the_letter
from torch import Tensor

from csa2.formats import make_ladder
from csa2.options import PAGE_SIZE
from sgl_kernels.basis import orthonormal_basis
from sgl_kernels.page_codec.reference import seal_pages
from sgl_kernels.page_layout import PageGeometry


class CacheRewriter:
    """Puts into SGLang's own cache what the codec makes of its pages. The decoder is the one of `codec_bounds`."""

    def __init__(self, scheduler: Any, identity_layers: tuple[int, ...]) -> None:
        self.pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        geometry = PageGeometry(
            self.pool.layer_num,
            self.pool.head_num,
            self.pool.head_dim,
            PAGE_SIZE,
            self.pool.dtype,
            identity_layers,
        )
        self.layouts = {layout.name: layout for layout in make_ladder(geometry, "fp4").layouts}
        self.basis = orthonormal_basis(self.pool.head_dim)
        self.done: set[int] = set()

    def rewrite(self, pages: Tensor, formats: list[str]) -> None:
        """Replace keys and values of those `pages` that are coded in `formats` and were not yet."""
        for page, name in zip(pages.tolist(), formats, strict=True):
            layout = self.layouts[name]
            if layout.is_plain or page in self.done:
                continue
            self.done.add(page)
            rows = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
            keys = torch.stack([k[rows].transpose(0, 1) for k in self.pool.k_buffer])[None]
            values = torch.stack([v[rows].transpose(0, 1) for v in self.pool.v_buffer])[None]
            keys, values = open_by_the_letter(seal_pages(keys, values, layout, self.basis), layout, self.basis)
            for layer, (k, v) in enumerate(zip(self.pool.k_buffer, self.pool.v_buffer, strict=True)):
                k[rows] = keys[0, layer].transpose(0, 1).to(k.dtype)
                v[rows] = values[0, layer].transpose(0, 1).to(v.dtype)

    def forget_freed(self, scheduler: Any) -> None:
        """A page that changes hands is plain again."""
        self.done.difference_update(scheduler.token_to_kv_pool_allocator.get_all_free_pages().tolist())
