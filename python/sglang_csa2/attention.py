"""The attention backend `csa2`: SGLang's batches in, page plans and operators out.

UPSTREAM(sglang 0.5.23): subclass of `AttentionBackend`, registered by name.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from csa2.codec.queries import DECODE_INTERVAL
from csa2.errors import IntegrityError, UnsupportedModelError
from sglang_csa2.attention_impl import make_attention
from sglang_csa2.model import check_attention
from sglang_csa2.pool import Csa2KVPool, host_pages


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


class Csa2AttentionBackend(AttentionBackend):
    """Attention straight from compressed pages."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, Csa2KVPool):
            raise IntegrityError(f"csa2: the attention backend needs Csa2KVPool, SGLang built {type(pool).__name__}")
        query_heads = check_attention(runner.model, pool.start_layer, pool.layer_num)
        self.pool = pool
        self.store = pool.store
        self.req_to_token: Tensor = runner.req_to_token_pool.req_to_token
        self._attention = make_attention(pool, query_heads)
        self._step: StepPlan | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan one forward pass: note what is written and read, and split the pages by format."""
        if forward_batch.forward_mode.is_idle():
            return
        store = self.store
        store.clock += 1
        self.pool.begin_forward(forward_batch.out_cache_loc, forward_batch.positions)
        lengths = forward_batch.seq_lens_cpu.long()
        pages = self._page_table(forward_batch.req_pool_indices, int(lengths.max()))
        depth = torch.arange(pages.shape[1]) * store.page_size
        owner, column = torch.nonzero(depth[None, :] < lengths[:, None], as_tuple=True)
        readers = store.samples.readers(forward_batch.req_pool_indices, forward_batch.rids)
        store.touch(pages[owner, column], readers[owner], column)
        store.facts.first[pages[:, : store.protected_pages]] = True
        decoding = forward_batch.forward_mode.is_decode()
        new = torch.ones_like(lengths) if decoding else torch.tensor(forward_batch.extend_seq_lens_cpu)
        single, several = _samples(new, readers, lengths)
        self._step = StepPlan(self._attention.plan(pages, lengths, new), single, several)

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
        for token, reader, length in step.single:
            self.store.samples.record_decode(reader, index, query[token], layer.scaling, length)
        for start, end, reader in step.several:
            self.store.samples.record_extend(reader, index, query[start:end], layer.scaling)
        return self._attention.attend(query, keys, values, step.pages, index, layer.scaling).view(q.shape[0], -1)

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
