"""Pinned documents in the scheduler: encoded by a request of our own, then locked in the radix tree.

Everything happens between two batches and follows from control messages and finished requests, which are the same on all
ranks.

UPSTREAM(sglang 0.5.23): AROUND hooks of `Scheduler.flush_cache` and
`SchedulerWeightUpdaterManager.flush_cache_after_weight_update`.
"""

import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from csa2.capacity import PinnedPages
from csa2.documents import Document, DocumentBook, DocumentView, whole_pages
from csa2.errors import DocumentConflictError, DocumentError, PageFormatError
from csa2.store import PageStore
from sglang_csa2 import own_requests
from sglang_csa2.pool import host_pages

logger = logging.getLogger(__name__)

DOCUMENT = "csa2_document"
"""Attribute of a request: the document that it encodes."""


@dataclass(frozen=True)
class _Pin:
    lock: Any
    pages: Tensor


class PinnedDocuments:
    """The documents of one scheduler."""

    def __init__(self, scheduler: Any, store: PageStore) -> None:
        self.book = DocumentBook()
        self._submitting: Document | None = None
        self.weights_change = False
        """A flush that comes now discards what old weights wrote."""
        self._scheduler, self._store = scheduler, store
        self._tree = scheduler.tree_cache
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._pins: dict[str, _Pin] = {}

    # What control messages ask for.

    def add(
        self,
        document_id: str,
        input_ids: list[int],
        page_format: str | None,
        extra_key: str | None,
        ttl: float | None,
        serial: int,
    ) -> DocumentView:
        """Start to encode a document; the same content again changes its `ttl` only.

        Args:
            serial: of this request, chosen by the front end: replicas cannot count alike when one of them refuses.

        Raises:
            DocumentConflictError: another document has the id, or requests would have too little room.
            DocumentError: it cannot be encoded at all.
        """
        if not self._tree.supports_prefix_sharing() or self._tree.disable:
            raise DocumentConflictError("documents live in the radix cache, which --disable-radix-cache switches off")
        name = self._format(page_format)
        scheduler = self._scheduler
        tokens = whole_pages(
            input_ids, self._store.page_size, scheduler.model_config.vocab_size, scheduler.max_req_input_len - 1
        )
        document = self.book.known(document_id, tokens, extra_key, name)
        if document is None:
            self._check_room(document_id, tokens, extra_key)
            document = self.book.add(document_id, tokens, extra_key, name, ttl, serial)
            self._encode(document)
        document.ttl = ttl
        return self.view(document)

    def view(self, document: Document) -> DocumentView:
        """What is known of a document now."""
        store, names = self._store, self._store.ladder.names
        pin = self._pins.get(document.id)
        pages = torch.empty(0, dtype=torch.int64) if pin is None else pin.pages
        counts = torch.bincount(store.arena.formats[pages].long(), minlength=len(names)).tolist()
        return DocumentView(
            id=document.id,
            state=document.state,
            tokens=len(document.tokens),
            pages=len(document.tokens) // store.page_size,
            bytes=sum(n * size for n, size in zip(counts, store.ladder.page_bytes, strict=True)),
            format=document.format,
            formats={name: n for name, n in zip(names, counts, strict=True) if n},
            hits=0 if pin is None else int(store.facts.hits[pin.pages[-1]]) - document.hits_before,
            ttl=document.ttl,
            extra_key=document.extra_key,
            serial=document.serial,
            message=document.message,
        )

    def remove(self, document_id: str, serials: list[int] | None = None) -> DocumentView:
        """Unpin a document: its pages stay in the cache like those of any request, until memory asks for them.

        Raises:
            UnknownDocumentError: there is none of that id, or it is none of `serials`.
        """
        document = self.book.remove(document_id, serials)
        view = self.view(document)
        if document.state == "waiting":
            self._abort(document)
        self._unpin(document)
        logger.info("csa2 document %s removed, #token: %d", document.id, len(document.tokens))
        return view

    # What the scheduler tells.

    def queued(self, req: Any) -> None:
        """Note what `req` encodes."""
        setattr(req, DOCUMENT, self._submitting)

    def ended(self, req: Any) -> None:
        """Pin what `req` encoded, or note why it did not. Idempotent."""
        document: Document = getattr(req, DOCUMENT)
        if document.state != "waiting" or document not in self.book or req.rid != _rid(document):
            return
        reason = req.finished_reason
        if type(reason).__name__ == "FINISH_ABORT":
            self._fail(document, str(reason.message))
        else:
            self._pin(document)

    def aborted(self, req: Any, reason: dict[str, Any] | None) -> None:
        """The request was taken out of the queue."""
        document: Document = getattr(req, DOCUMENT)
        if document.state == "waiting" and document in self.book and req.rid == _rid(document):
            self._fail(document, str((reason or {}).get("message") or "its request was aborted"))

    def pages_dropped(self) -> None:
        """Encode all documents again: the cache was emptied, with everything in it."""
        self._pins.clear()
        for document in self.book:
            if document.state == "resident":
                document.state = "waiting"
                self._encode(document)

    def drop_others(self) -> None:
        """Evict everything but documents from an idle cache."""
        tree, evicted = self._tree, self._tree.evicted_tokens_total
        if tree.evictable_size() > 0:
            from sglang.srt.mem_cache.base_prefix_cache import EvictParams

            tree.evict(EvictParams(num_tokens=tree.evictable_size()))
        tree.evicted_tokens_total = evicted  # not for memory

    def note_pages(self, document: Document, pages: Tensor) -> None:
        """Keep `pages` that are being written in the format of their document."""
        self._store.ask(pages, self._store.ladder.index(document.format))

    def _format(self, page_format: str | None) -> str:
        ladder = self._store.ladder
        if page_format is None:
            return ladder.names[ladder.warm if ladder.shared is None else ladder.shared]
        try:
            return ladder.names[ladder.index(page_format)]
        except PageFormatError as error:
            raise DocumentError(f"format: {error}") from error

    def _check_room(self, document_id: str, tokens: tuple[int, ...], extra_key: str | None) -> None:
        """Refuse a document beside which the longest request would never start."""
        scheduler, allocator, store = self._scheduler, self._allocator, self._store
        capacity = (scheduler.chunked_prefill_size, scheduler.max_total_num_tokens)
        needed = min(scheduler.max_req_len, allocator.longest_request_tokens(*capacity))
        # Pages that are pinned already cost nothing twice.
        known = int(store.facts.pinned[self._match(tokens, extra_key)[0]].sum())
        claims = [len(d.tokens) // store.page_size for d in self.book if d.state == "waiting"]
        claims.append(len(tokens) // store.page_size - known)
        guards = store.protected_pages if store.arena.plan.guard != store.arena.plan.end else 0
        guarded = sum(min(guards, pages) for pages in claims)
        pinned = PinnedPages(store.pinned.sealed + sum(claims) - guarded, store.pinned.guarded + guarded)
        left = allocator.longest_request_tokens(*capacity, pinned)
        if left < needed:
            raise DocumentConflictError(
                f"document {document_id!r} has no room: with its {len(tokens)} tokens {pinned.total} pages would be pinned, "
                f"which leaves {max(0, left)} tokens to a request, compressed as far as they get, where one may have "
                f"{needed}. Remove other documents, set a larger --csa2-arena-size or a smaller --context-length"
            )

    def _encode(self, document: Document) -> None:
        """Queue a request that does nothing but prefill."""
        document.attempts += 1
        document.message = ""
        self._submitting = document
        own_requests.submit(self._scheduler, self, _rid(document), document.tokens, 0, document.extra_key)

    def _match(self, tokens: tuple[int, ...], extra_key: str | None) -> tuple[Tensor, Any]:
        """Pages of the radix tree that hold a beginning of `tokens`, and the node where they end."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        result = self._tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), extra_key)))
        slots = self._tree.path_device_indices(result.last_device_node)
        return host_pages(slots[:: self._store.page_size], self._store.page_size), result.last_device_node

    def _pin(self, document: Document) -> None:
        store = self._store
        pages, node = self._match(document.tokens, document.extra_key)
        if pages.numel() * store.page_size != len(document.tokens):
            self._fail(document, f"only {pages.numel()} of its pages reached the radix cache")
            return
        self._pins[document.id] = _Pin(self._tree.lock(node), pages)
        store.pin(pages)
        self.note_pages(document, pages)
        document.state = "resident"
        document.hits_before = int(store.facts.hits[pages[-1]])
        store.seal(pages)
        logger.info("csa2 document %s pinned, #token: %d, #page: %d", document.id, len(document.tokens), pages.numel())

    def _unpin(self, document: Document) -> None:
        pin = self._pins.pop(document.id, None)
        if pin is None:
            return
        self._tree.unlock(pin.lock)
        self._store.pin(pin.pages, pinned=False)
        for other in self._pins.values():
            self._store.pin(other.pages)

    def _fail(self, document: Document, message: str) -> None:
        document.state, document.message = "failed", message
        logger.error("csa2 document %s could not be encoded: %s", document.id, message)

    def _abort(self, document: Document) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self._scheduler.abort_request(AbortReq(rid=_rid(document)))


def _rid(document: Document) -> str:
    # Ended by a mark: SGLang aborts every request whose id begins with the one given.
    return f"csa2-document-{document.serial}-{document.attempts}-"


def _documents_of(scheduler: Any) -> PinnedDocuments | None:
    steward = getattr(scheduler, "csa2_steward", None)
    return None if steward is None else steward.documents


def around_flush_cache(orig: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Flush everything but documents; after new weights everything, and encode documents again."""
    documents = _documents_of(self)
    guard = None if documents is None else self.csa2_steward.guard
    if documents is not None and guard is not None:
        guard.withdraw()
        if documents.weights_change:
            guard.restart()
    if documents is None or len(documents.book) == 0:
        return orig(self, *args, **kwargs)
    if documents.weights_change:
        flushed = orig(self, *args, **kwargs)
        if flushed:
            documents.pages_dropped()
        return flushed
    if not self.is_fully_idle(ignore_waiting=self._engine_paused):
        return orig(self, *args, **kwargs)  # refuses, and says why
    self.cur_batch_for_debug = self.last_batch = None
    documents.drop_others()
    self.grammar_manager.clear()
    self.metrics_reporter.reset_metrics()
    logger.info(
        "Cache flushed but for pinned documents, #document: %d. DELETE /csa2/documents removes them", len(documents.book)
    )
    return True


def around_flush_after_weights(orig: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Tell the flush that comes that weights changed."""
    documents = _documents_of(self.scheduler)
    if documents is None:
        return orig(self, *args, **kwargs)
    documents.weights_change = True
    try:
        return orig(self, *args, **kwargs)
    finally:
        documents.weights_change = False
