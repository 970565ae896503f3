"""The radix cache: SGLang's own tree, with what it evicts counted.

UPSTREAM(sglang 0.5.23): subclass of `UnifiedRadixCache`, made by the registry's factory.
"""

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_unified_radix_cache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


class Csa2RadixCache(UnifiedRadixCache):
    """Radix tree over virtual slots. Its keys and values never change when a page is compressed."""

    def __init__(self, params: Any) -> None:
        self.evicted_tokens_total = 0
        super().__init__(params)

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict leaves and count their tokens."""
        return self._counted(super().evict(params))

    def evict_for_alloc(self, params: EvictParams, **kwargs: Any) -> EvictResult:
        """Evict leaves for an allocation and count their tokens."""
        return self._counted(super().evict_for_alloc(params, **kwargs))

    def _counted(self, result: EvictResult) -> EvictResult:
        self.evicted_tokens_total += result.num_tokens_evicted
        return result


def make_radix_cache(ctx: TreeCacheBuildContext) -> Csa2RadixCache:
    """Factory for `--radix-cache-backend csa2`."""
    cache: Csa2RadixCache = create_unified_radix_cache(ctx, cache_class=Csa2RadixCache)
    return cache
