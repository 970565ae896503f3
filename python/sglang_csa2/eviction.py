"""Eviction from the radix tree by the page: `--radix-eviction-policy csa2`.

SGLang evicts whole leaves. Here a leaf loses its last pages first, as many as are worth less than the end of every other
branch, so that a long branch loses its end and keeps its head.

UPSTREAM(sglang 0.5.23): strategies are looked up by name in `mem_cache.utils._EVICTION_POLICY_FACTORIES`, which no public
function extends; nodes, and their split, belong to the Python tree core.
"""

import heapq
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache import utils
from sglang.srt.mem_cache.evict_policy import EvictionStrategy
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from torch import Tensor

from csa2.store import PageStore
from csa2.value import eviction_values
from sglang_csa2.pool import host_pages

POLICY = "csa2"
ENOUGH = 1e-9
"""Rounding of sums of shares."""


class PagePolicy(EvictionStrategy):
    """Stands for the policy where SGLang looks it up, and orders whole nodes: by priority, then recency."""

    def get_priority(self, node: Any) -> tuple[int, float]:
        """The smallest goes first."""
        return node.priority, node.last_access_time


def register_policy() -> None:
    """Let SGLang know the policy by its name. Idempotent."""
    utils._EVICTION_POLICY_FACTORIES.setdefault(POLICY, PagePolicy)


class PageEvictor:
    """Evicts from the tree of one cache."""

    def __init__(self, cache: Any, store: PageStore) -> None:
        self._cache, self._store = cache, store
        self._core = cache.tree_core

    def evict(self, wanted: Tensor, evict_leaf: Callable[[int], None]) -> None:
        """Evict whole pages from the ends of branches that no running request reads, until enough went or none is left.

        Args:
            wanted: (virtual pages,) float64 share of what is wanted that each page gives; enough is 1.
            evict_leaf: evicts the leaf with this id.
        """
        page_size, facts = self._store.page_size, self._store.facts
        values = eviction_values(facts, self._store.turnover)
        rank = facts.priority
        heap: list[tuple[int, float, int, Any]] = []

        def push(*nodes: Any) -> None:
            # One look at all: each look waits for the device.
            ends = host_pages(torch.stack([self._slots(node)[-1] for node in nodes]), page_size).tolist()
            for node, page in zip(nodes, ends, strict=True):
                # Ids of nodes follow from the order of events: equal on all ranks, unlike the order of a set.
                heapq.heappush(heap, (int(rank[page]), float(values[page]), node.id, node))

        if self._core.evictable_device_leaves:
            push(*self._core.evictable_device_leaves)
        missing = 1.0
        while heap and missing > ENOUGH:
            *_, node = heapq.heappop(heap)
            pages = host_pages(self._slots(node)[::page_size], page_size).flip(0)
            goes = torch.ones_like(pages, dtype=torch.bool)
            if heap:
                low, value = heap[0][:2]
                goes &= (rank[pages] < low) | ((rank[pages] == low) & (values[pages] <= value))
            given = wanted[pages].cumsum(0)
            # From the end on: as long as pages may go, and not beyond what is wanted.
            goes &= torch.cat((torch.zeros_like(given[:1]), given[:-1])) < missing - ENOUGH
            count = max(1, int(goes.long().cumprod(0).sum()))
            missing -= float(given[count - 1])
            head = self._cut(node, count) or node.parent
            evict_leaf(node.id)
            if head in self._core.evictable_device_leaves:
                push(head)

    def _cut(self, node: Any, pages: int) -> Any:
        """Cut the last `pages` pages of a leaf off, so that it holds nothing else; the node of the others, or None."""
        stays = len(node.key) - pages * self._store.page_size
        if stays <= 0:
            return None
        head, action = self._core._split_node(node.key, node, stays)
        if action is not None:
            self._cache._apply_cache_actions([action])
        return head

    @staticmethod
    def _slots(node: Any) -> Tensor:
        slots: Tensor = node.component_data[ComponentType.FULL].value
        return slots
