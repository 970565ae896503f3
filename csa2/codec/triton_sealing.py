"""Re-encoding pages of an arena on a CUDA device: kernels open, merge and encode, torch scores in between.

A module of its own, because it imports Triton.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from csa2.codec.codec import PageCodec
from csa2.codec.merging import ROUNDING, entry_weight
from csa2.codec.queries import QuerySamples
from csa2.codec.sealing import Wave, alike, room_for
from sgl_kernels.page_codec.reference import Entries
from sgl_kernels.page_layout import PageLayout
from sgl_kernels.triton.codec import TritonPageCodec

WORKSPACE_BYTES = 1 << 28
"""Of the entries in fp32 that are re-encoded at a time; scoring and merging take a few times that."""


class TritonSealer:
    """A few launches for all layers and heads of the pages that go from one format to another."""

    def __init__(self, layouts: Sequence[PageLayout], codec: PageCodec, workspace_bytes: int = WORKSPACE_BYTES) -> None:
        """Build the tables.

        Args:
            codec: on the device.
            workspace_bytes: entries in fp32 at a time; one page at least.

        Raises:
            KernelLayoutError: see `TritonPageCodec`.
        """
        self._layouts, self._codec = tuple(layouts), codec
        self._kernels = TritonPageCodec(layouts, codec.bases)
        g = layouts[0].geometry
        page_bytes = g.num_layers * g.layer_elements * torch.float32.itemsize
        self._batch_pages = max(1, workspace_bytes // page_bytes)

    def seal(self, arena: Tensor, wave: Wave, samples: QuerySamples) -> dict[int, Tensor]:
        """See `Sealer.seal`; `wave` lies on the host, as the tables of the arena do.

        Raises:
            ValueError: a target is the plain format, or would need more entries than there are.
        """
        self._check(wave)
        readers, row = torch.unique(wave.reader, return_inverse=True)
        queries, device = samples.of(readers), arena.device
        packed = room_for(wave, self._layouts, device)
        for move in alike(wave, self._batch_pages):
            entries = self._kernels.open(arena, wave.offsets[move.rows].to(device), move.source)
            asked = None if queries is None else queries[row[move.rows].to(queries.device)].to(device)
            entries, weight = self._codec.merged(entries, self._layouts[move.target], asked, self._merge)
            packed[move.target][move.places.to(device)] = self._kernels.seal(entries, move.target, weight)
        return packed

    def _merge(self, entries: Entries, importance: Tensor, groups: Sequence[int]) -> Entries:
        """See `merge_heads`."""
        weight = entry_weight(importance)
        if entries.bias is not None:
            weight = weight.masked_fill(entries.bias == -math.inf, 0.0)  # padding
        return self._kernels.merge(entries, weight, groups, ROUNDING)

    def _check(self, wave: Wave) -> None:
        if bool((wave.target == 0).any()):
            raise ValueError("a page cannot be sealed to the plain format")
        for source, target in torch.unique(torch.stack((wave.source, wave.target), -1), dim=0).tolist():
            before, after = self._layouts[source], self._layouts[target]
            sizes = [head.entries for head in before.heads] or [before.entries] * len(after.heads)
            if any(head.entries > size for head, size in zip(after.heads, sizes, strict=True)):
                raise ValueError("a page cannot be sealed to a format in which a head has more entries than it has now")
