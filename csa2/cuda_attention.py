"""Attention over the pages of a store by Triton kernels, on a CUDA device or in Triton's interpreter.

Page table and facts stay on the host, where every decision is made. So a plan is made there too, and goes to the device once
a forward pass; all layers share it. Sealing is that of the torch codec, on the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from csa2.attention import Write
from csa2.store import PageStore
from sgl_kernels.page_layout import PageLayout
from sgl_kernels.triton.attention import TritonAttention
from sgl_kernels.triton.launch import EXTEND_COLUMNS, decode_columns
from sgl_kernels.triton.plan import BatchPlan, check_mapped, plan_batch, query_blocks, split_count

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
        """Bind the kernels to a store.

        Args:
            query_heads: H of every layer, a multiple of the KV heads.

        Raises:
            KernelLayoutError: see `format_pieces`.
        """
        self.store = store
        geometry = store.ladder.geometry
        self._device = store.arena.buffer.device
        self._group = query_heads // geometry.num_kv_heads
        # The interpreter computes bfloat16 wrongly, and half precision no faster.
        operands, plain = (torch.float16, None) if self._device.type == "cuda" else (torch.float32, torch.float32)
        self.kernels = TritonAttention(store.ladder.layouts, store.codec.bases, operands, plain)
        self.write: Write = self._write
        self._multiprocessors = INTERPRETER_MULTIPROCESSORS
        if self._device.type == "cuda":
            self._multiprocessors = torch.cuda.get_device_properties(self._device).multi_processor_count

    def _write(self, arena: Tensor, rows: Tensor, layout: PageLayout, layer: int, keys: Tensor, values: Tensor) -> None:
        self.kernels.write_plain(arena, rows, layer, keys, values)

    def plan(self, pages: Tensor, lengths: Tensor, new: Tensor) -> CudaPlan:
        """See `Attention.plan`. All arguments are on the host."""
        arena, geometry = self.store.arena, self.store.ladder.geometry
        # One new token each: read with the others from its page, where it is written already.
        reads_new = bool((new > 1).any())
        columns = EXTEND_COLUMNS if reads_new else decode_columns(self._group)
        before = lengths - new if reads_new else lengths
        check_mapped(pages, before, arena.formats, geometry.page_size)
        blocks = query_blocks(new.tolist(), columns // self._group, torch.device("cpu"))
        programs = blocks.owners.numel() * geometry.num_kv_heads
        planned = plan_batch(
            pages, before, arena.formats, arena.offsets, blocks,
            num_formats=len(self.store.ladder.layouts), page_size=geometry.page_size,
            splits=split_count(programs, pages.shape[1], self._multiprocessors),
        )  # fmt: skip
        return CudaPlan(planned.to(self._device), columns, reads_new)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, plan: CudaPlan, layer: int, scale: float) -> Tensor:
        """See `Attention.attend`."""
        arena = self.store.arena.buffer
        if not plan.reads_new:
            return self.kernels.attend(query, arena, plan.batch, layer, scale, columns=plan.columns)
        return self.kernels.extend(
            query.contiguous(), keys, values, arena, plan.batch, layer, scale, columns=plan.columns
        )  # fmt: skip
