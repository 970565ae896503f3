"""Re-encoding pages of an arena: the torch codec, page by page, and compiled code that does the same in one call."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from csa2.codec.codec import PageCodec
from csa2.codec.importance import EQUAL_SIZES
from csa2.codec.merging import ROUNDING, WEIGHT_FLOOR
from csa2.codec.queries import QuerySamples
from csa2.codec.scorer import LIMIT, SHARE_FLOOR, SIZE_FLOOR
from sgl_kernels.page_codec.cpu import NO_CORRECTION, CpuSealer, MergeRule, ScoreCorrection
from sgl_kernels.page_codec.reference import Entries
from sgl_kernels.page_layout import PageLayout

CODEC_BATCH_PAGES = 8
"""Pages that the torch codec encodes at a time: bounds its fp32 workspace whatever the prompt length."""


@dataclass(frozen=True)
class Wave:
    """Full pages that are re-encoded together; N of them, (N,) int64 each."""

    source: Tensor
    """Format of each page, an index into the layouts."""
    offsets: Tensor
    """Its byte offset in the arena."""
    target: Tensor
    """The smaller format that it gets."""
    reader: Tensor
    """Whose queries weight its entries, see `QuerySamples.readers`."""
    position: Tensor | None = None
    """Of its first token; needed where the layouts separate keys from positions."""


def standing_from(entries: Entries, first: Tensor) -> Entries:
    """Entries of N uncompressed pages whose first tokens stand at positions `first` (N,), on the host."""
    slots = torch.arange(entries.keys.shape[-2])
    positions = (first[:, None] + slots)[:, None].to(entries.keys.device)
    return replace(entries, positions=positions.expand(entries.keys.shape[:-1]))


class Sealer(Protocol):
    """One implementation, bound to the layouts of one model."""

    def seal(self, arena: Tensor, wave: Wave, samples: QuerySamples) -> dict[int, Tensor]:
        """For each target format (n, page_bytes) uint8: its pages as `PageCodec.seal` makes them, in the order of the wave.

        Args:
            arena: (bytes,) uint8, unchanged.
        """


class ReferenceSealer:
    """The torch codec."""

    def __init__(self, layouts: Sequence[PageLayout], codec: PageCodec) -> None:
        self._layouts, self._codec = layouts, codec

    def seal(self, arena: Tensor, wave: Wave, samples: QuerySamples) -> dict[int, Tensor]:
        """See `Sealer.seal`."""
        packed = room_for(wave, self._layouts, arena.device)
        for move in alike(wave, CODEC_BATCH_PAGES):
            size = self._layouts[move.source].page_bytes
            data = torch.stack([arena[at : at + size] for at in wave.offsets[move.rows].tolist()])
            entries = self._codec.open(data, self._layouts[move.source])
            if wave.position is not None and entries.positions is None:
                entries = standing_from(entries, wave.position[move.rows])
            sealed = self._codec.seal(entries, self._layouts[move.target], samples.of(wave.reader[move.rows]))
            packed[move.target][move.places] = sealed
        return packed


@dataclass(frozen=True)
class Moves:
    """Pages of a wave that go from one format to another."""

    source: int
    target: int
    rows: Tensor
    """Which pages of the wave."""
    places: Tensor
    """The same among those of the wave with this target."""


def alike(wave: Wave, batch_pages: int) -> Iterator[Moves]:
    """All pages of the wave, at most so many at a time."""
    for target in torch.unique(wave.target).tolist():
        to_here = torch.nonzero(wave.target == target).squeeze(-1)
        for source in torch.unique(wave.source[to_here]).tolist():
            places = torch.nonzero(wave.source[to_here] == source).squeeze(-1)
            for batch in torch.split(places, batch_pages):
                yield Moves(source, target, to_here[batch], batch)


def room_for(wave: Wave, layouts: Sequence[PageLayout], device: torch.device) -> dict[int, Tensor]:
    """For each target format (n, page_bytes) uint8, not yet written."""
    counts = torch.bincount(wave.target, minlength=len(layouts)).tolist()
    sizes = {index: (count, layouts[index].page_bytes) for index, count in enumerate(counts) if count}
    return {index: torch.empty(size, dtype=torch.uint8, device=device) for index, size in sizes.items()}


class CompiledSealer:
    """One call of compiled code for the whole wave."""

    def __init__(self, layouts: Sequence[PageLayout], codec: PageCodec, isa: str | None = None) -> None:
        """Raises KernelBuildError or InstructionSetError: see `sgl_kernels.cpu.build.load`."""
        scorer, correction = codec.scorer, NO_CORRECTION
        if scorer is not None:
            correction = ScoreCorrection(scorer.weights, scorer.offsets, scorer.outer, SHARE_FLOOR, SIZE_FLOOR, LIMIT)
        self._kernel = CpuSealer(layouts, codec.bases, MergeRule(WEIGHT_FLOOR, EQUAL_SIZES, ROUNDING), isa, correction)

    def seal(self, arena: Tensor, wave: Wave, samples: QuerySamples) -> dict[int, Tensor]:
        """See `Sealer.seal`."""
        readers, row = torch.unique(wave.reader, return_inverse=True)
        queries = samples.of(readers)
        row = torch.full_like(row, -1) if queries is None else torch.where(queries.flatten(1).any(-1)[row], row, -1)
        return self._kernel.seal(arena, wave.source, wave.offsets, wave.target, queries, row)
