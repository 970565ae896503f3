"""Pinning a document from the front end: sent to all schedulers, waited for, taken back, removed when its time is over."""

import asyncio
import itertools
import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from csa2.document_folder import read_folder
from csa2.documents import DocumentBody
from csa2.errors import DocumentError, OptionError
from sglang_csa2 import control
from sglang_csa2.document_tokens import token_ids
from sglang_csa2.replicas import DONE_BY, parts_of

logger = logging.getLogger(__name__)

POLL_S = 0.05
"""Between two looks at a document that is being encoded."""


@dataclass
class Content:
    """What a document was made of. The scheduler keeps its whole pages only."""

    asked: DocumentBody
    ids: list[int]
    kept: int
    text: str | None = None


contents: dict[str, Content] = {}
"""Of the documents there are, by id: programs read them before each run, which must not wait for a batch."""
_serials = itertools.count(1)
"""Of requests for documents, so that a replica can be told which one is meant."""
_expiries: dict[str, asyncio.Task[None]] = {}
"""Tasks that remove documents when their time is over, by id. Here, in one process: clocks of ranks differ."""


async def load_folder(folder: str, tokenizer_manager: Any, template_manager: Any) -> None:
    """Encode and pin the documents of a folder, one after the other.

    Raises:
        OptionError: names the first that cannot be pinned, and why.
    """
    documents = read_folder(folder)
    for asked in documents:
        try:
            ids = token_ids(asked, tokenizer_manager, template_manager)
        except DocumentError as error:
            raise OptionError(f"--csa2-documents {folder}: {asked.id}: {error}") from error
        ok, data, _ = await pin(tokenizer_manager, asked, ids)
        if not ok:
            raise OptionError(f"--csa2-documents {folder}: {data['message']}")
    logger.info("csa2 documents of %s pinned, #document: %d", folder, len(documents))


async def pin(tokenizer_manager: Any, asked: DocumentBody, ids: list[int]) -> control.Outcome:
    """Have a document encoded, and wait for it: (whether it is resident, what is known of it or a message, status).

    Refused by one replica, it is taken back from those that had begun.
    """
    serial = next(_serials)
    payload = {"document_id": asked.id, "input_ids": ids, "page_format": asked.format, "extra_key": asked.extra_key}
    ok, data, status = await control.ask(tokenizer_manager, "document_add", {**payload, "ttl": asked.ttl, "serial": serial})
    if not ok and data.get(DONE_BY):
        await _remove(tokenizer_manager, asked.id, [serial], "was refused by another replica")
    while ok and data["state"] == "waiting":
        await asyncio.sleep(POLL_S)
        serials = _serials_of(data)
        ok, data, status = await control.ask(tokenizer_manager, "document", {"document_id": asked.id})
        if ok and _serials_of(data) != serials:
            return False, {"message": f"document {asked.id!r} was removed while it was encoded"}, HTTPStatus.CONFLICT
    if ok and data["state"] == "failed":
        message = f"document {asked.id!r} could not be encoded: {data['message']}. Send it again"
        return False, {"message": message}, HTTPStatus.SERVICE_UNAVAILABLE
    if ok:
        contents[asked.id] = Content(asked, ids, data["tokens"])
        expire(tokenizer_manager, asked.id, _serials_of(data), asked.ttl)
    return ok, data, status


def expire(tokenizer_manager: Any, document_id: str, serials: list[int], ttl: float | None) -> None:
    """Remove the document that has one of `serials` in `ttl` seconds; None: never."""
    keep(document_id)
    if ttl is not None:
        later = _remove_later(tokenizer_manager, document_id, serials, ttl)
        _expiries[document_id] = asyncio.ensure_future(later)


def keep(document_id: str | None = None) -> None:
    """No longer remove a document by itself; None: any of them."""
    for name in tuple(_expiries) if document_id is None else (document_id,):
        if (before := _expiries.pop(name, None)) is not None:
            before.cancel()


def forget(document_id: str | None = None) -> None:
    """A document was removed; None: all of them."""
    keep(document_id)
    for name in tuple(contents) if document_id is None else (document_id,):
        contents.pop(name, None)


def _serials_of(data: dict[str, Any]) -> list[int]:
    """Serials of one document, of each replica that has it."""
    return [part["serial"] for part in parts_of(data)]


async def _remove_later(tokenizer_manager: Any, document_id: str, serials: list[int], ttl: float) -> None:
    await asyncio.sleep(ttl)
    _expiries.pop(document_id, None)
    if await _remove(tokenizer_manager, document_id, serials, "had its time"):
        contents.pop(document_id, None)


async def _remove(tokenizer_manager: Any, document_id: str, serials: list[int], why: str) -> bool:
    payload = {"document_id": document_id, "serials": serials}
    ok, data, _ = await control.ask(tokenizer_manager, "document_remove", payload)
    if not ok:
        logger.warning("csa2 document %s %s and could not be removed: %s", document_id, why, data["message"])
    return ok
