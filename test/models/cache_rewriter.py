"""SGLang's own cache, holding what compressed pages would give back."""

from typing import Any

import torch
from codec_bounds import open_by_the_letter
from torch import Tensor

from csa2.codec.assembly import codec_and_ladder
from csa2.codec.queries import DECODE_INTERVAL, QuerySamples
from csa2.codec.sealing import CompiledSealer, ReferenceSealer, Sealer, Wave
from csa2.formats import PLAIN
from csa2.impl import resolve_impl
from csa2.options import PAGE_SIZE, CacheOptions, RopeVariant
from sgl_kernels.page_layout import PageGeometry
from sglang_csa2.model import rotation_of
from sglang_csa2.rope import separable_rope


class CacheRewriter:
    """Puts into SGLang's own cache what sealing makes of its pages, by the implementation that serves by default: where an
    entry lies between two codes, another one may choose differently, which is what `test_cpu_sealing` bounds. The decoder is
    the one of `codec_bounds`."""

    def __init__(self, scheduler: Any, identity_layers: tuple[int, ...], rope: RopeVariant = "rotated") -> None:
        self.pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        geometry = PageGeometry(
            self.pool.layer_num,
            self.pool.head_num,
            self.pool.head_dim,
            PAGE_SIZE,
            self.pool.dtype,
            identity_layers,
        )
        model, options = scheduler.tp_worker.model_runner.model, CacheOptions(ratio="2", rope=rope)
        rotation = rotation_of(model, self.pool.head_dim)
        known = separable_rope(options, model, rotation)
        # Ratio 2 and no calibration: merged pages have fewer entries than the rows of SGLang's cache.
        self.codec, self.ladder = codec_and_ladder(options, geometry, rotation, None, known)
        compiles = resolve_impl("auto", rope).name == "cpu"
        self.sealer: Sealer = (CompiledSealer if compiles else ReferenceSealer)(self.ladder.layouts, self.codec)
        self.done: set[int] = set()
        self.samples = QuerySamples(self.pool.layer_num, self.pool.head_num)
        self.reader: dict[int, int] = {}
        self.depth: dict[int, int] = {}
        self._watch(scheduler.tp_worker.model_runner)

    def _watch(self, runner: Any) -> None:
        """Keep what the codec is told of queries: a sample of each request, and who read each page last."""
        backend, table = runner.attn_backend, runner.req_to_token_pool.req_to_token
        plan, extend, decode = backend.init_forward_metadata, backend.forward_extend, backend.forward_decode

        def init_forward_metadata(batch: Any) -> Any:
            slots, readers = batch.req_pool_indices.tolist(), self._readers(batch)
            for slot, reader, length in zip(slots, readers, batch.seq_lens.tolist(), strict=True):
                pages = (table[slot, :length:PAGE_SIZE] // PAGE_SIZE).tolist()
                self.reader.update(dict.fromkeys(pages, reader))
                self.depth.update((page, depth) for depth, page in enumerate(pages))
            return plan(batch)

        def forward_extend(q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim).split(batch.extend_seq_lens.tolist())
            for reader, length, queries in zip(self._readers(batch), batch.seq_lens.tolist(), rows, strict=True):
                if len(queries) > 1:
                    self.samples.record_extend(reader, layer.layer_id, queries, layer.scaling)
                elif length % DECODE_INTERVAL == 0:
                    self.samples.record_decode(reader, layer.layer_id, queries[0], layer.scaling, length)
            return extend(q, k, v, layer, batch, *args, **kwargs)

        def forward_decode(q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            for reader, length, query in zip(self._readers(batch), batch.seq_lens.tolist(), queries, strict=True):
                if length % DECODE_INTERVAL == 0:
                    self.samples.record_decode(reader, layer.layer_id, query, layer.scaling, length)
            return decode(q, k, v, layer, batch, *args, **kwargs)

        backend.init_forward_metadata, backend.forward_extend = init_forward_metadata, forward_extend
        backend.forward_decode = forward_decode

    def _readers(self, batch: Any) -> list[int]:
        readers: list[int] = self.samples.readers(batch.req_pool_indices, batch.rids).tolist()
        return readers

    def rewrite(self, pages: Tensor, formats: list[str]) -> None:
        """Replace keys and values of those `pages` that are coded in `formats` and were not yet."""
        for page, name in zip(pages.tolist(), formats, strict=True):
            target = self.ladder.index(name)
            layout = self.ladder.layouts[target]
            if layout.is_plain or page in self.done:
                continue
            self.done.add(page)
            rows = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
            pairs = zip(self.pool.k_buffer, self.pool.v_buffer, strict=True)
            plain = torch.cat([x[rows].transpose(0, 1) for pair in pairs for x in pair]).contiguous()
            reader, position = self.reader.get(page, -1), self.depth[page] * PAGE_SIZE
            wave = Wave(*(torch.tensor([x]) for x in (PLAIN, 0, target, reader, position)))
            packed = self.sealer.seal(plain.view(torch.uint8).flatten(), wave, self.samples)[target]
            opened = open_by_the_letter(packed, layout, self.codec.bases)
            for buffers, entries in ((self.pool.k_buffer, opened.keys), (self.pool.v_buffer, opened.values)):
                for buffer, heads in zip(buffers, entries[0].split(self.pool.head_num), strict=True):
                    buffer[rows] = heads.transpose(0, 1).to(buffer.dtype)

    def forget_freed(self, scheduler: Any) -> None:
        """A page that changes hands is plain again."""
        for page in scheduler.token_to_kv_pool_allocator.get_all_free_pages().tolist():
            self.done.discard(page)
            self.reader.pop(page, None)
