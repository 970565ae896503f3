"""Admission in bytes.

Two limits. *Total*: every page of an admitted request must fit once it is sealed, so it is counted in pages of the
smallest format; pages that cannot be sealed, one open page per request, cost more and are charged as overhead. *Current*:
the tokens of the next forward pass are written plain, so a pass may not take more pages than fit plain after everything
else has been demoted or evicted; a longer prompt is cut into chunks.

Both limits count what demotion and eviction could free. A budget that did not would leave a request queued for ever on
an idle server.

UPSTREAM(sglang 0.5.23): subclasses of `PrefillBudget` and `PrefillAdder`, made anew for each prefill pass.
"""

from typing import Any

from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from csa2.formats import PLAIN
from csa2.store import PageStore

WRITTEN_PAGES = 2
"""Plain places kept beside the open pages: for the next page of a request that has just filled one, and for the next chunk
of a prompt. Without them a prompt could take the last slab, stop, and leave nothing for the requests it waits for."""

GENTLE_SHARE = 1 / 8
"""Part of the arena that the tokens of one pass may take from cached pages. What needs more is prefilled in smaller chunks:
written plain at once, many prompts would push out what they and others come back for, though all of it fits compressed."""


def request_overhead_pages(store: PageStore) -> int:
    """Smallest-format pages that the open page and the protected pages of a request cost beyond those that SGLang charges
    anyway."""
    plan = store.arena.plan
    per_slab, small = plan.pages_per_slab, plan.pages_per_slab[plan.end]
    open_page = -(-small // per_slab[PLAIN]) - 1
    return open_page + store.protected_pages * (-(-small // per_slab[plan.guard]) - 1)


class ByteBudget(PrefillBudget):
    """What one prefill pass may still admit, in tokens of equal price."""

    def __init__(self, allocator: Any, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> None:
        # A decode that joins this pass writes one token, which may open a page.
        reserved = num_mixed_decode_tokens * allocator.page_size
        super().__init__(allocator, tree_cache, num_mixed_decode_tokens=reserved)
        self.store: PageStore = allocator.store
        self.total_offset: int
        self._overhead_tokens = request_overhead_pages(self.store) * self.page_size
        self._promised_tokens = 0
        self._chunk_waits = False

    @property
    def remaining_total(self) -> int:
        """Tokens that fit beside everything that stays, at the price of the smallest format."""
        open_pages, guarded, sealed = self._kept_pages()
        room = self.store.arena.plan.small_room(open_pages + WRITTEN_PAGES, guarded) - sealed
        # Virtual slots can run out first where the user capped them.
        return int(min(room * self.page_size, self._available_and_evictable()) - self.total_offset)

    @property
    def remaining_current(self) -> int:
        """Tokens that can be written in this pass, at the price of plain pages."""
        return self._written_tokens(*self._kept_pages())

    @property
    def gentle_current(self) -> int:
        """The same as far as demotion alone makes room, or up to `GENTLE_SHARE` of the arena if that is more."""
        plan = self.store.arena.plan
        # Two pages, of which one stays free, or a prompt would wait for ever in an arena of a few.
        pages = max(2, int(plan.num_slabs * plan.pages_per_slab[PLAIN] * GENTLE_SHARE))
        least = pages * self.page_size - self.current_offset
        open_pages, guarded = self.store.open_pages, self.store.guarded_pages
        gentle = self._written_tokens(open_pages, guarded, self.store.mapped_pages - open_pages - guarded)
        return int(min(self.remaining_current, max(least, gentle)))

    def check_prefill(
        self,
        *,
        extend_input_len: int,
        total_tokens: int,
        max_new_tokens: int,
        input_tokens: int,
        swa_host_hit_length: int,
        chunk_limit: int | None,
        auxiliary_swa_host_hit_length: int = 0,
    ) -> tuple[bool, int | None]:
        """Whether a request may start, and how many of its tokens this pass may take."""
        needed = total_tokens + self._overhead_tokens
        # Nobody overtakes a prompt begun that waits for room. UPSTREAM(sglang 0.5.23: the scheduler counts a chunk for it as
        # soon as anything else is admitted in the same pass, and would then take its last chunk for a middle one.)
        if self._chunk_waits or needed >= self.remaining_total:
            return False, None
        limit = self._chunk(extend_input_len, chunk_limit)
        if limit is None:
            return False, None
        self._promised_tokens = needed
        return True, limit if chunk_limit is not None else None

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        """Tokens that a request already begun may take in this pass; None makes it wait for others to finish."""
        tokens = self._chunk(chunk_limit, chunk_limit)
        self._chunk_waits = tokens is None
        return tokens

    def fit_chunk(self, *, extend_input_len: int, max_new_tokens: int, chunk_limit: int) -> int | None:
        """The next chunk of a request already begun; the rest of it stays promised."""
        self._promised_tokens = self.ceil_paged_tokens(extend_input_len) + self.page_size + max_new_tokens
        tokens = self._chunk(extend_input_len, chunk_limit)
        self._chunk_waits = tokens is None
        return tokens

    def can_allocate_prefill(
        self, *, paged_input: int, extend_input_len: int, max_new_tokens: int, chunk_limit: int | None
    ) -> bool:
        """Whether a request fits when the radix tree is off."""
        if self._chunk_waits or paged_input + self._overhead_tokens >= self.remaining_total:
            return False
        if chunk_limit is not None:
            paged_input = min(paged_input, chunk_limit)
        return paged_input <= self.remaining_current

    def reserve(
        self,
        extend_input_len: int,
        max_new_tokens: int,
        *,
        extra_tokens: int = 0,
        chunk_limit: int | None = None,
        is_chunked_continuation: bool = False,
    ) -> None:
        """Charge a request. The part of its prompt beyond this chunk is charged too: it was promised when it started."""
        before = self.total_offset
        super().reserve(extend_input_len, max_new_tokens, extra_tokens=extra_tokens)
        if not is_chunked_continuation:
            self.total_offset += self._overhead_tokens
        self.total_offset = max(self.total_offset, before + self._promised_tokens)
        self._promised_tokens = 0

    def _written_tokens(self, open_pages: int, guarded: int, sealed: int) -> int:
        """Tokens that can be written in this pass beside pages that stay."""
        room = self.store.arena.plan.plain_room(sealed, guarded) - open_pages
        return int(min(room * self.page_size, self._available_and_evictable()) - self.current_offset)

    def _kept_pages(self) -> tuple[int, int, int]:
        """Mapped pages that eviction cannot free: being written, guarded (at most), and all others."""
        evictable: int = self.tree_cache.evictable_size() // self.page_size
        staying = self.store.mapped_pages - evictable
        open_pages = self.store.open_pages
        # Some of the guarded ones may be evictable. Never more than stay, so that an idle server counts those that are
        # pinned and no others.
        pinned = self.store.pinned
        guarded = min(self.store.guarded_pages, staying - pinned.sealed)
        # A guarded page counts as another one too, since it may be open. A pinned one never is.
        return open_pages, guarded, staying - open_pages - pinned.guarded

    def _chunk(self, wanted: int, chunk_limit: int | None) -> int | None:
        """Tokens of whole pages for this pass, at most `chunk_limit`; None if there is no room for a page."""
        # One page stays free: a chunk that starts inside a page takes one page more than its length says.
        current = self.remaining_current if chunk_limit is None else self.gentle_current
        room = (current - self.page_size) // self.page_size * self.page_size
        if chunk_limit is None:
            return wanted if self.ceil_paged_tokens(wanted) <= room else None
        limit = min(chunk_limit, room)
        return limit if limit > 0 else None


class BytePrefillAdder(PrefillAdder):
    """Admits by `ByteBudget`, also requests that ignore EOS while the radix tree is off.

    SGLang counts the future tokens of those against what can be written in this pass. There is far more room for tokens to
    come than for tokens written at once, so such a request would wait for ever.
    """

    def add_one_req(self, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> Any:
        """Admit `req` if it fits; what SGLang's own does with requests that end at EOS."""
        params = req.sampling_params
        ignore_eos, params.ignore_eos = params.ignore_eos, False
        try:
            return super().add_one_req(req, has_chunked_req, truncation_align_size)
        finally:
            params.ignore_eos = ignore_eos
