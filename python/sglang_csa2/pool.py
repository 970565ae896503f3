"""The KV pool: SGLang's virtual token slots in front of the page store.

UPSTREAM(sglang 0.5.23): subclass of `MHATokenToKVPool`. Nothing reads rows by slot: pages are found through the page
table, so the buffer getters refuse.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, unwrap_write_loc
from torch import Tensor

from csa2.errors import IntegrityError
from csa2.formats import PLAIN
from csa2.store import PageStore
from sgl_kernels.page_layout import PageLayout
from sgl_kernels.paged_attention.reference import plain_rows, write_plain


class Csa2KVPool(MHATokenToKVPool):
    """KV pool whose slots are virtual; `store` has the bytes."""

    store: PageStore

    def _create_buffers(self) -> None:
        from sglang_csa2.args import options_here
        from sglang_csa2.memory import planned_pool

        plan = planned_pool()
        geometry = plan.ladder.geometry
        built = (self.layer_num, self.head_num, self.head_dim, self.page_size, self.dtype)
        planned = (
            geometry.num_layers,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.page_size,
            geometry.dtype,
        )
        if built != planned:
            raise IntegrityError(f"csa2: SGLang builds a pool of {built} where {planned} was planned")
        self.k_buffer: list[Tensor] = []
        self.v_buffer: list[Tensor] = []
        self.store = PageStore(plan.ladder, plan.arena, self.size // self.page_size + 1, plan.codec, self.device)
        self.store.protected_pages = -(-options_here().protect_tokens // self.page_size)
        self._written: Tensor | None = None
        self._rows: Tensor | None = None
        self._write: Callable[[Tensor, Tensor, PageLayout, int, Tensor, Tensor], None] = write_plain

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of the arena; halves, because a page holds keys and values together."""
        total = self.store.arena.buffer.numel()
        return total // 2, total - total // 2

    def begin_forward(self, out_cache_loc: Tensor, positions: Tensor) -> None:
        """Announce the slots (T,) that this forward pass writes in every layer, and the positions (T,) of their tokens."""
        self.write_to(out_cache_loc, self.rows_for(out_cache_loc, positions))

    def rows_for(self, out_cache_loc: Tensor, positions: Tensor) -> Tensor:
        """(T,) int64 rows of plain pages where the slots (T,) lie, which are noted as written in this forward pass."""
        slots = out_cache_loc.long().cpu()
        self.store.record_writes(slots, positions.long().cpu() if self.store.ladder.is_separated else None)
        return self._rows_of(slots).to(out_cache_loc.device)

    def write_to(self, out_cache_loc: Tensor, rows: Tensor) -> None:
        """Let `rows` stand for the slots `out_cache_loc` whenever keys are stored, until the next call."""
        self._written = out_cache_loc
        self._rows = rows

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: Tensor,
        cache_v: Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
        layer_id_override: int | None = None,
        dcp_kv_mask: Tensor | None = None,
    ) -> None:
        """Store keys and values (T, G, D) of one layer at the slots announced by `begin_forward` or `write_to`."""
        loc = unwrap_write_loc(loc_info)[0]
        if self._written is None or self._rows is None or loc.data_ptr() != self._written.data_ptr():
            raise IntegrityError("csa2: keys are written to slots that this forward pass did not announce")
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        arena = self.store.arena.buffer
        layout = self.store.ladder.layouts[PLAIN]
        if cache_k.dim() != 3:
            shape = (-1, self.head_num, self.head_dim)
            cache_k, cache_v = cache_k.view(shape), cache_v.view(shape)
        self._write(arena, self._rows, layout, layer_id - self.start_layer, cache_k, cache_v)

    def write_with(self, write: Callable[[Tensor, Tensor, PageLayout, int, Tensor, Tensor], None]) -> None:
        """Let `write`, which does the same as `reference.write_plain`, store new tokens from now on."""
        self._write = write

    def _rows_of(self, slots: Tensor) -> Tensor:
        offsets = self.store.arena.offsets[slots // self.page_size]
        return plain_rows(offsets, slots % self.page_size, self.store.ladder.layouts[PLAIN])

    def get_key_buffer(self, layer_id: int) -> NoReturn:
        """Refused: compressed pages have no rows."""
        self._no_rows()

    def get_value_buffer(self, layer_id: int) -> NoReturn:
        """Refused: compressed pages have no rows."""
        self._no_rows()

    def get_kv_buffer(self, layer_id: int) -> NoReturn:
        """Refused: compressed pages have no rows."""
        self._no_rows()

    def get_contiguous_buf_infos(self) -> NoReturn:
        """Refused: there is no slot-row buffer to hand to another server."""
        self._no_rows()

    def get_device_pool_infos(self) -> NoReturn:
        """Refused: there is no slot-row buffer to copy to the host."""
        self._no_rows()

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> NoReturn:
        """Refused: slots of a compressed page cannot move alone."""
        self._no_rows()

    def get_cpu_copy(self, indices: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: compressed slots cannot be copied one by one."""
        self._no_rows()

    def load_cpu_copy(self, kv_cache_cpu: Any, indices: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: compressed slots cannot be copied one by one."""
        self._no_rows()

    def _no_rows(self) -> NoReturn:
        raise IntegrityError(
            "csa2: something asks for KV rows by token slot, but compressed pages are read through the page table only. "
            "Serve without --kv-compress, and report it with the output of `csa2 info`"
        )


def store_of(scheduler: Any) -> PageStore:
    """The page store of a scheduler whose cache is compressed."""
    store: PageStore = scheduler.token_to_kv_pool_allocator.get_kvcache().store
    return store


def pages_of(slots: Tensor, page_size: int) -> Tensor:
    """Virtual pages of which `slots` (T,) are the first slots."""
    return host_pages(slots[slots % page_size == 0], page_size)


def host_pages(slots: Tensor, page_size: int) -> Tensor:
    """int64 virtual pages of `slots`, on the host, where the page table and the facts are whatever device computes."""
    return torch.div(slots.long(), page_size, rounding_mode="floor").cpu()
