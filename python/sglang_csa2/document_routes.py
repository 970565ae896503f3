"""HTTP routes of pinned documents, and those of a folder loaded before the server answers."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from csa2.document_folder import MAX_DOCUMENT_BYTES, read_folder
from csa2.documents import DocumentBody, check_id, read_body
from csa2.errors import DocumentConflictError, DocumentError, OptionError
from sglang_csa2 import http
from sglang_csa2.document_tokens import document_text, token_ids

logger = logging.getLogger(__name__)

DOCUMENTS_PATH = "/csa2/documents"
DOCUMENT_PATH = DOCUMENTS_PATH + "/{document_id}"
TEXT_PATH = DOCUMENT_PATH + "/text"
POLL_S = 0.05
"""Between two looks at a document that is being encoded."""


@dataclass
class _Content:
    """What a document was made of. The scheduler keeps its whole pages only."""

    asked: DocumentBody
    ids: list[int]
    kept: int
    text: str | None = None


_contents: dict[str, _Content] = {}
"""Of the documents there are, by id: programs read them before each run, which must not wait for a batch."""
_expiries: dict[str, asyncio.Task[None]] = {}
"""Tasks that remove documents when their time is over, by id. Here, in one process: clocks of ranks differ."""


def add_document_routes(app: Any) -> None:
    """Add the routes to the FastAPI `app`; all of them protected as SGLang's own admin routes are."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    admin = auth_level(AuthLevel.ADMIN_OPTIONAL)
    app.add_api_route(DOCUMENTS_PATH, admin(post_document), methods=["POST"])
    app.add_api_route(DOCUMENTS_PATH, admin(get_documents), methods=["GET"])
    app.add_api_route(DOCUMENTS_PATH, admin(delete_documents), methods=["DELETE"])
    app.add_api_route(DOCUMENT_PATH, admin(get_document), methods=["GET"])
    app.add_api_route(DOCUMENT_PATH, admin(delete_document), methods=["DELETE"])
    app.add_api_route(TEXT_PATH, admin(get_document_text), methods=["GET"])


def load_at_start(app: Any, folder: str) -> None:
    """Let `app` encode the documents of `folder` before it takes its first request."""
    serve = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(inner: Any) -> AsyncIterator[Any]:
        await load_folder(folder)
        context: AbstractAsyncContextManager[Any] = serve(inner)
        async with context as state:
            yield state

    app.router.lifespan_context = lifespan


async def load_folder(folder: str) -> None:
    """Encode and pin the documents of a folder, one after the other.

    Raises:
        OptionError: names the first that cannot be pinned, and why.
    """
    from sglang.srt.entrypoints.http_server import get_global_state

    state = get_global_state()
    documents = read_folder(folder)
    for asked in documents:
        try:
            ids = token_ids(asked, state.tokenizer_manager, state.template_manager)
        except DocumentError as error:
            raise OptionError(f"--csa2-documents {folder}: {asked.id}: {error}") from error
        ok, data, _ = await _pin(asked, ids)
        if not ok:
            raise OptionError(f"--csa2-documents {folder}: {data['message']}")
    logger.info("csa2 documents of %s pinned, #document: %d", folder, len(documents))


async def post_document(request: Request) -> Response:
    """Encode a document and pin it: {id, text | messages | input_ids, format?, ttl?, extra_key?}."""
    from sglang.srt.entrypoints.http_server import get_global_state

    state = get_global_state()
    try:
        asked = read_body(await http.read_bytes(request, MAX_DOCUMENT_BYTES))
        ids = token_ids(asked, state.tokenizer_manager, state.template_manager)
    except DocumentError as error:
        return http.error_response(str(error), HTTPStatus.BAD_REQUEST)
    except http.BodyTooLargeError as error:
        return http.error_response(str(error), HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    ok, data, status = await _pin(asked, ids)
    return http.json_response(data, status) if ok else http.error_response(data["message"], status)


async def get_documents() -> Response:
    """All documents."""
    return await http.reply("documents")


async def get_document(document_id: str) -> Response:
    """One document."""
    return await _of_one("document", document_id)


async def get_document_text(document_id: str) -> Response:
    """What a prompt begins with to find a document: {id, text, messages, extra_key}; `messages` if it was made of them."""
    from sglang.srt.entrypoints.http_server import get_global_state

    try:
        check_id(document_id)
        content = _contents.get(document_id)
        if content is None:
            return http.error_response(f"there is no document {document_id!r}", HTTPStatus.NOT_FOUND)
        if content.text is None:
            tokenizer = get_global_state().tokenizer_manager.tokenizer
            content.text = document_text(content.asked, content.ids, content.kept, tokenizer)
    except DocumentConflictError as error:
        return http.error_response(str(error), HTTPStatus.CONFLICT)
    except DocumentError as error:
        return http.error_response(str(error), HTTPStatus.BAD_REQUEST)
    asked = content.asked
    shown = {"id": asked.id, "text": content.text, "messages": asked.messages, "extra_key": asked.extra_key}
    return http.json_response(shown, HTTPStatus.OK)


async def delete_document(document_id: str) -> Response:
    """Unpin a document."""
    response = await _of_one("document_remove", document_id)
    if response.status_code == HTTPStatus.OK:
        _contents.pop(document_id, None)
        _expire(document_id, None, None)
    return response


async def delete_documents() -> Response:
    """Unpin all documents."""
    response = await http.reply("documents_remove")
    if response.status_code == HTTPStatus.OK:
        _contents.clear()
        for document_id in tuple(_expiries):
            _expire(document_id, None, None)
    return response


async def _of_one(op: str, document_id: str) -> Response:
    try:
        check_id(document_id)
    except DocumentError as error:
        return http.error_response(str(error), HTTPStatus.BAD_REQUEST)
    return await http.reply(op, {"document_id": document_id})


async def _pin(asked: DocumentBody, ids: list[int]) -> tuple[bool, dict[str, Any], int]:
    """Have a document encoded, and wait for it: (whether it is resident, what is known of it or a message, status)."""
    ok, data, status = await http.ask(
        "document_add",
        {
            "document_id": asked.id,
            "input_ids": ids,
            "page_format": asked.format,
            "extra_key": asked.extra_key,
            "ttl": asked.ttl,
        },
    )
    while ok and data["state"] == "waiting":
        await asyncio.sleep(POLL_S)
        serial = data["serial"]
        ok, data, status = await http.ask("document", {"document_id": asked.id})
        if ok and data["serial"] != serial:
            return False, {"message": f"document {asked.id!r} was removed while it was encoded"}, HTTPStatus.CONFLICT
    if ok and data["state"] == "failed":
        message = f"document {asked.id!r} could not be encoded: {data['message']}. Send it again"
        return False, {"message": message}, HTTPStatus.SERVICE_UNAVAILABLE
    if ok:
        _contents[asked.id] = _Content(asked, ids, data["tokens"])
        _expire(asked.id, data["serial"], asked.ttl)
    return ok, data, status


def _expire(document_id: str, serial: int | None, ttl: float | None) -> None:
    """Remove document `serial` in `ttl` seconds; None: never."""
    if (before := _expiries.pop(document_id, None)) is not None:
        before.cancel()
    if ttl is not None:
        _expiries[document_id] = asyncio.ensure_future(_remove_later(document_id, serial, ttl))


async def _remove_later(document_id: str, serial: int | None, ttl: float) -> None:
    await asyncio.sleep(ttl)
    _expiries.pop(document_id, None)
    ok, data, _ = await http.ask("document_remove", {"document_id": document_id, "serial": serial})
    if ok:
        _contents.pop(document_id, None)
    else:
        logger.warning("csa2 document %s could not be removed when its time was over: %s", document_id, data["message"])
