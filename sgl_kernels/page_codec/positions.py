"""Positions of separated pages: in bytes and back. See `page_layout` for where they lie."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_kernels.page_layout import POSITION_BYTES, HeadLayout, PageLayout


def put_positions(packed: Tensor, layout: PageLayout, positions: Tensor) -> None:
    """Write `positions` (N, L x G, E) int64, of one page each, into pages (N, page_bytes) uint8.

    Raises:
        ValueError: they are not those of one page, or entries that are not merged are not all there and in order.
    """
    size, held = layout.geometry.page_size, _held(layout.heads, positions.device)
    positions = positions[..., : layout.entries]
    of_entries = positions[:, held]
    first = of_entries.amin(-1) // size * size
    offsets = of_entries - first[:, None]
    if bool((first < 0).any()) or bool((first > torch.iinfo(torch.int32).max - size).any()):
        raise ValueError(f"positions from {int(first.min())} to {int(first.max())} do not fit into 31 bits")
    in_order = layout.is_merged or torch.equal(offsets, _in_order(layout.heads, positions.device).expand_as(offsets))
    if bool((offsets >= size).any()) or not in_order:
        raise ValueError(
            f"the positions of a page are not those of {size} tokens in order that start at a multiple of {size}"
        )
    start = layout.piece_offsets[-1]
    packed[:, start : start + POSITION_BYTES] = first.to(torch.int32).unsqueeze(-1).contiguous().view(torch.uint8)
    if layout.is_merged:
        packed[:, start + POSITION_BYTES : start + layout.position_bytes] = offsets.to(torch.uint8)


def take_positions(packed: Tensor, layout: PageLayout) -> Tensor:
    """(N, L x G, E) int64 positions of the entries of separated pages (N, page_bytes) uint8; where a head has fewer, that of
    the first token."""
    start = layout.piece_offsets[-1]
    return _decoded(packed[:, start : start + layout.position_bytes], layout.heads, stored=layout.is_merged)


def gather_positions(arena: Tensor, offsets: Tensor, layout: PageLayout, layer: int) -> Tensor | None:
    """(N, G, E) int64: the same for one layer of the pages at byte `offsets` (N,) of the arena; None where keys are not
    separated."""
    if not layout.is_separated:
        return None
    heads, places = layout.layer_heads(layer), torch.arange(POSITION_BYTES, device=offsets.device)
    if layout.is_merged:
        start = POSITION_BYTES + sum(head.entries for head in layout.heads[: layer * layout.geometry.num_kv_heads])
        end = start + sum(head.entries for head in heads)
        places = torch.cat((places, torch.arange(start, end, device=offsets.device)))
    return _decoded(arena[(offsets + layout.piece_offsets[-1])[:, None] + places], heads, stored=layout.is_merged)


def gather_first_positions(arena: Tensor, offsets: Tensor, layout: PageLayout) -> Tensor:
    """(N,) int64 position of the first token of each of the separated pages at byte `offsets` (N,) of the arena."""
    places = torch.arange(POSITION_BYTES, device=offsets.device)
    return _first(arena[(offsets + layout.piece_offsets[-1])[:, None] + places])


def _decoded(data: Tensor, heads: Sequence[HeadLayout], *, stored: bool) -> Tensor:
    """(N, heads, E) positions from bytes (N, ...): those of the first one, and if `stored` the offsets of `heads`."""
    held = _held(heads, data.device)
    behind = torch.zeros(data.shape[0], *held.shape, dtype=torch.int64, device=data.device)
    behind[:, held] = data[:, POSITION_BYTES:].long() if stored else _in_order(heads, data.device)
    return _first(data)[:, None, None] + behind


def _held(heads: Sequence[HeadLayout], device: torch.device) -> Tensor:
    """(heads, E) bool: the entries that each head has."""
    counts = torch.tensor([head.entries for head in heads], device=device)
    return torch.arange(int(counts.max()), device=device) < counts[:, None]


def _in_order(heads: Sequence[HeadLayout], device: torch.device) -> Tensor:
    """(sum of entries,) int64: the number of each entry in its head."""
    return torch.cat([torch.arange(head.entries, device=device) for head in heads])


def _first(data: Tensor) -> Tensor:
    return data[:, :POSITION_BYTES].contiguous().view(torch.int32).squeeze(-1).long()
