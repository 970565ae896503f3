"""A small sample of the queries each running request asked, kept for scoring its pages when they are merged."""

from collections import OrderedDict

import torch
from torch import Tensor

SAMPLE_TOKENS = 16
"""Queries kept of a request, spread over its newest tokens. 64 score no better than 16 on SmolLM2-135M."""
SAMPLE_WINDOW = 1024
"""Newest tokens of a chunk that the sample is spread over: queries far back ask for what lay around them then."""
MAX_REQUESTS = 64
"""Requests whose samples are kept; beyond it the one updated longest ago goes."""


class QuerySamples:
    """Samples by request slot. Axes: L layers, G KV heads, R query heads of a KV head, M = R x SAMPLE_TOKENS."""

    def __init__(self, num_layers: int, num_kv_heads: int) -> None:
        self.num_layers, self.num_kv_heads = num_layers, num_kv_heads
        self._samples: OrderedDict[int, Tensor] = OrderedDict()

    def record(self, slot: int, layer: int, queries: Tensor, scale: float) -> None:
        """Keep a sample of the rotated `queries` (T, H, D) of one layer of the request in `slot`.

        Few tokens do not replace the sample of many; a request that has none takes what there is.
        """
        tokens, heads, dim = queries.shape
        groups = self.num_kv_heads
        first = max(0, tokens - SAMPLE_WINDOW)
        rows = torch.linspace(first, tokens - 1, SAMPLE_TOKENS).long()
        chosen = queries[rows].float() * scale
        sample = self._samples.get(slot)
        shape = (self.num_layers * groups, heads // groups * SAMPLE_TOKENS, dim)
        if sample is not None and tokens < SAMPLE_TOKENS and bool(sample[layer * groups].any()):
            return
        if sample is None:
            sample = self._samples[slot] = torch.zeros(shape, dtype=torch.bfloat16, device=queries.device)
        per_group = chosen.view(SAMPLE_TOKENS, groups, heads // groups, dim).permute(1, 2, 0, 3).flatten(1, 2)
        sample[layer * groups : (layer + 1) * groups] = per_group.to(sample.dtype)
        self._samples.move_to_end(slot)
        while len(self._samples) > MAX_REQUESTS:
            self._samples.popitem(last=False)

    def of(self, slots: Tensor) -> Tensor | None:
        """(N, L x G, M, D) samples of the requests in `slots` (N,), zero for one that has none; None if nobody has one."""
        found = [self._samples.get(slot) for slot in slots.tolist()]
        known = next((sample for sample in found if sample is not None), None)
        if known is None:
            return None
        return torch.stack([torch.zeros_like(known) if sample is None else sample for sample in found])

    def clear(self) -> None:
        """Forget all samples."""
        self._samples.clear()
