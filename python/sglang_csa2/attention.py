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
from sgl_kernels.paged_attention import reference
from sgl_kernels.paged_attention.plan import PagePlan, plan_pages
from sglang_csa2.model import check_attention
from sglang_csa2.pool import Csa2KVPool


@dataclass(frozen=True)
class ExtendRow:
    """One request of an extend batch with more than one new token."""

    start: int
    """First of its tokens in the batch."""
    end: int
    slot: int
    """Row of the request table."""
    prefix: PagePlan


class DecodeSample(NamedTuple):
    """A generated token whose query enters the sample of its request."""

    token: int
    slot: int
    length: int


@dataclass(frozen=True)
class StepPlan:
    """What one forward pass reads; shared by all layers."""

    decode: PagePlan | None
    """Requests with one new token: read whole, new token included."""
    decode_tokens: Tensor
    """(B,) int64 index of their token in the batch."""
    sampled: tuple[DecodeSample, ...]
    """Requests of `decode` whose query is kept for scoring their pages."""
    extend: tuple[ExtendRow, ...]


class Csa2AttentionBackend(AttentionBackend):
    """Attention straight from compressed pages."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, Csa2KVPool):
            raise IntegrityError(f"csa2: the attention backend needs Csa2KVPool, SGLang built {type(pool).__name__}")
        check_attention(runner.model, pool.start_layer, pool.layer_num)
        self.pool = pool
        self.store = pool.store
        self.req_to_token: Tensor = runner.req_to_token_pool.req_to_token
        self._step: StepPlan | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan one forward pass: note what is written and read, and split the pages by format."""
        if forward_batch.forward_mode.is_idle():
            return
        store = self.store
        store.clock += 1
        self.pool.begin_forward(forward_batch.out_cache_loc)
        lengths = forward_batch.seq_lens.long()
        pages = self._page_table(forward_batch.req_pool_indices, int(forward_batch.seq_lens_cpu.max()))
        depth = torch.arange(pages.shape[1]) * store.page_size
        owner, column = torch.nonzero(depth[None, :] < lengths[:, None], as_tuple=True)
        store.touch(pages[owner, column], forward_batch.req_pool_indices.long()[owner])
        store.facts.first[pages[:, : store.protected_pages]] = True
        if forward_batch.forward_mode.is_decode():
            tokens = torch.arange(lengths.numel())
            sampled = _decode_samples(tokens, forward_batch.req_pool_indices, lengths)
            self._step = StepPlan(self._plan(pages, lengths), tokens, sampled, ())
        else:
            self._step = self._plan_extend(forward_batch, pages, lengths)

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
        unknown = sorted(name for name, value in extra.items() if value is not None)
        if unknown:
            raise UnsupportedModelError(f"--kv-compress csa2: attention called with {unknown}, which it cannot honour")
        step = self._step
        if step is None:
            raise IntegrityError("csa2: attention runs before its forward pass was planned")
        if save and k is not None:
            self.pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = torch.zeros_like(query)
        arena, bases = self.store.arena.buffer, self.store.codec.bases
        index = layer.layer_id - self.pool.start_layer
        if step.decode is not None:
            one = reference.decode(query[step.decode_tokens], arena, step.decode, index, layer.scaling, bases)
            out[step.decode_tokens] = one.to(out.dtype)
        for token, slot, length in step.sampled:
            self.store.samples.record_decode(slot, index, query[token], layer.scaling, length)
        for row in step.extend:
            part = slice(row.start, row.end)
            self.store.samples.record_extend(row.slot, index, query[part], layer.scaling)
            keys = k[part].view(-1, layer.tp_k_head_num, layer.qk_head_dim)
            values = v[part].view(-1, layer.tp_v_head_num, layer.v_head_dim)
            out[part] = reference.extend(query[part], keys, values, arena, row.prefix, index, layer.scaling, bases)
        return out.view(q.shape[0], -1)

    def _page_table(self, rows: Tensor, max_length: int) -> Tensor:
        """(B, P) int64 virtual pages of the requests in `rows`."""
        columns = torch.arange(0, max_length, self.store.page_size)
        return self.req_to_token[rows[:, None], columns[None, :]].long() // self.store.page_size

    def _plan(self, pages: Tensor, lengths: Tensor) -> PagePlan:
        arena = self.store.arena
        return plan_pages(pages, lengths, arena.formats, arena.offsets, self.store.ladder.layouts, self.store.page_size)

    def _plan_extend(self, forward_batch: Any, pages: Tensor, lengths: Tensor) -> StepPlan:
        new = forward_batch.extend_seq_lens.long()
        ends = new.cumsum(0)
        single = torch.nonzero(new == 1).squeeze(-1)
        decode = self._plan(pages[single], lengths[single]) if single.numel() else None
        rows = []
        for row in torch.nonzero(new > 1).squeeze(-1).tolist():
            prefix = self._plan(pages[row : row + 1], (lengths - new)[row : row + 1])
            slot = int(forward_batch.req_pool_indices[row])
            rows.append(ExtendRow(int(ends[row] - new[row]), int(ends[row]), slot, prefix))
        tokens = (ends - 1)[single]
        sampled = _decode_samples(tokens, forward_batch.req_pool_indices[single], lengths[single])
        return StepPlan(decode, tokens, sampled, tuple(rows))


def _decode_samples(tokens: Tensor, slots: Tensor, lengths: Tensor) -> tuple[DecodeSample, ...]:
    """Those of the single-token requests whose turn it is to be sampled."""
    due = torch.nonzero(lengths % DECODE_INTERVAL == 0).squeeze(-1)
    rows = zip(tokens[due].tolist(), slots[due].tolist(), lengths[due].tolist(), strict=True)
    return tuple(DecodeSample(*row) for row in rows)


def make_backend(runner: Any) -> Csa2AttentionBackend:
    """Factory for `--attention-backend csa2`."""
    return Csa2AttentionBackend(runner)
