"""Decode steps in CUDA graphs: what a captured graph reads lies at fixed addresses and is renewed before each replay.

UPSTREAM(sglang 0.5.23): `init_forward_metadata_out_graph` of an attention backend, called before the capture of each batch
size and before each replay, the latter with a view of the padded batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from csa2.cuda_attention import CudaAttention, CudaPlan

NOT_STORED = -1
"""Row of a token that pads a batch, see `TritonAttention.write_plain`."""


@dataclass(frozen=True)
class GraphInputs:
    """What the graph of one batch size reads and leaves, beside SGLang's own buffers."""

    plan: CudaPlan
    rows: Tensor
    """(B,) int64 rows of plain pages that the new tokens are written to."""
    queries: Tensor
    """(L, B, H, D) queries of the newest step, for the samples that score pages."""


class DecodeGraphs:
    """The inputs of the graphs of one backend."""

    def __init__(self, attention: CudaAttention, max_batch: int, max_pages: int, queries: tuple[int, int, int]) -> None:
        """Remember the sizes.

        Args:
            max_pages: of the longest request.
            queries: L layers, H heads and D channels of queries.
        """
        self._attention, self._max_pages = attention, max_pages
        self._inputs: dict[int, GraphInputs] = {}
        buffer, geometry = attention.store.arena.buffer, attention.store.ladder.geometry
        layers, heads, dim = queries
        self._queries = torch.zeros(layers, max_batch, heads, dim, dtype=geometry.dtype, device=buffer.device)

    def capture(self, batch: int) -> GraphInputs:
        """Inputs for a graph of `batch` requests, which read and write nothing yet. All graphs of one size share them."""
        if batch in self._inputs:
            nobody = torch.zeros(0, dtype=torch.int64)
            return self.renew(batch, nobody[:, None], nobody, nobody.to(self._queries.device))
        rows = torch.full((batch,), NOT_STORED, device=self._queries.device)
        plan = self._attention.capture_plan(batch, self._max_pages)
        self._inputs[batch] = GraphInputs(plan, rows, self._queries[:, :batch])
        return self._inputs[batch]

    def renew(self, batch: int, pages: Tensor, lengths: Tensor, rows: Tensor) -> GraphInputs:
        """Let the graph of `batch` requests run over those of them that are there.

        Args:
            pages: (B, P) int64 of the requests that are there, on the host.
            lengths: (B,) int64 their tokens, new ones included, on the host.
            rows: (B,) int64 rows of their new tokens.
        """
        inputs, here = self._inputs[batch], lengths.numel()
        padded = pages.new_zeros(batch, pages.shape[1])
        padded[:here] = pages
        self._attention.refill(inputs.plan, padded, torch.nn.functional.pad(lengths, (0, batch - here)))
        inputs.rows[:here].copy_(rows)
        inputs.rows[here:].fill_(NOT_STORED)
        return inputs
