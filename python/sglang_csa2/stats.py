"""Reading the cache: one `CacheStats` from a scheduler."""

from typing import Any

import msgspec

from csa2.formats import PLAIN
from csa2.impl import resolve_impl
from csa2.stats import CacheStats
from sglang_csa2.packed_linear import copied_bytes
from sglang_csa2.pool import store_of


def read_stats(scheduler: Any) -> CacheStats:
    """What the cache of `scheduler` holds now. Call between two batches."""
    store = store_of(scheduler)
    steward = scheduler.csa2_steward
    guard = steward.guard
    arena, ladder = store.arena, store.ladder
    counts = dict(zip(ladder.names, arena.counts, strict=True))
    used = sum(n * size for n, size in zip(arena.counts, ladder.page_bytes, strict=True))
    metadata = sum(n * layout.metadata_bytes for n, layout in zip(arena.counts, ladder.layouts, strict=True))
    mapped = store.mapped_pages
    implementation = resolve_impl(steward.options.impl, steward.options.rope)
    options: dict[str, str | int | float | None] = msgspec.to_builtins(steward.options)
    return CacheStats(
        arena_bytes=arena.plan.arena_bytes,
        used_bytes=used,
        slab_bytes=arena.used_slabs() * arena.plan.slab_bytes,
        pages=counts,
        page_bytes=dict(zip(ladder.names, ladder.page_bytes, strict=True)),
        logical_tokens=mapped * store.page_size,
        capacity_tokens=scheduler.token_to_kv_pool_allocator.size,
        compression_ratio=mapped * ladder.page_bytes[PLAIN] / used if used else 1.0,
        target_ratio=steward.ratio.controller.target,
        live_bytes=store.live_bytes(steward.usage()),
        documents=len(steward.documents.book),
        pinned_pages=store.pinned.total,
        pinned_bytes=store.pinned_bytes(),
        metadata_fraction=metadata / used if used else 0.0,
        demotions_total=dict(store.demotions_total),
        compactions_total=arena.moved_pages_total,
        evicted_tokens_total=scheduler.tree_cache.evicted_tokens_total,
        turns_total=steward.turns.turns,
        prompt_tokens_total=steward.turns.prompt_tokens,
        prefix_hit_tokens_total=steward.turns.cached_tokens,
        prefix_hit_tokens_by_format=dict(steward.turns.cached_by_format),
        ratio_ceiling=steward.ratio.controller.ceiling,
        guard_compared_total=0 if guard is None else guard.window.compared_total,
        guard_agreed_total=0 if guard is None else guard.window.agreed_total,
        guard_skipped_total=0 if guard is None else guard.skipped_total,
        guard_backoffs_total=0 if guard is None else guard.backoffs_total,
        guard_agreement=None if guard is None else guard.window.agreement,
        identity_basis_layers=list(ladder.geometry.identity_layers),
        weight_copy_bytes=copied_bytes(scheduler.tp_worker.model_runner.model),
        options={**options, "impl": implementation.name, "impl_detail": implementation.detail},
    )
