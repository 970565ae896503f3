"""Opening and sealing pages on CUDA devices: the kernels, bound to the layouts of one model."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_kernels.page_codec.reference import CodecBases, Entries
from sgl_kernels.page_layout import PageLayout
from sgl_kernels.triton.groups import merge_groups
from sgl_kernels.triton.launch import padded
from sgl_kernels.triton.open import open_keys, open_plain, open_values
from sgl_kernels.triton.seal import seal_keys, seal_values
from sgl_kernels.triton.stored import HeadGroup, check_layout, head_groups, launch_options


class TritonPageCodec:
    """What `page_codec.reference` does with pages of any format, two kernels for each layout of heads and N pages."""

    def __init__(self, layouts: Sequence[PageLayout], bases: CodecBases) -> None:
        """Build the tables.

        Args:
            layouts: the formats in ladder order, the plain one first.
            bases: on the device.

        Raises:
            KernelLayoutError: see `stored.check_layout`.
        """
        self._layouts = tuple(layouts)
        self._flat = bases.flat.float().contiguous()
        self._reduced = self._flat[None] if bases.reduced is None else bases.reduced.float().contiguous()
        for layout in layouts:
            check_layout(layout)
        self._groups = [() if layout.is_plain else head_groups(layout, self._flat.device) for layout in layouts]

    def open(self, arena: Tensor, offsets: Tensor, index: int) -> Entries:
        """Entries of N pages of format `index`, fp32, finite, in the model's own basis; heads is L x G.

        Args:
            arena: (bytes,) uint8.
            offsets: (N,) int64 bytes of the pages.
        """
        layout = self._layouts[index]
        if layout.is_plain:
            return self._open_plain(arena, offsets)
        g, n = layout.geometry, offsets.numel()
        heads, most = len(layout.heads), layout.entries
        is_even = all(head.entries == most for head in layout.heads)
        new = torch.empty if is_even else torch.zeros
        keys, values = new(2, n, heads, most, g.head_dim, dtype=torch.float32, device=arena.device)
        bias = torch.full((n, heads, most), -math.inf, dtype=torch.float32, device=arena.device)
        reduced = self._reduced
        for group in self._groups[index]:
            grid, options = _launch(group, n)
            open_keys[grid](
                arena, offsets, group.table, self._flat, reduced, keys, bias, heads, most, reduced.shape[-1], group.piece,
                **options,
            )  # fmt: skip
            open_values[grid](
                arena, offsets, group.table, self._flat, values, heads, most, group.piece, **options
            )  # fmt: skip
        return Entries(keys, values, bias if layout.is_merged or not is_even else None)

    def seal(self, entries: Entries, index: int, weight: Tensor) -> Tensor:
        """(N, page_bytes) uint8: `reference.seal_pages` to format `index`, which is coded.

        Args:
            entries: keys and values (N, L x G, E, D) fp32, finite.
            weight: (N, L x G, E) fp32 share of attention of each entry, 0 for a page without a sample.

        Raises:
            ValueError: the format is merged and entries have no bias.
        """
        layout = self._layouts[index]
        if layout.is_merged and entries.bias is None:
            raise ValueError("a merged layout needs the bias of its entries")
        keys, values, weight = (x.float().contiguous() for x in (entries.keys, entries.values, weight))
        bias = weight if entries.bias is None else entries.bias.float().contiguous()
        n, heads, most = keys.shape[:3]
        # What no kernel writes is 0: lanes that have no entry, and padding.
        packed = torch.zeros(n, layout.page_bytes, dtype=torch.uint8, device=keys.device)
        reduced = self._reduced
        for group in self._groups[index]:
            grid, options = _launch(group, n)
            seal_keys[grid](
                keys, weight, packed, group.table, self._flat, reduced, heads, most, layout.page_bytes, reduced.shape[-1],
                group.piece, **options,
            )  # fmt: skip
            seal_values[grid](
                values, bias, weight, packed, group.table, self._flat, heads, most, layout.page_bytes, group.piece,
                **options,
            )  # fmt: skip
        return packed

    def merge(self, entries: Entries, weight: Tensor, groups: Sequence[int], rounding: float) -> Entries:
        """Entries of each head merged into its own number of groups, by the `MergeRule` of `page_codec.cpu`.

        Args:
            entries: keys and values (N, L x G, E, D) fp32, finite.
            weight: (N, L x G, E) fp32, the w of that rule: positive, 0 where there is no entry.
            groups: of each head, E at most; heads with fewer than others end with padding.
            rounding: variance over mean square below which keys or values count as equal.
        """
        keys, values, weight = (x.float().contiguous() for x in (entries.keys, entries.values, weight))
        bias = weight if entries.bias is None else entries.bias.float().contiguous()
        n, heads, size, dim = keys.shape
        most = max(groups)
        out_keys, out_values = keys.new_zeros(2, n, heads, most, dim)
        out_bias = keys.new_full((n, heads, most), -math.inf)
        for count in sorted(set(groups)):
            chosen = torch.tensor([head for head, own in enumerate(groups) if own == count], device=keys.device)
            if count == size:
                out_keys[:, chosen], out_values[:, chosen] = keys[:, chosen], values[:, chosen]
                out_bias[:, chosen] = 0.0 if entries.bias is None else bias[:, chosen]
                continue
            pivots = torch.topk(weight[:, chosen], count, dim=-1).indices.sort(-1).values
            merge_groups[(n, chosen.numel())](
                keys, values, bias, weight, pivots, chosen, out_keys, out_values, out_bias, heads, most, rounding,
                entries.bias is not None, size, count, dim, **launch_options(size, max(count, padded(dim) // 2)),
            )  # fmt: skip
        return Entries(out_keys, out_values, out_bias)

    def _open_plain(self, arena: Tensor, offsets: Tensor) -> Entries:
        g, n = self._layouts[0].geometry, offsets.numel()
        heads = g.num_layers * g.num_kv_heads
        out = torch.empty(2, n, heads, g.page_size, g.head_dim, dtype=torch.float32, device=arena.device)
        open_plain[(n, heads, 2)](
            arena.view(g.dtype), offsets, out, g.dtype.itemsize, g.num_kv_heads, g.head_dim, padded(g.head_dim), g.page_size,
            **launch_options(g.page_size, g.head_dim),
        )  # fmt: skip
        return Entries(out[0], out[1], None)


def _launch(group: HeadGroup, pages: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and options of the kernels of a group of heads."""
    return (pages, group.table.shape[0]), launch_options(group.piece.entries, group.piece.dim)
