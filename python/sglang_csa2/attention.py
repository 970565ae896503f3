"""The attention backend `csa2`: SGLang's batches in, page plans and operators out.

UPSTREAM(sglang 0.5.23): subclass of `AttentionBackend`, registered by name.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from csa2.codec.queries import DECODE_INTERVAL
from csa2.errors import IntegrityError, UnsupportedModelError
from sglang_csa2.attention_impl import make_attention
from sglang_csa2.model import check_attention
from sglang_csa2.pool import Csa2KVPool, host_pages

if TYPE_CHECKING:
    # When it runs, only where there is a GPU: it defines kernels, which takes a moment.
    from sglang_csa2.cuda_graphs import DecodeGraphs, GraphInputs


WARM_UP = ""
"""Id of the requests in a batch that has none."""


class ExtendSample(NamedTuple):
    """New tokens of one request, whose queries enter its sample."""

    start: int
    """First of its tokens in the batch."""
    end: int
    reader: int
    """Row of the request table."""


class DecodeSample(NamedTuple):
    """A token that is alone in its batch, whose query enters the sample of its request."""

    token: int
    reader: int
    length: int


@dataclass(frozen=True)
class StepPlan:
    """What one forward pass reads; shared by all layers."""

    pages: Any
    """Of the implementation."""
    single: tuple[DecodeSample, ...]
    several: tuple[ExtendSample, ...]
    queries: Tensor | None = None
    """(L, T, H, D) where queries are left for samples to come: in a CUDA graph, which runs no Python."""


class Csa2AttentionBackend(AttentionBackend):
    """Attention straight from compressed pages."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, Csa2KVPool):
            raise IntegrityError(f"csa2: the attention backend needs Csa2KVPool, SGLang built {type(pool).__name__}")
        self._layers = check_attention(runner.model, pool.start_layer, pool.layer_num)
        self.pool = pool
        self.store = pool.store
        self.req_to_token: Tensor = runner.req_to_token_pool.req_to_token
        self._attention = make_attention(pool, frozenset(layer.tp_q_head_num for layer in self._layers))
        self._step: StepPlan | None = None
        self._max_pages = -(-runner.model_config.context_len // pool.page_size)
        self._graphs: DecodeGraphs | None = None
        self._left: tuple[GraphInputs, tuple[DecodeSample, ...]] | None = None
        """Queries of the newest replay that enter samples."""
        self.request_ids: list[str] = []
        """Of the batch that runs; SGLang does not say them to a graph."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan one forward pass: note what is written and read, and split the pages by format."""
        if forward_batch.forward_mode.is_idle():
            return
        self._take_samples()
        self.store.clock += 1
        self.pool.begin_forward(forward_batch.out_cache_loc, forward_batch.positions)
        lengths = forward_batch.seq_lens_cpu.long()
        # UPSTREAM(sglang 0.5.23: batches that only warm kernels up, on CUDA, have no requests and lie in the padding page)
        request_ids = forward_batch.rids or [WARM_UP] * forward_batch.batch_size
        pages, readers = self._note_reads(forward_batch.req_pool_indices, lengths, request_ids)
        decoding = forward_batch.forward_mode.is_decode()
        new = torch.ones_like(lengths) if decoding else torch.tensor(forward_batch.extend_seq_lens_cpu)
        single, several = _samples(new, readers, lengths)
        self._step = StepPlan(self._attention.plan(pages, lengths, new), single, several)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Prepare for graphs of decode steps of up to `max_bs` requests.

        Raises:
            IntegrityError: the implementation has no kernels that a graph can hold.
        """
        from csa2.cuda_attention import CudaAttention
        from sglang_csa2.cuda_graphs import DecodeGraphs

        if not isinstance(self._attention, CudaAttention):
            raise IntegrityError("csa2: SGLang captures a CUDA graph, which needs --csa2-impl cuda")
        first = self._layers[0]
        shape = (self.pool.layer_num, first.tp_q_head_num, first.qk_head_dim)
        self._graphs = DecodeGraphs(self._attention, max_bs, self._max_pages, shape)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of a request that pads a batch; it reads nothing, see `DecodeGraphs.renew`."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a graph is captured: fixed addresses for what it reads. Before a replay: what it reads in this step.

        Raises:
            IntegrityError: a graph of anything but decode steps, or `init_cuda_graph_state` did not run.
        """
        if self._graphs is None or not forward_batch.forward_mode.is_decode():
            raise IntegrityError(f"csa2: a CUDA graph of {forward_batch.forward_mode} is not prepared")
        batch = forward_batch.batch_size
        here = batch - getattr(forward_batch, "num_padding", 0)
        if in_capture:
            inputs = self._graphs.capture(batch)
            self.pool.write_to(forward_batch.out_cache_loc, inputs.rows)
            self._step = StepPlan(inputs.plan, (), (), inputs.queries)
            return
        self._take_samples()
        self.store.clock += 1
        rows = self.pool.rows_for(forward_batch.out_cache_loc[:here], forward_batch.positions[:here])
        lengths = forward_batch.seq_lens_cpu[:here].long()
        pages, readers = self._note_reads(forward_batch.req_pool_indices[:here], lengths, self.request_ids)
        inputs = self._graphs.renew(batch, pages, lengths, rows)
        self._left = (inputs, _samples(torch.ones_like(lengths), readers, lengths)[0])

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Tensor:
        """Attention of one new token per request."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Tensor:
        """Attention of new tokens over what is cached and over themselves."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def support_triton(self) -> bool:
        """No: SGLang's Triton helpers expect slot-row buffers."""
        return False

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save: bool, extra: dict[str, Any]
    ) -> Tensor:
        if extra and (unknown := sorted(name for name, value in extra.items() if value is not None)):
            raise UnsupportedModelError(f"--kv-compress csa2: attention called with {unknown}, which it cannot honour")
        step = self._step
        if k is None or v is None:
            raise UnsupportedModelError("--kv-compress csa2: an attention layer reads the keys of another one")
        if step is None:
            raise IntegrityError("csa2: attention runs before its forward pass was planned")
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        # SGLang has split them into heads already; a view costs a fair part of a layer's attention over short texts.
        keys = k if k.dim() == 3 else k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        values = v if v.dim() == 3 else v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        if save:
            self.pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), keys, values)
        index = layer.layer_id - self.pool.start_layer
        if step.queries is not None:
            step.queries[index].copy_(query)
        for token, reader, length in step.single:
            self.store.samples.record_decode(reader, index, query[token], layer.scaling, length)
        for start, end, reader in step.several:
            self.store.samples.record_extend(reader, index, query[start:end], layer.scaling)
        return self._attention.attend(query, keys, values, step.pages, index, layer.scaling).view(q.shape[0], -1)

    def _note_reads(self, rows: Tensor, lengths: Tensor, request_ids: list[str]) -> tuple[Tensor, Tensor]:
        """Note which pages the requests in `rows` (B,) of the request table read up to `lengths` (B,) tokens.

        Returns:
            (B, P) int64 their pages, and (B,) int64 their readers, both on the host.
        """
        store = self.store
        pages = self._page_table(rows, int(lengths.max()))
        depth = torch.arange(pages.shape[1]) * store.page_size
        owner, column = torch.nonzero(depth[None, :] < lengths[:, None], as_tuple=True)
        readers = store.samples.readers(rows, request_ids)
        store.touch(pages[owner, column], readers[owner], column)
        store.facts.first[pages[:, : store.protected_pages]] = True
        return pages, readers

    def _take_samples(self) -> None:
        """Let queries that the last replay left enter the samples."""
        if self._left is None:
            return
        (inputs, due), self._left = self._left, None
        for layer in self._layers:
            index = layer.layer_id - self.pool.start_layer
            for token, reader, length in due:
                self.store.samples.record_decode(reader, index, inputs.queries[index, token], layer.scaling, length)

    def _page_table(self, rows: Tensor, max_length: int) -> Tensor:
        """(B, P) int64 virtual pages of the requests in `rows`, on the host."""
        return host_pages(self.req_to_token[rows, : max_length : self.store.page_size], self.store.page_size)


def _samples(new: Tensor, readers: Tensor, lengths: Tensor) -> tuple[tuple[DecodeSample, ...], tuple[ExtendSample, ...]]:
    """Whose queries are kept for scoring pages: every request with several new tokens, and now and then one with one."""
    ends = new.cumsum(0)
    due = torch.nonzero((new == 1) & (lengths % DECODE_INTERVAL == 0)).squeeze(-1)
    rows = zip((ends[due] - 1).tolist(), readers[due].tolist(), lengths[due].tolist(), strict=True)
    more = torch.nonzero(new > 1).squeeze(-1)
    spans = zip((ends - new)[more].tolist(), ends[more].tolist(), readers[more].tolist(), strict=True)
    return tuple(DecodeSample(*row) for row in rows), tuple(ExtendSample(*span) for span in spans)


def make_backend(runner: Any) -> Csa2AttentionBackend:
    """Factory for `--attention-backend csa2`."""
    return Csa2AttentionBackend(runner)
