"""Runs the attention of decode steps as SGLang's graph runner does: captured once, padded, renewed and replayed.

UPSTREAM(sglang 0.5.23): `DecodeCudaGraphRunner` and its view of a batch, which has no ids of requests.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch
from recorded_graph import RecordedGraph, poison
from sglang.srt.model_executor.forward_batch_info import ForwardMode

PADDED_BATCH = 4
"""The one batch size that is captured; smaller ones are padded."""


def _warm_up(runner: Any) -> None:
    """What SGLang runs on CUDA before it captures, where kernels are tuned: batches without requests."""
    with torch.no_grad():
        runner._dummy_run(PADDED_BATCH, buffers=runner._alloc_dummy_decode_buffers(PADDED_BATCH))
        buffers = runner._alloc_dummy_decode_buffers(2, num_tokens_per_req=70)
        runner._dummy_run(2, None, ForwardMode.EXTEND, buffers=buffers, extend_num_tokens_per_req=70)


class CapturedDecode:
    """Stands between the model and the attention backend of a scheduler, whose model has one layer."""

    def __init__(self, scheduler: Any) -> None:
        runner = scheduler.tp_worker.model_runner
        self._backend = runner.attn_backend
        self._eager = (self._backend.init_forward_metadata, self._backend.forward_decode)
        self._layer = self._backend._layers[0]
        heads, dim = self._layer.tp_q_head_num, self._layer.qk_head_dim
        self._inputs = torch.zeros(3, PADDED_BATCH, heads * dim, dtype=torch.bfloat16)
        self._slots = torch.zeros(PADDED_BATCH, dtype=torch.int64)
        _warm_up(runner.eager_runner)
        self._capture()
        self.replays = 0
        self._backend.init_forward_metadata = self._prepare
        self._backend.forward_decode = self._decode

    def _capture(self) -> None:
        backend, graph = self._backend, RecordedGraph()
        backend.init_cuda_graph_state(PADDED_BATCH, PADDED_BATCH)
        batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=PADDED_BATCH, out_cache_loc=self._slots)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        with graph.record():
            self._out = self._eager[1](*self._inputs, self._layer, batch)
        # As a runner does that has graphs of one size with adapters and without: the first stays as it is.
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        self._graph = graph

    def _prepare(self, batch: Any) -> None:
        if not batch.forward_mode.is_decode() or batch.batch_size > PADDED_BATCH:
            self._eager[0](batch)
            return
        padding = PADDED_BATCH - batch.batch_size
        fill = self._backend.get_cuda_graph_seq_len_fill_value()
        view = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=PADDED_BATCH,
            num_padding=padding,
            out_cache_loc=batch.out_cache_loc,
            positions=torch.nn.functional.pad(batch.positions, (0, padding)),
            req_pool_indices=torch.nn.functional.pad(batch.req_pool_indices, (0, padding)),
            seq_lens_cpu=torch.nn.functional.pad(batch.seq_lens_cpu, (0, padding), value=fill),
        )
        self._backend.init_forward_metadata_out_graph(view)

    def _decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, *rest: Any, **more: Any) -> Any:
        if batch.batch_size > PADDED_BATCH:
            return self._eager[1](q, k, v, layer, batch, *rest, **more)
        for held, new in zip(self._inputs, (q, k, v), strict=True):
            held[: len(new)].copy_(new.reshape(len(new), -1))
        poison(self._out)
        self._graph.replay()
        self.replays += 1
        return self._out[: batch.batch_size].clone()
