"""The agreement guard: some steps are computed again over pages in the model dtype, and the predictions compared.

A sample is one step of one request of a client that reads compressed pages: its tokens so far, and the most likely token
after them. A request of our own prefills the same tokens, alone in its namespace of the radix tree, so that it finds
nothing, and barred from the tree, so that it leaves nothing; its pages keep the model dtype. Its most likely token is the
reference.

It gives way: none is made while memory is short or anybody waits, at most one at a time, and one that has not come to its
last chunk is withdrawn when a client asks for anything, or memory gets short. All of it follows from counts, page formats
and tokens, which every rank has alike.

UPSTREAM(sglang 0.5.23): the logits of a batch are still there when its result is processed, one row a request, those of
rows without penalties changed by scale alone.
"""

import logging
from array import array
from typing import Any, NamedTuple

import torch
from torch import Tensor

from csa2.agreement import WINDOW_SAMPLES, AgreementWindow
from csa2.formats import PLAIN
from csa2.store import PageStore
from sglang_csa2 import own_requests
from sglang_csa2.pool import host_pages

logger = logging.getLogger(__name__)

_REFERENCE = "csa2_reference"
"""Attribute of a request: recomputes a sample."""
LARGEST_SHARE = 8
"""A reference takes at most this part of the arena, one n-th: others make way for it."""
LOOKS = 4
"""Requests of a batch that are looked at for a sample; where none reads compressed pages, others in the next batch."""


class Sample(NamedTuple):
    """One step of a client's request."""

    tokens: "array[int]"
    top: int
    """The most likely token after them."""


def is_reference(req: Any) -> bool:
    """Whether `req` recomputes a sample."""
    return hasattr(req, _REFERENCE)


class AgreementGuard:
    """The guard of one scheduler."""

    def __init__(self, scheduler: Any, steward: Any) -> None:
        """Args:
        steward: the `CacheSteward` of the scheduler, complete when a batch is processed.
        """
        options = steward.options
        self.window = AgreementWindow(options.guard, options.guard_min)
        self.skipped_total = self.backoffs_total = 0
        self._scheduler, self._steward = scheduler, steward
        self._store: PageStore = steward.store
        self._live_limit: float = options.high_watermark * self._store.arena.plan.arena_bytes
        self._chosen: Sample | None = None
        """Taken in the batch that is being processed."""
        self._sample: Sample | None = None
        """What the request in flight recomputes."""
        self._req: Any = None
        self._mapped_pages = 0
        self._serial = self._looks = 0

    # Around each batch.

    def before_run(self, batch: Any) -> None:
        """Keep the pages that `batch` is about to write for the reference as they are written."""
        req = self._req
        if req is None or req not in batch.reqs:
            return
        pages = self._pages(req, req.kv.kv_allocated_len)
        self._store.ask(pages, PLAIN)
        self._store.facts.cap[pages] = PLAIN
        self._mapped_pages = pages.numel()

    def before_result(self, batch: Any, result: Any) -> None:
        """Compare the reference if `batch` completed it, and take a sample if it is time for one."""
        logits = getattr(result.logits_output, "next_token_logits", None)
        rows = [i for i, req in enumerate(batch.reqs) if _predicts(req)]
        clients = []
        for i in rows:
            if batch.reqs[i] is self._req:
                self._compare(None if logits is None else _top(logits[i]))
            elif own_requests.owner_of(batch.reqs[i]) is None:
                clients.append(i)
        if self.window.count(len(clients)) and logits is not None and self._req is None:
            self._choose(batch.reqs, clients, logits)

    def after_result(self) -> None:
        """Submit the sample that was taken, or see whether the one in flight is in the way."""
        if self._req is not None:
            waits = any(req is not self._req for req in self._scheduler.waiting_queue)
            if self._req.is_retracted or waits or self._memory_is_short():
                self.give_way()
        elif self._chosen is not None:
            sample, self._chosen = self._chosen, None
            if self._has_room(sample):
                self._submit(sample)
            else:
                self.skipped_total += 1

    # Giving way.

    def give_way(self) -> None:
        """Withdraw the request in flight, unless it is in its last chunk."""
        req, scheduler = self._req, self._scheduler
        if req is not None and (scheduler.chunked_req is req or any(other is req for other in scheduler.waiting_queue)):
            self._abort()

    def withdraw(self) -> None:
        """Take the request in flight out of an otherwise idle scheduler now, between two batches, so that it can flush."""
        if self._req is not None:
            self._abort()
        scheduler = self._scheduler
        known = {*scheduler.collect_inflight_reqs(), *scheduler.waiting_queue, scheduler.chunked_req} - {None}
        if any(not is_reference(req) and not req.finished() for req in known):
            return
        if scheduler.last_batch is not None and any(is_reference(req) for req in scheduler.last_batch.reqs):
            # With overlap the result of that batch has yet to be processed.
            while scheduler.enable_overlap and scheduler.result_queue:
                scheduler.process_batch_result(*scheduler.result_queue.popleft())
            scheduler.last_batch = None
        scheduler.process_pending_chunked_abort()
        if scheduler.running_batch.reqs:
            scheduler.running_batch.filter_batch()

    def restart(self) -> None:
        """Forget the window: the model has other weights."""
        self.window.restart()

    # What becomes of our request.

    def queued(self, req: Any) -> None:
        """Bar `req` from the radix tree."""
        setattr(req, _REFERENCE, True)
        req.skip_radix_cache_insert = True
        self._req = req

    def ended(self, req: Any) -> None:
        """`req` finished, with or without a comparison."""
        self._close(req)

    def aborted(self, req: Any, reason: dict[str, Any] | None) -> None:
        """`req` was withdrawn, or somebody aborted everything."""
        self._close(req)

    def _close(self, req: Any) -> None:
        if req is not self._req:
            return
        self.skipped_total += self._sample is not None
        self._store.disregard(self._mapped_pages)
        self._req = self._sample = None
        self._mapped_pages = 0

    def _abort(self) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self._scheduler.abort_request(AbortReq(rid=self._req.rid))

    # Samples.

    def _choose(self, reqs: list[Any], clients: list[int], logits: Tensor) -> None:
        """Take the step of one of `clients`, rows of the batch, if one of them reads compressed pages."""
        self._looks += 1
        first = self._looks * LOOKS % max(1, len(clients))
        for i in (*clients[first:], *clients[:first])[:LOOKS]:
            req = reqs[i]
            tokens = array("q", req.origin_input_ids)
            tokens.extend(req.output_ids)
            if _is_plain_prediction(req) and bool((self._formats(req, len(tokens)) != PLAIN).any()):
                self._chosen = Sample(tokens, _top(logits[i]))
                self.window.take()
                return

    def _has_room(self, sample: Sample) -> bool:
        """Whether nobody waits or misses the memory that a reference of `sample` takes for a while."""
        scheduler, arena = self._scheduler, self._store.arena
        pages = -(-(len(sample.tokens) + 1) // self._store.page_size)
        running = len(scheduler.running_batch.reqs)
        return bool(
            not scheduler.waiting_queue
            and scheduler.chunked_req is None
            and running < scheduler.max_running_requests
            and len(sample.tokens) < scheduler.max_req_input_len
            and pages * arena.plan.page_bytes[PLAIN] * LARGEST_SHARE <= arena.plan.arena_bytes
            and not self._memory_is_short()
        )

    def _memory_is_short(self) -> bool:
        # The measure of the ratio: references do not count, so what is left above it is theirs.
        return self._store.live_bytes(self._steward.usage()) > self._live_limit

    def _submit(self, sample: Sample) -> None:
        self._serial += 1
        self._sample = sample
        # Ended by a mark: SGLang aborts every request whose id begins with the one given.
        name = f"csa2-guard-{self._serial}-"
        own_requests.submit(self._scheduler, self, name, sample.tokens, 1, name)

    def _compare(self, top: int | None) -> None:
        sample = self._sample
        assert sample is not None
        if top is None or bool((self._formats(self._req, len(sample.tokens)) != PLAIN).any()):
            return  # counted as skipped when the request ends
        self._sample = None
        if self.window.note(top == sample.top):
            self._back_off()

    def _back_off(self) -> None:
        self.backoffs_total += 1
        ratio = self._steward.ratio
        lowered = ratio.back_off()
        if not self._scheduler.metrics_reporter.is_stats_logging_rank:
            return
        said = (
            f"csa2 guard: {100 * (self.window.agreement or 0):.0f} % of the last {WINDOW_SAMPLES} samples agree, less than "
            f"--csa2-guard-min {self.window.minimum:g}"
        )
        if lowered:
            limit = ratio.controller.ceiling
            logger.warning('%s: ratio limited to %g. POST /csa2/ratio {"ratio": "auto"} lifts the limit', said, limit)
        else:
            logger.warning(
                "%s, and the ratio of %g does not go down by itself. Larger formats (--csa2-shared-format, "
                "--csa2-tail-format) or a larger arena make the error smaller",
                said,
                ratio.controller.target,
            )

    # Pages.

    def _pages(self, req: Any, length: int) -> Tensor:
        page_size = self._store.page_size
        return host_pages(self._steward.req_to_token[req.kv.req_pool_idx, :length:page_size], page_size)

    def _formats(self, req: Any, length: int) -> Tensor:
        return self._store.arena.formats[self._pages(req, length)]


def _predicts(req: Any) -> bool:
    """Whether the batch that is being processed predicts a token of `req`."""
    return not req.finished() and not req.is_retracted and req.inflight_middle_chunks <= 0 and req.to_finish is None


def _is_plain_prediction(req: Any) -> bool:
    """Whether the logits of `req` follow from its tokens alone, up to scale."""
    sampling = req.sampling_params
    neutral = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0, 0, 1)
    extras = (sampling.logit_bias, req.grammar, req.custom_logit_processor, req.lora_id, req.multimodal_inputs)
    embeds = (req.input_embeds, req.positional_embed_overrides)
    return neutral and not sampling.min_new_tokens and all(part is None for part in (*extras, *embeds))


def _top(logits: Tensor) -> int:
    return int(torch.argmax(logits))
