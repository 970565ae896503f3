"""Attention over the pages of a store by Triton kernels, on a CUDA device or in Triton's interpreter.

Page table and facts stay on the host, where every decision is made. So a plan is made there too, and goes to the device once
a forward pass; all layers share it. Kernels seal pages too.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from csa2.attention import Write
from csa2.codec.triton_sealing import TritonSealer
from csa2.errors import OptionError
from csa2.store import PageStore
from csa2.units import format_bytes
from sgl_kernels.page_layout import PageLayout
from sgl_kernels.triton.attention import TritonAttention
from sgl_kernels.triton.launch import EXTEND_COLUMNS, decode_columns
from sgl_kernels.triton.plan import MAX_ARENA_BYTES, BatchPlan, check_mapped, plan_batch, query_blocks, split_count

INTERPRETER_MULTIPROCESSORS = 1
"""What the interpreter counts as: it runs one program after the other, so splitting gains nothing."""


@dataclass(frozen=True)
class CudaPlan:
    """What one forward pass reads, on the device."""

    batch: BatchPlan
    columns: int
    """Of a block of queries."""
    reads_new: bool
    """Whether new tokens are read beside the pages, not from them."""


class CudaAttention:
    """Triton kernels: a launch for each format of the ladder and one that merges, for the whole batch."""

    def __init__(self, store: PageStore, query_heads: int) -> None:
        """Bind the kernels to a store, whose pages they seal from then on.

        Args:
            query_heads: H of every layer, a multiple of the KV heads.

        Raises:
            KernelLayoutError: see `format_pieces`.
            OptionError: the arena is larger than places of pages can say.
        """
        if store.arena.buffer.numel() > MAX_ARENA_BYTES:
            raise OptionError(
                f"--csa2-impl cuda reads arenas of less than {format_bytes(MAX_ARENA_BYTES)}, and this one has "
                f"{format_bytes(store.arena.buffer.numel())}: give a smaller --csa2-arena-size, 120GiB for example"
            )
        self.store = store
        geometry = store.ladder.geometry
        self._device = store.arena.buffer.device
        self._group = query_heads // geometry.num_kv_heads
        # The interpreter computes bfloat16 wrongly, and half precision no faster.
        operands, plain = (torch.float16, None) if self._device.type == "cuda" else (torch.float32, torch.float32)
        self.kernels = TritonAttention(store.ladder.layouts, store.codec.bases, operands, plain)
        store.seal_with(TritonSealer(store.ladder.layouts, store.codec))
        self.write: Write = self._write
        self._multiprocessors = INTERPRETER_MULTIPROCESSORS
        if self._device.type == "cuda":
            self._multiprocessors = torch.cuda.get_device_properties(self._device).multi_processor_count

    def _write(self, arena: Tensor, rows: Tensor, layout: PageLayout, layer: int, keys: Tensor, values: Tensor) -> None:
        self.kernels.write_plain(arena, rows, layer, keys, values)

    def plan(self, pages: Tensor, lengths: Tensor, new: Tensor) -> CudaPlan:
        """See `Attention.plan`. All arguments are on the host."""
        # One new token each: read with the others from its page, where it is written already.
        reads_new = bool((new > 1).any())
        columns = EXTEND_COLUMNS if reads_new else decode_columns(self._group)
        before = lengths - new if reads_new else lengths
        planned = self._planned(pages, before, new.tolist(), columns, self._splits(new.numel(), pages.shape[1]))
        return CudaPlan(planned.to(self._device), columns, reads_new)

    def capture_plan(self, batch: int, depth: int) -> CudaPlan:
        """A plan of fixed shape and addresses for a CUDA graph: one new token for each of `batch` requests, which read
        nothing until `refill`.

        Args:
            depth: pages of the longest request to come.
        """
        no_pages = torch.zeros(batch, 1, dtype=torch.int64)
        nothing = torch.zeros(batch, dtype=torch.int64)
        columns = decode_columns(self._group)
        empty = self._planned(no_pages, nothing, [1] * batch, columns, self._splits(batch, depth)).to(self._device)
        pages, lengths = torch.zeros(2, batch * depth, dtype=torch.int32, device=self._device)
        return CudaPlan(replace(empty, pages=pages, lengths=lengths), columns, reads_new=False)

    def refill(self, plan: CudaPlan, pages: Tensor, lengths: Tensor) -> None:
        """Let a plan of `capture_plan` read `lengths` (B,) tokens in `pages` (B, P), both on the host; 0 are nothing."""
        held = plan.batch
        batch = held.items.shape[1]
        now = self._planned(pages, lengths, [1] * batch, plan.columns, held.splits)
        held.pages[: now.pages.numel()].copy_(now.pages)
        held.lengths[: now.lengths.numel()].copy_(now.lengths)
        held.items.copy_(now.items)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, plan: CudaPlan, layer: int, scale: float) -> Tensor:
        """See `Attention.attend`."""
        arena = self.store.arena.buffer
        if not plan.reads_new:
            return self.kernels.attend(query, arena, plan.batch, layer, scale, columns=plan.columns)
        return self.kernels.extend(query.contiguous(), keys, values, arena, plan.batch, layer, scale, columns=plan.columns)

    def _splits(self, batch: int, depth: int) -> int:
        return split_count(batch * self.store.ladder.geometry.num_kv_heads, depth, self._multiprocessors)

    def _planned(self, pages: Tensor, lengths: Tensor, new: list[int], columns: int, splits: int) -> BatchPlan:
        """A plan on the host."""
        arena, page_size = self.store.arena, self.store.page_size
        check_mapped(pages, lengths, arena.formats, page_size)
        blocks = query_blocks(new, columns // self._group, torch.device("cpu"))
        formats = len(self.store.ladder.layouts)
        return plan_batch(
            pages, lengths, arena.formats, arena.offsets, blocks, num_formats=formats, page_size=page_size, splits=splits
        )
