"""Scheduler hooks: check that everything is in place, seal after each batch, count prefix hits.

UPSTREAM(sglang 0.5.23): AFTER hooks of `Scheduler.__init__` and `init_request_dispatcher`, a BEFORE hook of `run_batch`, an
AROUND hook of `process_batch_result`.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from csa2.errors import IntegrityError
from csa2.facts import NO_CAP, Usage
from csa2.options import CacheOptions
from csa2.store import PageStore
from csa2.tail_ratio import TailRatio
from sglang_csa2.budget import BytePrefillAdder
from sglang_csa2.documents import DOCUMENT, PinnedDocuments
from sglang_csa2.guard import AgreementGuard, is_reference
from sglang_csa2.own_requests import owner_of
from sglang_csa2.pool import host_pages, store_of
from sglang_csa2.ranks import check_page_tables, checks_ranks
from sglang_csa2.request_options import CAP, STATIC
from sglang_csa2.turns import TurnTotals

logger = logging.getLogger(__name__)

_ADMITTED = "csa2_admitted"
"""Attribute of a request whose prefix hit has been counted."""

COLD_FORWARD_PASSES = 256
"""Age at which a plain page that nobody uses is sealed without pressure."""
COLD_SCAN_INTERVAL = 64
"""Forward passes between two looks for cold pages."""


LATE_STEPS = 4
"""Decode steps for which a page that left a window is looked at; more than one, for steps seen late."""


@dataclass(frozen=True)
class LeavingPages:
    """Pages that are behind a window after a batch."""

    hot_window: Tensor
    """(n,) int64 pages behind the hot window."""
    warm_window: Tensor
    """(m,) int64 pages behind the warm window too."""


_NONE = torch.empty(0, dtype=torch.int64)
NO_PAGES = LeavingPages(_NONE, _NONE)


class CacheSteward:
    """What the hooks keep for one scheduler."""

    def __init__(self, scheduler: Any, options: CacheOptions) -> None:
        self.scheduler = scheduler
        self.options = options
        self.store: PageStore = store_of(scheduler)
        self.backend = scheduler.tp_worker.model_runner.attn_backend
        self.req_to_token: Tensor = scheduler.req_to_token_pool.req_to_token
        self.turns = TurnTotals(self.store.ladder.names, self.store.page_size)
        self.documents = PinnedDocuments(scheduler, self.store)
        self.ratio = TailRatio(self.store, options, self.usage)
        self.guard = AgreementGuard(scheduler, self) if options.guard else None
        self._next_scan = COLD_SCAN_INTERVAL
        self.checks_ranks = checks_ranks()
        scheduler.token_to_kv_pool_allocator.usage = self.usage
        scheduler.token_to_kv_pool_allocator.tree_cache = scheduler.tree_cache

    def usage(self) -> Usage:
        """What the requests that hold KV now read: all their pages, and which of them lie in their windows."""
        num_pages = self.store.facts.hits.numel()
        active = list(self._active_requests())
        if not active:
            return Usage.nobody(num_pages)
        page_size = self.store.page_size
        rows = torch.tensor([req.kv.req_pool_idx for req in active])
        lengths = torch.tensor([req.kv.kv_committed_len for req in active])
        end = torch.tensor([-(-req.kv.kv_allocated_len // page_size) for req in active])
        depth = torch.arange(int(end.max()))[None, :]
        owner, column = torch.nonzero(depth < end[:, None], as_tuple=True)
        pages = host_pages(self.req_to_token[rows[owner], column * page_size], page_size)
        hot, warm = (
            column >= torch.div(lengths - window, page_size, rounding_mode="floor")[owner]
            for window in (self.options.hot_tokens, self.options.warm_tokens)
        )
        return Usage.of(pages, hot, warm, num_pages)

    def note_admissions(self, batch: Any) -> None:
        """Count what requests that start in this batch found in the tree."""
        for req, prefix in zip(batch.reqs, batch.prefix_lens, strict=True):
            # Once a request: later chunks and retracted requests find their own pages, and so do decodes in a mixed batch.
            if getattr(req, _ADMITTED, False):
                continue
            setattr(req, _ADMITTED, True)
            slots = self.req_to_token[req.kv.req_pool_idx, : prefix : self.store.page_size]
            pages = host_pages(slots, self.store.page_size)
            self.store.share(pages)
            if owner_of(req) is None:
                self.turns.note(req, self.store.arena.formats[pages])

    def leaving_pages(self, batch: Any) -> LeavingPages:
        """Pages behind the windows of the requests in `batch`, asked before its result is processed.

        Before, because a request that finishes in this batch gives up its row of the request table; its pages stay in the
        tree.
        """
        held = [
            req for req in batch.reqs if req.kv is not None and req.kv.req_pool_idx is not None and not is_reference(req)
        ]
        is_decode = batch.forward_mode.is_decode()
        if not is_decode:
            self._note_static(held)
        if is_decode and not any(self._page_leaves(req.kv.kv_committed_len) for req in held):
            return NO_PAGES
        rows = torch.tensor([req.kv.req_pool_idx for req in held], dtype=torch.int64)
        lengths = torch.tensor([req.kv.kv_committed_len for req in held], dtype=torch.int64)
        owner, column, pages = self._pages_behind(rows, lengths - self.options.hot_tokens, is_decode)
        self._note_origin(held, owner, column, pages)
        return LeavingPages(pages, self._pages_behind(rows, lengths - self.options.warm_tokens, is_decode)[2])

    def _note_static(self, held: list[Any]) -> None:
        """Note which pages of prompts others will share, as their requests say."""
        for req in held:
            document = getattr(req, DOCUMENT, None)
            if document is None and not getattr(req, STATIC, False):
                continue
            page_size = self.store.page_size
            end = min(req.kv.kv_committed_len, len(req.origin_input_ids)) // page_size * page_size
            pages = host_pages(self.req_to_token[req.kv.req_pool_idx, :end:page_size], page_size)
            self.store.facts.static[pages] = True
            if document is not None:
                self.documents.note_pages(document, pages)

    def _page_leaves(self, length: int) -> bool:
        """Whether a page of a request of `length` tokens left a window in one of its last decode steps."""
        windows = (self.options.hot_tokens, self.options.warm_tokens)
        return any((length - window) % self.store.page_size < LATE_STEPS for window in windows)

    def _pages_behind(self, rows: Tensor, lengths: Tensor, is_decode: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Whole pages below `lengths` (B,) tokens of the requests in `rows` (B,) of the request table.

        Returns:
            (n,) int64 each: the request, counted in the batch, the place in its sequence, and the page.
        """
        limit = torch.div(lengths, self.store.page_size, rounding_mode="floor").clamp_(min=0)
        deepest = int(limit.max()) if limit.numel() else 0
        # In decode one page can have left the window since `LATE_STEPS` before; two columns cover a step seen late.
        columns = limit[:, None] - 1 - torch.arange(min(deepest, 2) if is_decode else deepest)[None, :]
        owner, index = torch.nonzero(columns >= 0, as_tuple=True)
        column = columns[owner, index]
        slots = self.req_to_token[rows[owner], column * self.store.page_size]
        return owner, column, host_pages(slots, self.store.page_size)

    def _note_origin(self, held: list[Any], owner: Tensor, column: Tensor, pages: Tensor) -> None:
        """Note which of `pages` (n,) of the requests `held` hold a prompt, and how far their own request lets them go."""
        if pages.numel() == 0:
            return
        facts, page_size = self.store.facts, self.store.page_size
        prompt_pages = torch.tensor([len(req.origin_input_ids) // page_size for req in held])
        facts.prompt[pages[column < prompt_pages[owner]]] = True
        caps = [getattr(req, CAP, NO_CAP) for req in held]
        if any(cap != NO_CAP for cap in caps):
            own = facts.hits[pages] == 0
            facts.cap[pages[own]] = torch.tensor(caps, dtype=torch.int8)[owner[own]]

    def seal(self, leaving: LeavingPages) -> None:
        """Seal those of `leaving` that are still mapped and full, and now and then what has got cold."""
        pages = leaving.hot_window
        if pages.numel():
            self.store.seal(pages, leaving.warm_window, roomy=self.ratio.is_roomy(pages))
        if self.store.clock >= self._next_scan:
            self._next_scan = self.store.clock + COLD_SCAN_INTERVAL
            cold = self.store.cold_pages(COLD_FORWARD_PASSES)
            if cold.numel():
                self.store.seal(cold, roomy=self.ratio.is_roomy(cold))

    def _active_requests(self) -> Iterable[Any]:
        scheduler = self.scheduler
        batches = (scheduler.running_batch, scheduler.last_batch, scheduler.cur_batch_for_debug)
        found = {id(req): req for batch in batches if batch is not None for req in batch.reqs}
        if scheduler.chunked_req is not None:
            found[id(scheduler.chunked_req)] = scheduler.chunked_req
        return [
            r
            for r in found.values()
            if r.kv is not None and r.kv.req_pool_idx is not None and not r.finished() and not is_reference(r)
        ]


def after_scheduler_init(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Fail if compression was asked for and any piece of it is missing; then start looking after the cache."""
    from sglang_csa2.args import enabled_here, options_here

    if not enabled_here():
        return
    from sglang_csa2.plugin import require_hooks

    require_hooks()
    check_pieces(self)
    limit_prompts(self)
    self.get_prefill_adder_class = lambda: BytePrefillAdder
    self.csa2_steward = CacheSteward(self, options_here())


def check_pieces(scheduler: Any) -> None:
    """Compare what SGLang built with what compression needs.

    Raises:
        IntegrityError: names the piece and what stands in its place.
    """
    from sglang_csa2.allocator import Csa2Allocator
    from sglang_csa2.attention import Csa2AttentionBackend
    from sglang_csa2.pool import Csa2KVPool
    from sglang_csa2.radix import Csa2RadixCache

    allocator = scheduler.token_to_kv_pool_allocator
    pieces = {
        "allocator": (allocator, Csa2Allocator),
        "KV pool": (allocator.get_kvcache(), Csa2KVPool),
        "radix cache": (scheduler.tree_cache, Csa2RadixCache),
        "attention backend": (scheduler.tp_worker.model_runner.attn_backend, Csa2AttentionBackend),
    }
    for what, (built, wanted) in pieces.items():
        if not isinstance(built, wanted):
            raise IntegrityError(
                f"--kv-compress csa2 was asked for, but SGLang's {what} is {type(built).__name__} and not "
                f"{wanted.__name__}: another plugin or option replaced it. Nothing was served"
            )


def limit_prompts(scheduler: Any) -> None:
    """Make SGLang refuse prompts that the arena cannot hold, with a message that names the limit."""
    allocator = scheduler.token_to_kv_pool_allocator
    tokens = allocator.longest_request_tokens(scheduler.chunked_prefill_size, scheduler.max_total_num_tokens)
    # Whole pages, since that is what a prompt is rounded up to, and a token for the answer.
    scheduler.max_req_input_len = min(scheduler.max_req_input_len, (tokens - 1) // allocator.page_size * allocator.page_size)


def after_init_request_dispatcher(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Take control messages."""
    from sglang_csa2.args import enabled_here

    if enabled_here():
        from sglang.srt.runtime_context import get_parallel

        from sglang_csa2.control import attach

        attach(self, get_parallel().dp_rank or 0)


def before_run_batch(self: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Note who runs, and the prefix hits of requests that start."""
    steward = getattr(self, "csa2_steward", None)
    if steward is None:
        return
    steward.backend.request_ids = [req.rid for req in batch.reqs]
    if batch.forward_mode.is_extend():
        steward.note_admissions(batch)
        if steward.guard is not None:
            steward.guard.before_run(batch)


def around_process_batch_result(orig: Callable[..., Any], self: Any, batch: Any, result: Any) -> Any:
    """Seal what left the hot windows in this batch."""
    steward = getattr(self, "csa2_steward", None)
    if steward is None or batch.forward_mode.is_idle():
        return orig(self, batch, result)
    pages = steward.leaving_pages(batch)
    if steward.guard is not None:
        steward.guard.before_result(batch, result)
    answer = orig(self, batch, result)
    for req in batch.reqs:
        owner = owner_of(req)
        if owner is not None and req.finished():
            owner.ended(req)
    steward.seal(pages)
    if steward.guard is not None:
        steward.guard.after_result()
    if batch.forward_mode.is_decode():
        steward.ratio.after_tokens(len(batch.reqs))
    if steward.checks_ranks:
        check_page_tables(steward.store)
    return answer
