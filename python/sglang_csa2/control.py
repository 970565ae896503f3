"""Control messages between the front end and the schedulers: one request, one reply of each, taken between two batches.

The launcher calls `install`, the scheduler `attach`. New operations are added to `OPERATIONS`.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from sglang.srt.managers.io_struct import BaseReq, hook_custom_types
from sglang.utils import TypeBasedDispatcher

from csa2.errors import Csa2Error, DocumentConflictError, DocumentError, OptionError, UnknownDocumentError
from sglang_csa2 import replicas
from sglang_csa2.replicas import Answer

logger = logging.getLogger(__name__)

REPLY_TIMEOUT_S = 30.0
"""Longer than any batch should take; a scheduler silent for longer is reported, not waited for."""

COMMUNICATOR = "csa2_control"


class OperationError(Csa2Error, RuntimeError):
    """A control operation that was refused or failed; `status` is the HTTP status that says which."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ReplyTimeoutError(OperationError):
    """The scheduler did not answer in time."""


class Csa2ControlReq(BaseReq, kw_only=True):  # type: ignore[call-arg]  # an untyped base
    """Asks the scheduler for one operation. `payload` holds JSON-able builtins only."""

    op: str
    payload: dict[str, Any] = msgspec.field(default_factory=dict)


class Csa2ControlReqOutput(BaseReq, kw_only=True):  # type: ignore[call-arg]  # an untyped base
    """The reply. `data` holds JSON-able builtins: the result, or {"message": text} when not `ok`."""

    ok: bool
    status: int
    data: dict[str, Any]
    dp_rank: int = 0
    """Replica that answers."""


Outcome = tuple[bool, dict[str, Any], int]
"""Whether an operation went well, its data or {"message": text}, and the HTTP status."""

Operation = Callable[[Any, dict[str, Any]], Any]
"""Runs in the scheduler between two batches: (scheduler, payload) -> a struct or a dict of JSON-able values.

Raises OperationError to refuse.
"""


def _stats(scheduler: Any, _payload: dict[str, Any]) -> Any:
    # Lazy: the launcher imports this module too and has no use for the reader.
    from sglang_csa2.stats import read_stats

    return read_stats(scheduler)


def _set_ratio(scheduler: Any, payload: dict[str, Any]) -> Any:
    """{"ratio": number from 1 to 8, or None to follow memory} -> what holds now."""
    ratio = scheduler.csa2_steward.ratio
    try:
        ratio.set(payload["ratio"])
    except OptionError as error:
        raise OperationError(str(error), HTTPStatus.CONFLICT) from error
    return {"ratio": ratio.controller.target, "automatic": ratio.controller.is_automatic}


def _document_operation(run: Callable[[Any, dict[str, Any]], Any]) -> Operation:
    """`run` on the documents of a scheduler, its errors as statuses."""

    def operation(scheduler: Any, payload: dict[str, Any]) -> Any:
        try:
            return run(scheduler.csa2_steward.documents, payload)
        except DocumentError as error:
            raise OperationError(str(error), _document_status(error)) from error

    return operation


def _document_status(error: DocumentError) -> int:
    if isinstance(error, UnknownDocumentError):
        return HTTPStatus.NOT_FOUND
    return HTTPStatus.CONFLICT if isinstance(error, DocumentConflictError) else HTTPStatus.BAD_REQUEST


OPERATIONS: dict[str, Operation] = {
    "stats": _stats,
    "ratio": _set_ratio,
    "document_add": _document_operation(lambda documents, payload: documents.add(**payload)),
    "document": _document_operation(lambda documents, payload: documents.view(documents.book.get(payload["document_id"]))),
    "documents": _document_operation(lambda documents, _: {"documents": [documents.view(d) for d in documents.book]}),
    "document_remove": _document_operation(lambda documents, payload: documents.remove(**payload)),
    "documents_remove": _document_operation(
        lambda documents, _: {"documents": [documents.remove(d.id) for d in documents.book]}
    ),
}


def install() -> None:
    """Let TokenizerManagers built after this call exchange control messages. For launcher processes; idempotent."""
    from sglang.srt.managers import tokenizer_control_mixin

    register_types()
    # UPSTREAM(sglang 0.5.23: _COMMUNICATOR_SPECS is private; there is no public way to add a communicator)
    specs = tokenizer_control_mixin._COMMUNICATOR_SPECS
    if all(spec[0] != COMMUNICATOR for spec in specs):
        specs.append((COMMUNICATOR, Csa2ControlReqOutput))


def attach(scheduler: Any, dp_rank: int = 0) -> None:
    """Let `scheduler`, replica `dp_rank`, answer control messages. Call once, after its init_request_dispatcher."""
    register_types()

    def answer(req: Csa2ControlReq) -> Csa2ControlReqOutput:
        reply = handle(scheduler, req)
        reply.dp_rank = dp_rank
        return reply

    scheduler._request_dispatcher += TypeBasedDispatcher([(Csa2ControlReq, answer)])


def register_types() -> None:
    """Let this process encode and decode the messages. The decoder is a closed union; registering twice changes nothing."""
    hook_custom_types(Csa2ControlReq, Csa2ControlReqOutput)


def handle(scheduler: Any, req: Csa2ControlReq) -> Csa2ControlReqOutput:
    """Run one operation. Never raises: an exception here would end the scheduler, and with it the server."""
    try:
        # Converted here: a value that cannot be sent must fail before SGLang encodes the reply unguarded.
        data = msgspec.to_builtins(_operation(req.op)(scheduler, req.payload))
        return Csa2ControlReqOutput(ok=True, status=int(HTTPStatus.OK), data=data)
    except OperationError as error:
        return _failure(error, error.status)
    except Exception as error:
        logger.exception("csa2 control operation %r failed", req.op)
        return _failure(error, HTTPStatus.INTERNAL_SERVER_ERROR)


def _operation(op: str) -> Operation:
    if op not in OPERATIONS:
        names = ", ".join(sorted(OPERATIONS))
        raise OperationError(f"unknown operation {op!r}: choose one of {names}", HTTPStatus.BAD_REQUEST)
    return OPERATIONS[op]


def _failure(error: Exception, status: int) -> Csa2ControlReqOutput:
    return Csa2ControlReqOutput(ok=False, status=int(status), data={"message": str(error) or type(error).__name__})


# One queue per communicator, whose own lock does not tell whether a request has been sent.
_turns: WeakKeyDictionary[Any, asyncio.Lock] = WeakKeyDictionary()


class _Exchange:
    """One request on its way. The communicator attributes replies by order alone, so turns are taken in a queue."""

    def __init__(self, communicator: Any, req: Csa2ControlReq) -> None:
        self._communicator = communicator
        self._req = req
        self.sent = False

    async def run(self) -> list[Csa2ControlReqOutput]:
        """Send in turn and wait for the replies of all replicas, which come in any order."""
        async with _turns.setdefault(self._communicator, asyncio.Lock()):
            self.sent = True
            replies: list[Csa2ControlReqOutput] = await self._communicator(self._req)
        return sorted(replies, key=lambda reply: reply.dp_rank)


async def call(
    tokenizer_manager: Any, op: str, payload: dict[str, Any] | None = None, *, timeout_s: float = REPLY_TIMEOUT_S
) -> Csa2ControlReqOutput:
    """Ask the scheduler for `op` and return its reply, with --dp-size what the replies of all of them say together.

    Any number of calls may run at once.

    Raises:
        OptionError: the server runs without `--kv-compress csa2`.
        ReplyTimeoutError: no reply within `timeout_s`. A request still waiting for its turn is withdrawn; one that
            was sent may yet take effect.
    """
    if getattr(tokenizer_manager.server_args, "kv_compress", None) is None:
        # A scheduler without our dispatcher entry would die of the unknown message.
        raise OptionError("the compressed cache is off: start with --kv-compress csa2 (Engine: kv_compress='csa2')")
    tokenizer_manager.auto_create_handle_loop()
    communicator = getattr(tokenizer_manager, f"{COMMUNICATOR}_communicator")
    exchange = _Exchange(communicator, Csa2ControlReq(op=op, payload=payload or {}))
    task = asyncio.ensure_future(exchange.run())
    try:
        # asyncio.wait does not cancel: an exchange given up after sending would hand its late reply to the next one.
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    finally:
        if not exchange.sent:
            task.cancel()
    if not done:
        raise ReplyTimeoutError(
            f"the scheduler did not answer {op!r} within {timeout_s:g} s: it is busy with a long batch or hangs. "
            f"Try again, and look at its log",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )
    return combined_reply(op, task.result())


def combined_reply(op: str, replies: Sequence[Csa2ControlReqOutput]) -> Csa2ControlReqOutput:
    """What the `replies` of all replicas to `op` say together; the reply itself where there is one replica."""
    if len(replies) == 1:
        return replies[0]
    answers = [Answer(reply.ok, reply.status, reply.data) for reply in replies]
    together = replicas.combined(op, answers)
    return Csa2ControlReqOutput(ok=together.ok, status=together.status, data=together.data)


async def ask(tokenizer_manager: Any, op: str, payload: dict[str, Any] | None = None) -> Outcome:
    """As `call`, with a time-out as an outcome too."""
    try:
        answer = await call(tokenizer_manager, op, payload)
    except ReplyTimeoutError as error:
        return False, {"message": str(error)}, error.status
    return answer.ok, answer.data, answer.status


def engine_stats(engine: Any) -> dict[str, Any]:
    """The content of GET /csa2/stats for an in-process `sgl.Engine`. Inside a running loop, await `call` instead.

    Raises:
        OptionError: the engine runs without `kv_compress="csa2"`.
        OperationError: the scheduler failed to read the statistics, or did not answer.
    """
    reply: Csa2ControlReqOutput = engine.loop.run_until_complete(call(engine.tokenizer_manager, "stats"))
    if not reply.ok:
        raise OperationError(reply.data["message"], reply.status)
    return reply.data
