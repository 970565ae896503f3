"""Attention over compressed pages on CUDA devices: the kernels, bound to the layouts of one model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kernels.page_codec.reference import CodecBases
from sgl_kernels.page_layout import PageLayout
from sgl_kernels.triton.attend import attend_items
from sgl_kernels.triton.causal import attend_new
from sgl_kernels.triton.launch import STAGES, TYPES, is_wide, launch_options, padded
from sgl_kernels.triton.merge import merge_partials
from sgl_kernels.triton.pieces import TILE, FormatPieces, format_pieces
from sgl_kernels.triton.plan import BatchPlan, QueryBlocks
from sgl_kernels.triton.queries import LOG2_E, FoldedQueries
from sgl_kernels.triton.runs import RUN
from sgl_kernels.triton.write import write_rows


@dataclass(frozen=True)
class Partials:
    """Results over parts of what queries read, in the model's own basis, with their log-sum-exp."""

    out: Tensor
    """(parts, T, H, D) any float dtype."""
    lse: Tensor
    """(parts, T, H) fp32; minus infinity where a part had nothing."""
    base2: bool = True
    """Whether log-sum-exps are of base 2, as of FlashInfer and of these kernels, instead of natural."""


class TritonAttention:
    """Attention of new tokens over pages of mixed formats."""

    def __init__(
        self,
        layouts: Sequence[PageLayout],
        bases: CodecBases,
        operands: torch.dtype = torch.float16,
        plain_operands: torch.dtype | None = None,
    ) -> None:
        """Build the tables.

        Args:
            layouts: the formats in ladder order, the plain one first.
            bases: those with which pages are sealed, on the device.
            operands: type of the operands of matrix products with codes. On CUDA devices fp16, which holds all codes.
            plain_operands: the same with plain pages and new tokens; None is the dtype of the pages.

        Raises:
            KernelLayoutError: see `format_pieces`.
        """
        self._geometry = layouts[0].geometry
        self._bases = bases
        self._formats = format_pieces(layouts)
        self._tables = [f.table.to(bases.flat.device) for f in self._formats]
        self._operands = TYPES[operands]
        self._plain_operands = TYPES[plain_operands or self._geometry.dtype]

    @property
    def num_formats(self) -> int:
        """F: formats of the ladder."""
        return len(self._formats)

    def write_plain(self, arena: Tensor, rows: Tensor, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store new tokens in plain pages.

        Args:
            arena: (bytes,) uint8.
            rows: (T,) int64 from `reference.plain_rows`; negative: the token is not stored (padding of a CUDA graph).
            keys, values: (T, G, D) of the dtype of the pages, the heads of a token contiguous.
        """
        g = self._geometry
        head_rows = g.num_kv_heads * g.page_size
        write_rows[(rows.numel(), g.num_kv_heads)](
            keys, values, arena.view(g.dtype), rows, keys.stride(0), values.stride(0), layer * 2 * head_rows, g.page_size,
            head_rows, g.head_dim, padded(g.head_dim), num_warps=1,
        )  # fmt: skip

    def attend(
        self,
        query: Tensor,
        arena: Tensor,
        plan: BatchPlan,
        layer: int,
        scale: float,
        *,
        columns: int,
        others: Partials | None = None,
        formats: Sequence[int] | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attention over the pages of a plan, merged with other partial results.

        Args:
            query: (T, H, D) any float dtype, rotated.
            arena: (bytes,) uint8.
            columns: of a block; `plan` has blocks of `columns` // (H / G) tokens at most.
            others: partial results that join, as those of new tokens among themselves or of FlashInfer.
            formats: which formats to read, in ladder order, or None for all; the rest is someone else's.
            lse: (T, H) fp32, written with the log-sum-exp in base 2 when given.

        Returns:
            (T, H, D) in the dtype of `query`.
        """
        g = self._geometry
        tokens, heads, dim = query.shape
        chosen = tuple(range(self.num_formats)) if formats is None else tuple(formats)
        folded = FoldedQueries(query, scale, self._bases, layer * g.num_kv_heads, g.num_kv_heads)
        shape = (len(chosen), plan.blocks.owners.numel(), plan.splits, g.num_kv_heads, columns)
        out = torch.empty(*shape, dim, dtype=torch.float32, device=query.device)
        part_lse = torch.empty(shape, dtype=torch.float32, device=query.device)
        for place, index in enumerate(chosen):
            self._attend_format(index, folded, arena, plan, layer, out[place], part_lse[place], query)
        plain, coded = torch.empty(2, tokens, heads, dim, dtype=torch.float32, device=query.device)
        total = torch.empty(tokens, heads, dtype=torch.float32, device=query.device) if lse is None else lse
        if others is None:
            others = Partials(out[:0], part_lse[:0])
        merge_partials[(plan.blocks.owners.numel(), g.num_kv_heads, columns)](
            plan.blocks.spans, out, part_lse, others.out, others.lse, plain, coded, total,
            len(chosen), plan.blocks.owners.numel(), plan.splits, others.lse.shape[0], tokens, heads, int(0 in chosen),
            1.0 if others.base2 else LOG2_E, dim, padded(dim), heads // g.num_kv_heads, columns, num_warps=1,
        )  # fmt: skip
        merged = torch.addmm(plain.view(-1, dim), coded.view(-1, dim), self._bases.flat)
        return merged.view(query.shape).to(query.dtype)

    def _attend_format(
        self, index: int, folded: FoldedQueries, arena: Tensor, plan: BatchPlan, layer: int, out: Tensor, lse: Tensor,
        query: Tensor,
    ) -> None:  # fmt: skip
        """Partial results of one format."""
        of_format: FormatPieces = self._formats[index]
        basis = of_format.bases[layer]
        is_plain = of_format.pieces[0].basis == "plain"
        means = folded.flat() if basis == "flat" else folded.model()
        codes = folded.reduced(of_format.first_basis) if basis == "reduced" else means
        columns, heads = lse.shape[-1], query.shape[1]
        operands = self._plain_operands if is_plain else self._operands
        grid = (plan.items.shape[1] * plan.splits, self._geometry.num_kv_heads)
        notes = torch.empty(*grid, 2, RUN.value, columns, dtype=torch.float32, device=query.device)
        codes_max = torch.empty(*grid, RUN.value, dtype=torch.int32, device=query.device)
        attend_items[grid](
            arena, plan.pages, plan.lengths, plan.items[index], self._tables[index][layer], codes, means, notes,
            codes_max, out, lse, heads, of_format.pieces, heads // self._geometry.num_kv_heads, columns, operands,
            arena.is_cuda, STAGES, is_wide(columns),
            **launch_options(columns, query.device),
        )  # fmt: skip

    def attend_new(
        self, query: Tensor, keys: Tensor, values: Tensor, blocks: QueryBlocks, scale: float, columns: int
    ) -> Partials:
        """Causal attention of the new tokens of each request among themselves.

        Args:
            query: (T, H, D) contiguous; keys, values: (T, G, D), the heads of a token contiguous.
            columns: of a block.
        """
        g = self._geometry
        tokens, heads, dim = query.shape
        out = torch.empty(1, tokens, heads, dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(1, tokens, heads, dtype=torch.float32, device=query.device)
        attend_new[(blocks.owners.numel(), g.num_kv_heads)](
            query, keys, values, blocks.spans, out, lse, keys.stride(0), values.stride(0), heads, scale * LOG2_E,
            dim, padded(dim), heads // g.num_kv_heads, columns, TILE, self._plain_operands, STAGES, is_wide(columns),
            **launch_options(columns, query.device),
        )  # fmt: skip
        return Partials(out, lse)

    def extend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        arena: Tensor,
        plan: BatchPlan,
        layer: int,
        scale: float,
        *,
        columns: int,
        formats: Sequence[int] | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attention of new tokens over the pages before them and, causally, over themselves; see `attend`, `attend_new`."""
        new = self.attend_new(query, keys, values, plan.blocks, scale, columns)
        return self.attend(query, arena, plan, layer, scale, columns=columns, others=new, formats=formats, lse=lse)
