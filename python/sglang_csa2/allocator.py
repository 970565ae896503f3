"""The allocator: virtual pages for SGLang, mapped and unmapped in the page store as they change hands.

`available_size` stays virtual, which the leak check of the scheduler adds up. Bytes are enforced where the scheduler asks
whether something fits: admission (`budget`), room for an extend or a decode step, and the longest request at all.

UPSTREAM(sglang 0.5.23): subclass of `PagedTokenToKVPoolAllocator`.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.utils import get_num_new_pages
from torch import Tensor

from csa2.capacity import NOTHING_PINNED, PinnedPages
from csa2.errors import IntegrityError
from csa2.facts import Usage
from csa2.formats import PLAIN
from csa2.residency import DemotionRound
from csa2.store import PageStore
from sglang_csa2.budget import WRITTEN_PAGES, ByteBudget, request_overhead_pages
from sglang_csa2.pool import pages_of


class Csa2Allocator(PagedTokenToKVPoolAllocator):
    """Hands out virtual pages and keeps the byte accounting exact."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.usage: Callable[[], Usage] = lambda: Usage.nobody(self.store.facts.hits.numel())
        """What running requests read; the scheduler puts its own function here."""
        self.tree_cache: Any = None
        """The radix cache to evict from; the scheduler puts its own here."""
        super().__init__(*args, **kwargs)

    @property
    def store(self) -> PageStore:
        """The page store behind the pool."""
        store: PageStore = self._kvcache.store
        return store

    # Allocation: room first, so that a refusal leaves the free list as it was.

    def alloc(self, need_size: int) -> Tensor | None:
        """Slots of whole new pages, or None if they do not fit."""
        return self._mapped(need_size // self.page_size, lambda: super(Csa2Allocator, self).alloc(need_size))

    def alloc_extend(
        self,
        prefix_lens: Tensor,
        prefix_lens_cpu: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor,
        last_loc: Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> Tensor | None:
        """Slots for new tokens of a batch, or None if their pages do not fit."""
        if num_new_pages is None:
            num_new_pages = self._new_pages(prefix_lens_cpu, seq_lens_cpu)
        grow = super().alloc_extend
        return self._mapped(
            num_new_pages,
            lambda: grow(prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages),
        )

    def alloc_decode(self, seq_lens: Tensor, seq_lens_cpu: Tensor, last_loc: Tensor) -> Tensor | None:
        """One slot per request, or None if the new pages do not fit."""
        num_new_pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True)
        grow = super().alloc_decode
        return self._mapped(num_new_pages, lambda: grow(seq_lens, seq_lens_cpu, last_loc))

    def _mapped(self, num_pages: int, take: Callable[[], Tensor | None]) -> Tensor | None:
        if num_pages and not self._free_pages(num_pages):
            return None
        slots = take()
        if slots is not None and num_pages:
            pages = pages_of(slots, self.page_size)
            if pages.numel() != num_pages:
                raise IntegrityError(f"csa2: {num_pages} new pages were expected, SGLang took {pages.numel()}")
            self.store.map_pages(pages)
        return slots

    def _release_page_ids(self, *page_ids: Tensor) -> None:
        for pages in page_ids:
            self.store.unmap_pages(pages.long().cpu())
        super()._release_page_ids(*page_ids)

    def clear(self) -> None:
        """Forget every page (start and flush)."""
        super().clear()
        self.store.clear()

    # Capacity: the scheduler's questions, answered in bytes.

    def create_prefill_budget(self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> ByteBudget:
        """The admission budget of one prefill pass."""
        return ByteBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def max_new_tokens_for_memory(
        self,
        input_tokens: int,
        max_new_tokens: int,
        *,
        token_capacity: int,
        sliding_window_size: int | None,
        chunk_size: int | None,
    ) -> int | None:
        """Tokens that a request may generate in an otherwise empty arena; 0 if its prompt alone does not fit.

        A prompt that does not fit is refused by its length, see `longest_request_tokens`. Agrees with `ByteBudget`: what
        passes here is admitted once it is alone, so a request never waits for ever.
        """
        prompt = -(-input_tokens // self.store.page_size) * self.store.page_size
        return max(0, min(max_new_tokens, self.longest_request_tokens(chunk_size, token_capacity) - prompt))

    def longest_request_tokens(
        self, chunk_size: int | None, token_capacity: int, pinned: PinnedPages = NOTHING_PINNED
    ) -> int:
        """Tokens of the longest request that an arena with nothing but `pinned` serves: its prompt, rounded up to pages, and
        its answer."""
        plan, page_size = self.store.arena.plan, self.store.page_size
        overhead = (1 + request_overhead_pages(self.store)) * page_size
        guarded = self.store.protected_pages + pinned.guarded
        room = (plan.small_room(WRITTEN_PAGES, guarded) - pinned.sealed) * page_size
        room = min(room, token_capacity - pinned.total * page_size) - overhead - 1
        if chunk_size is None or chunk_size <= 0:
            # In one pass, again after a retraction. A sealed page found in the tree then takes a slab from the plain ones.
            room = min(room, plan.plain_room(1 + pinned.sealed, guarded) * page_size)
        return max(0, room)

    def check_decode_capacity(
        self, *, num_tokens: int, tree_cache: Any, requests: Any = None, spec_algorithm: Any = None
    ) -> bool:
        """Whether the next decode step fits; if not, the scheduler retracts requests until it does."""
        fits = super().check_decode_capacity(
            num_tokens=num_tokens, tree_cache=tree_cache, requests=requests, spec_algorithm=spec_algorithm
        )
        return bool(fits and self._free_pages(-(-num_tokens // self.page_size)))

    def _free_pages(self, num_pages: int) -> bool:
        """Make room for `num_pages` plain pages: demote what nobody reads, evict it, then compress what is in use.

        Here and not in `evict_to_free_tokens`, which SGLang asks for a page per request where most take none: in tokens that
        is free, in bytes it would demote hot pages for nothing.
        """
        while not self.store.make_room(num_pages, self.usage, DemotionRound.SHARED_END):
            if self._evict(num_pages) == 0:
                return self.store.make_room(num_pages, self.usage)
        return True

    def _evict(self, num_pages: int) -> int:
        """Evict towards room for `num_pages` plain pages; the tokens that went."""
        tree = self.tree_cache
        if tree is None or not tree.supports_prefix_sharing():
            return 0
        if tree.evicts_pages:
            return int(tree.evict_bytes(self._missing_bytes(num_pages)))
        tokens = self._missing_small_pages(num_pages) * self.page_size
        return int(tree.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)

    def verify_byte_accounting(self) -> list[str]:
        """What does not add up, for the scheduler's idle check; empty when healthy."""
        faults = []
        try:
            self.store.check_integrity()
        except IntegrityError as error:
            faults.append(f"csa2: {error}")
        free = len(self.get_all_free_pages())
        if self.store.mapped_pages + free != self.num_pages:
            faults.append(f"csa2: {self.store.mapped_pages} mapped + {free} free pages are not {self.num_pages}")
        return faults

    def _new_pages(self, prefix_lens_cpu: Tensor, seq_lens_cpu: Tensor) -> int:
        return int(get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu))

    def _missing_small_pages(self, num_pages: int) -> int:
        """Pages of the smallest format that must go before `num_pages` plain ones fit beside what cannot be demoted."""
        arena = self.store.arena
        counts = list(arena.counts)
        counts[PLAIN] += num_pages
        end = arena.plan.end
        counts[end] = 0
        free_slabs = arena.plan.num_slabs - arena.plan.slabs_needed(counts)
        return max(1, arena.counts[end] - free_slabs * arena.plan.pages_per_slab[end])

    def _missing_bytes(self, num_pages: int) -> int:
        """Bytes to evict in one go: half of the slabs that are missing, since what goes may empty slabs it does not fill."""
        plan = self.store.arena.plan
        counts = list(self.store.arena.counts)
        counts[PLAIN] += num_pages
        missing_slabs = plan.slabs_needed(counts) - plan.num_slabs
        return max(plan.page_bytes[plan.end], missing_slabs * plan.slab_bytes // 2)
