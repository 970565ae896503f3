"""SGLang's own cache, holding what compressed pages would give back."""

from typing import Any

import torch
from codec_bounds import open_by_the_letter
from torch import Tensor

from csa2.codec.codec import make_codec
from csa2.formats import make_ladder
from csa2.options import PAGE_SIZE
from sgl_kernels.page_codec.reference import Entries
from sgl_kernels.page_layout import PageGeometry
from sglang_csa2.model import rotation_of


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
        rotation = rotation_of(scheduler.tp_worker.model_runner.model, self.pool.head_dim)
        self.codec, classes = make_codec(geometry, rotation)
        # Merged pages have fewer entries than the rows of SGLang's cache.
        self.layouts = {layout.name: layout for layout in make_ladder(geometry, "fp4", "csa2-2x", "fp8", classes).layouts}
        self.done: set[int] = set()

    def rewrite(self, pages: Tensor, formats: list[str]) -> None:
        """Replace keys and values of those `pages` that are coded in `formats` and were not yet."""
        for page, name in zip(pages.tolist(), formats, strict=True):
            layout = self.layouts[name]
            if layout.is_plain or page in self.done:
                continue
            self.done.add(page)
            rows = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
            keys = torch.cat([k[rows].transpose(0, 1) for k in self.pool.k_buffer])[None]
            values = torch.cat([v[rows].transpose(0, 1) for v in self.pool.v_buffer])[None]
            opened = open_by_the_letter(self.codec.seal(Entries(keys, values, None), layout), layout, self.codec.bases)
            for buffers, entries in ((self.pool.k_buffer, opened.keys), (self.pool.v_buffer, opened.values)):
                for buffer, heads in zip(buffers, entries[0].split(self.pool.head_num), strict=True):
                    buffer[rows] = heads.transpose(0, 1).to(buffer.dtype)

    def forget_freed(self, scheduler: Any) -> None:
        """A page that changes hands is plain again."""
        self.done.difference_update(scheduler.token_to_kv_pool_allocator.get_all_free_pages().tolist())
