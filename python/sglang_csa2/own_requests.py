"""Requests of our own: ordinary ones to SGLang, so that chunks, admission and the tree are its own; only their output goes
nowhere. They follow from what all ranks know alike, so every rank makes the same.

UPSTREAM(sglang 0.5.23): AROUND hooks of `SchedulerOutputStreamer.stream_output` and `Scheduler.send_abort_output`.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Protocol

_OWNER = "csa2_owner"
"""Attribute of a request of ours: who made it. Attribute of a scheduler: whose request is on its way into the queue."""


class Owner(Protocol):
    """Makes requests."""

    def queued(self, req: Any) -> None:
        """SGLang made `req` of what was submitted, and is about to queue it."""

    def ended(self, req: Any) -> None:
        """`req` finished; told more than once."""

    def aborted(self, req: Any, reason: dict[str, Any] | None) -> None:
        """`req` was taken out of the queue."""


def owner_of(req: Any) -> Owner | None:
    """Who made `req`; None: a client."""
    owner: Owner | None = getattr(req, _OWNER, None)
    return owner


def submit(
    scheduler: Any, owner: Owner, rid: str, tokens: Sequence[int], max_new_tokens: int, extra_key: str | None
) -> None:
    """Queue a greedy request of `owner`. A scheduler that cannot take it ends it at once, like any other."""
    setattr(scheduler, _OWNER, owner)
    try:
        scheduler.handle_generate_request(tokenized_request(rid, tokens, extra_key, max_new_tokens=max_new_tokens))
    finally:
        setattr(scheduler, _OWNER, None)


def before_queue(scheduler: Any, req: Any) -> None:
    """Tell the owner of a request that is about to be queued for the first time."""
    owner = owner_of(scheduler)
    if owner is not None:
        setattr(req, _OWNER, owner)
        owner.queued(req)


def tokenized_request(rid: str, tokens: Sequence[int], extra_key: str | None = None, **sampling: Any) -> Any:
    """A greedy request as it arrives at a scheduler.

    Args:
        sampling: more sampling parameters, by SGLang's names.
    """
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, **sampling)
    params.normalize(None)
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=array("q", tokens),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        extra_key=extra_key,
    )


def around_stream_output(orig: Callable[..., Any], self: Any, reqs: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Keep the outputs of our own requests to ourselves: nobody waits for them."""
    others = [req for req in reqs if owner_of(req) is None]
    return None if reqs and not others else orig(self, others if len(others) < len(reqs) else reqs, *args, **kwargs)


def around_send_abort_output(
    orig: Callable[..., Any], self: Any, abort_req: Any, req: Any, *args: Any, **kwargs: Any
) -> Any:
    """Tell the owner of a request that was aborted while it waited."""
    owner = owner_of(req)
    if owner is None:
        return orig(self, abort_req, req)
    owner.aborted(req, abort_req.finished_reason)
    return None
