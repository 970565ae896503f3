"""The document routes of a server, from the client of an SGLang program, with the address and key of its backend.

UPSTREAM(sglang 0.5.23): `sglang.utils.http_request` sends the request as `RuntimeEndpoint` sends its own.
"""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.error import URLError

from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.utils import http_request

from csa2.errors import BackendError, DocumentConflictError, DocumentError, UnknownDocumentError

PATH = "/csa2/documents"

Messages = Sequence[Mapping[str, Any]]
Content = str | Messages
"""Of a document: text, or messages for the chat template."""


class DocumentClient:
    """Documents on the server behind a backend.

    Every method raises BackendError when the server cannot be reached, has no documents, or refuses the key.
    """

    def __init__(self, backend: Any) -> None:
        """Raises BackendError: the backend is none that talks to a server of SGLang."""
        endpoint = getattr(backend, "endpoint", backend)
        if not isinstance(endpoint, RuntimeEndpoint):
            raise BackendError(
                f"the backend of the program is {type(endpoint).__name__}, which has no pinned documents: use "
                f"sgl.RuntimeEndpoint(url) of a server started with --kv-compress csa2"
            )
        self._endpoint = endpoint

    def text(self, document_id: str) -> tuple[str, list[dict[str, Any]] | None]:
        """What a prompt begins with to find a document: (text, messages that it was made of or None).

        Raises:
            UnknownDocumentError: the server has no such document.
            DocumentConflictError: a program cannot begin with it: it has an `extra_key`, or is the tokens of no text.
        """
        shown = self._ask("GET", f"{PATH}/{document_id}/text")
        if shown["extra_key"] is not None:
            raise DocumentConflictError(
                f"document {document_id!r} has the extra_key {shown['extra_key']!r}, and programs send none: pin it without"
            )
        return shown["text"], shown["messages"]

    def pin(self, document_id: str, content: Content, page_format: str | None, ttl: float | None) -> None:
        """Encode a document, if it is not there already, and wait for it.

        Raises:
            DocumentError: it makes no sense to the server.
            DocumentConflictError: the id has other content, or there is no room.
        """
        source = {"text": content} if isinstance(content, str) else {"messages": [dict(message) for message in content]}
        self._ask("POST", PATH, {"id": document_id, **source, "format": page_format, "ttl": ttl})

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        endpoint = self._endpoint
        key = getattr(endpoint, "admin_api_key", None) or endpoint.api_key
        try:
            answer = http_request(endpoint.base_url + path, json=body, api_key=key, verify=endpoint.verify, method=method)
            status, text = answer.status_code, answer.text
            data = answer.json() if text else {}
        except (URLError, OSError) as error:
            raise BackendError(f"{method} {endpoint.base_url}{path} failed: {error}. Is the server running?") from error
        except ValueError as error:
            raise BackendError(f"{method} {endpoint.base_url}{path} was not answered with JSON: {text[:200]}") from error
        if status == HTTPStatus.OK:
            shown: dict[str, Any] = data
            return shown
        raise self._error(status, data)

    def _error(self, status: int, data: Any) -> DocumentError | BackendError:
        """The error that a status means. SGLang answers what it does not know with a `detail`, csa2 with an `error`."""
        url = self._endpoint.base_url
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return BackendError(
                f"{url} does not take the key of the backend for documents: with --admin-api-key, set "
                f"backend.admin_api_key to that key"
            )
        error = data.get("error") if isinstance(data, dict) else None
        if not isinstance(error, dict):
            return BackendError(f"{url} has no pinned documents (status {status}): start the server with --kv-compress csa2")
        errors: dict[int, type[DocumentError | BackendError]] = {
            HTTPStatus.NOT_FOUND: UnknownDocumentError,
            HTTPStatus.CONFLICT: DocumentConflictError,
            HTTPStatus.BAD_REQUEST: DocumentError,
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE: DocumentError,
        }
        return errors.get(status, BackendError)(str(error.get("message")))
