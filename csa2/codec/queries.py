"""A small sample of the queries each running request asked, kept for scoring its pages when they are sealed."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from csa2.codec.finite import finite

SAMPLE_TOKENS = 16
"""Queries kept of a request, spread over its newest tokens. 64 make a seventh less error in merging (docs/codec.md)."""
SAMPLE_WINDOW = 1024
"""Newest tokens of a chunk that the sample is spread over: queries far back ask for what lay around them then."""
DECODE_INTERVAL = SAMPLE_WINDOW // SAMPLE_TOKENS
"""Generated tokens between two that enter the sample, each in place of the oldest."""
MAX_REQUESTS = 64
"""Requests whose samples are kept; beyond it the one updated longest ago goes."""


class QuerySamples:
    """Samples by reader: a number for each request that ever ran, since slots are used again.

    Axes: L layers, G KV heads, R query heads of a KV head, M = R x SAMPLE_TOKENS.
    """

    def __init__(self, num_layers: int, num_kv_heads: int) -> None:
        self.num_layers, self.num_kv_heads = num_layers, num_kv_heads
        self._samples: OrderedDict[int, Tensor] = OrderedDict()
        self._filled: dict[int, set[int]] = {}
        """Layers of each reader that have a sample: known here, because a look at the sample would wait for its device."""
        self._in_slot: dict[int, tuple[str, int]] = {}
        self._readers = 0

    def readers(self, slots: Tensor, request_ids: Sequence[str]) -> Tensor:
        """(B,) int64 reader of each request, by its slot (B,) and its id; a new one where the slot changed hands."""
        found = []
        for slot, request_id in zip(slots.tolist(), request_ids, strict=True):
            held = self._in_slot.get(slot)
            if held is None or held[0] != request_id:
                held = self._in_slot[slot] = (request_id, self._readers)
                self._readers += 1
            found.append(held[1])
        return torch.tensor(found, dtype=torch.int64)

    def record_extend(self, reader: int, layer: int, queries: Tensor, scale: float) -> None:
        """Sample the rotated `queries` (T, H, D) of one layer of `reader`.

        Few tokens do not replace the sample of many; a request that has none takes what there is.
        """
        tokens = queries.shape[0]
        sample = self._sample_of(reader, queries)[self._heads(layer)]
        filled = self._filled.setdefault(reader, set())
        if tokens < SAMPLE_TOKENS and layer in filled:
            return
        filled.add(layer)
        first = max(0, tokens - SAMPLE_WINDOW)
        rows = torch.linspace(first, tokens - 1, SAMPLE_TOKENS).long()
        sample.copy_(finite(queries[rows].float() * scale).permute(1, 0, 2).reshape(sample.shape))

    def record_decode(self, reader: int, layer: int, query: Tensor, scale: float, length: int) -> None:
        """Let the rotated `query` (H, D) of a generated token enter the sample; `length` is that of its sequence."""
        sample = self._sample_of(reader, query)[self._heads(layer)]
        self._filled.setdefault(reader, set()).add(layer)
        column = length // DECODE_INTERVAL % SAMPLE_TOKENS
        sample.view(-1, SAMPLE_TOKENS, query.shape[-1])[:, column] = finite(query.float() * scale).to(sample.dtype)

    def of(self, readers: Tensor) -> Tensor | None:
        """(N, L x G, M, D) samples of `readers` (N,), zero for one that has none; None if nobody has one."""
        found = [self._samples.get(reader) for reader in readers.tolist()]
        known = next((sample for sample in found if sample is not None), None)
        if known is None:
            return None
        return torch.stack([torch.zeros_like(known) if sample is None else sample for sample in found])

    def clear(self) -> None:
        """Forget all samples."""
        self._samples.clear()
        self._filled.clear()

    def _heads(self, layer: int) -> slice:
        return slice(layer * self.num_kv_heads, (layer + 1) * self.num_kv_heads)

    def _sample_of(self, reader: int, queries: Tensor) -> Tensor:
        """(L x G, M, D) bf16 sample of `reader`, made on first use for queries (..., H, D)."""
        heads, dim = queries.shape[-2:]
        sample = self._samples.get(reader)
        if sample is None:
            shape = (self.num_layers * self.num_kv_heads, heads // self.num_kv_heads * SAMPLE_TOKENS, dim)
            sample = self._samples[reader] = torch.zeros(shape, dtype=torch.bfloat16, device=queries.device)
        self._samples.move_to_end(reader)
        while len(self._samples) > MAX_REQUESTS:
            self._filled.pop(self._samples.popitem(last=False)[0], None)
        return sample
