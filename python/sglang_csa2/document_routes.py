"""HTTP routes of pinned documents, and those of a folder loaded before the server answers."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from csa2.document_folder import MAX_DOCUMENT_BYTES
from csa2.documents import check_id, read_body
from csa2.errors import DocumentConflictError, DocumentError
from sglang_csa2 import http
from sglang_csa2.document_pinning import contents, forget, load_folder, pin
from sglang_csa2.document_tokens import document_text, token_ids

DOCUMENTS_PATH = "/csa2/documents"
DOCUMENT_PATH = DOCUMENTS_PATH + "/{document_id}"
TEXT_PATH = DOCUMENT_PATH + "/text"


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
    from sglang.srt.entrypoints.http_server import get_global_state

    serve = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(inner: Any) -> AsyncIterator[Any]:
        state = get_global_state()
        await load_folder(folder, state.tokenizer_manager, state.template_manager)
        context: AbstractAsyncContextManager[Any] = serve(inner)
        async with context as inner_state:
            yield inner_state

    app.router.lifespan_context = lifespan


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
    ok, data, status = await pin(state.tokenizer_manager, asked, ids)
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
        content = contents.get(document_id)
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
        forget(document_id)
    return response


async def delete_documents() -> Response:
    """Unpin all documents."""
    response = await http.reply("documents_remove")
    if response.status_code == HTTPStatus.OK:
        forget()
    return response


async def _of_one(op: str, document_id: str) -> Response:
    try:
        check_id(document_id)
    except DocumentError as error:
        return http.error_response(str(error), HTTPStatus.BAD_REQUEST)
    return await http.reply(op, {"document_id": document_id})
