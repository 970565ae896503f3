"""The radix cache: SGLang's own tree, with eviction by the page, shared pages noted, and what it evicts counted.

UPSTREAM(sglang 0.5.23): subclass of `UnifiedRadixCache`, made by the registry's factory.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult, InsertParams, InsertResult
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_schedule
from torch import Tensor

from csa2.store import PageStore
from sglang_csa2.eviction import POLICY, PageEvictor, register_policy
from sglang_csa2.pool import host_pages


class Csa2RadixCache(UnifiedRadixCache):
    """Radix tree over virtual slots. Its keys and values never change when a page is compressed."""

    def __init__(self, params: Any) -> None:
        self.evicted_tokens_total = 0
        self._evicts_pages = params.eviction_policy == POLICY and not params.disable
        if self._evicts_pages:
            register_policy()
            # The Rust core knows its own policies only, and shows no nodes.
            params.tree_core_backend = "python"
        super().__init__(params)
        self.store: PageStore = params.token_to_kv_pool_allocator.store
        self._evictor = PageEvictor(self, self.store) if self._evicts_pages else None

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict leaves and count their tokens."""
        return self._counted(super().evict(params))

    def evict_for_alloc(self, params: EvictParams, **kwargs: Any) -> EvictResult:
        """Evict leaves for an allocation and count their tokens."""
        return self._counted(super().evict_for_alloc(params, **kwargs))

    @property
    def evicts_pages(self) -> bool:
        """Whether the policy is ours; otherwise SGLang evicts leaves by its own."""
        return self._evictor is not None

    def evict_bytes(self, num_bytes: int) -> int:
        """Evict pages of at least `num_bytes` in the arena; the tokens that went. Needs `evicts_pages`."""
        sizes = torch.tensor(self.store.ladder.page_bytes, dtype=torch.float64)
        tracker = dict.fromkeys(self.tree_components, 0)
        self._evict_pages(sizes[self.store.arena.formats.long()] / num_bytes, tracker)
        self.evicted_tokens_total += tracker[ComponentType.FULL]
        return tracker[ComponentType.FULL]

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert a path. Pages of it that another request had inserted meanwhile are shared from now on."""
        result = super().insert(params)
        if not self.disable and result.prefix_len > params.prev_prefix_len:
            slots = self.path_device_indices(result.last_device_node)
            self.store.share(host_pages(slots[params.prev_prefix_len : result.prefix_len : self.page_size], self.page_size))
        return result

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Insert the tokens of a request, and note its priority where its pages are."""
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        if req.priority:
            row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : up_to // self.page_size * self.page_size]
            pages = host_pages(row[:: self.page_size], self.page_size)
            low_first = bool(get_schedule().schedule_low_priority_values_first)
            self.store.facts.priority[pages] = self.store.facts.priority[pages].clamp(
                min=page_priority(req.priority, low_first=low_first)
            )

    def _evict_components(
        self,
        request_by_type: dict[ComponentType, int],
        tracker: dict[ComponentType, int],
        available_size_targets: dict[ComponentType, tuple[ComponentType, int]] | None = None,
        *,
        allocation_reclaim_satisfied: Callable[[], bool] | None = None,
    ) -> None:
        if self._evictor is None:
            super()._evict_components(
                request_by_type,
                tracker,
                available_size_targets,
                allocation_reclaim_satisfied=allocation_reclaim_satisfied,
            )
            return
        if request_by_type[ComponentType.FULL] <= 0:
            return
        share = self.page_size / request_by_type[ComponentType.FULL]
        self._evict_pages(torch.full((self.store.arena.formats.numel(),), share, dtype=torch.float64), tracker)

    def _evict_pages(self, wanted: Tensor, tracker: dict[ComponentType, int]) -> None:
        assert self._evictor is not None
        self._evictor.evict(wanted, lambda node_id: self._evict_device_leaf(node_id, tracker))

    def _counted(self, result: EvictResult) -> EvictResult:
        self.evicted_tokens_total += result.num_tokens_evicted
        return result


def page_priority(priority: int, *, low_first: bool) -> int:
    """What the priority of a request is worth to its pages, the most urgent highest, in the 32 bits of the page facts.

    Clients may send any number, and SGLang gives those without one the least urgent of 64 bits.
    """
    return max(-(2**31), min(2**31 - 1, -priority if low_first else priority))


def make_radix_cache(ctx: TreeCacheBuildContext) -> Csa2RadixCache:
    """Factory for `--radix-cache-backend csa2`."""
    cache: Csa2RadixCache = create_unified_radix_cache(ctx, cache_class=Csa2RadixCache)
    return cache
