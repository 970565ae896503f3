"""Pinned documents: what may be asked for, and the book of those that a server keeps.

The book holds token ids, so that a document can be encoded again after new weights. Everything in it follows from the order
of the calls: every rank keeps the same book.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from csa2.errors import DocumentConflictError, DocumentError, UnknownDocumentError

MAX_TTL_S = 366 * 86400.0
MAX_EXTRA_KEY_CHARS = 512
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

State = Literal["waiting", "resident", "failed"]


class DocumentBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `POST /csa2/documents` takes."""

    id: str
    text: str | None = None
    """Tokenised as /generate does."""
    messages: list[dict[str, Any]] | None = None
    """Rendered by the chat template, without a turn opened for an answer."""
    input_ids: list[int] | None = None
    format: str | None = None
    """Page format; None: the one of shared pages."""
    ttl: float | None = None
    """Seconds until it is unpinned; None: until somebody does."""
    extra_key: str | None = None
    """Namespace of the radix tree, as in requests."""


class Document(msgspec.Struct, kw_only=True):
    """One entry of the book."""

    id: str
    tokens: tuple[int, ...]
    """Whole pages only."""
    extra_key: str | None
    format: str
    ttl: float | None
    serial: int
    """Of the request that brought it, the same in every replica."""
    state: State = "waiting"
    message: str = ""
    """Why it failed."""
    attempts: int = 0
    """How often its encoding was started."""
    hits_before: int = 0
    """Requests that its last page had when it was pinned."""

    def same_content(self, tokens: tuple[int, ...], extra_key: str | None, page_format: str) -> bool:
        """Whether it would be encoded in the same way."""
        return (self.tokens, self.extra_key, self.format) == (tokens, extra_key, page_format)


class DocumentView(msgspec.Struct, frozen=True, kw_only=True):
    """What is told about a document."""

    id: str
    state: State
    tokens: int
    """Tokens that are kept: whole pages."""
    pages: int
    bytes: int
    """Bytes of its pages now, those that it shares with other documents included; 0 until it is resident."""
    format: str
    """Page format asked for."""
    formats: dict[str, int]
    """Its pages by the format they have now."""
    hits: int
    """Requests that found all of it since it was encoded."""
    ttl: float | None
    extra_key: str | None
    serial: int
    message: str


class DocumentBook:
    """Documents by id, in the order in which they came."""

    def __init__(self) -> None:
        self._documents: dict[str, Document] = {}

    def __len__(self) -> int:
        return len(self._documents)

    def __iter__(self) -> Iterator[Document]:
        return iter(tuple(self._documents.values()))

    def __contains__(self, document: Document) -> bool:
        return self._documents.get(document.id) is document

    def get(self, document_id: str) -> Document:
        """The document of that id.

        Raises:
            UnknownDocumentError: there is none.
        """
        if document_id not in self._documents:
            raise UnknownDocumentError(f"there is no document {document_id!r}: GET /csa2/documents lists those there are")
        return self._documents[document_id]

    def known(self, document_id: str, tokens: tuple[int, ...], extra_key: str | None, page_format: str) -> Document | None:
        """The document of that id if it has the same content; None if there is none, or one that failed.

        Raises:
            DocumentConflictError: it has another content.
        """
        document = self._documents.get(document_id)
        if document is None or document.state == "failed":
            return None
        if not document.same_content(tokens, extra_key, page_format):
            raise DocumentConflictError(
                f"document {document_id!r} exists with other content, extra_key or format: DELETE it first, or choose "
                f"another id"
            )
        return document

    def add(
        self,
        document_id: str,
        tokens: tuple[int, ...],
        extra_key: str | None,
        page_format: str,
        ttl: float | None,
        serial: int,
    ) -> Document:
        """A new document, in the place of one of the same id that failed."""
        document = Document(id=document_id, tokens=tokens, extra_key=extra_key, format=page_format, ttl=ttl, serial=serial)
        self._documents.pop(document_id, None)
        self._documents[document_id] = document
        return document

    def remove(self, document_id: str, serials: Sequence[int] | None = None) -> Document:
        """Take a document out.

        Args:
            serials: only if it is one of these, and no other one of the same id.

        Raises:
            UnknownDocumentError: there is none.
        """
        document = self.get(document_id)
        if serials is not None and document.serial not in serials:
            raise UnknownDocumentError(
                f"document {document_id!r} is number {document.serial}, not {' or '.join(map(str, serials))}"
            )
        return self._documents.pop(document_id)


def read_body(body: bytes) -> DocumentBody:
    """The JSON of a request for a document, checked as far as it can be without a model.

    Raises:
        DocumentError: it is not JSON, has wrong types, or a value that makes no sense.
    """
    try:
        asked = msgspec.json.decode(body, type=DocumentBody)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DocumentError(f"the body is no document: {error}") from error
    check_id(asked.id)
    sources = [name for name in ("text", "messages", "input_ids") if getattr(asked, name) is not None]
    if len(sources) != 1:
        given = " and ".join(sources) if sources else "none of them"
        raise DocumentError(f"a document has exactly one of text, messages and input_ids, this one has {given}")
    if not getattr(asked, sources[0]):
        raise DocumentError(f"{sources[0]} is empty: give the content of the document")
    if asked.ttl is not None and not (math.isfinite(asked.ttl) and 0 < asked.ttl <= MAX_TTL_S):
        raise DocumentError(f"ttl is {asked.ttl:g}: give seconds above 0 and up to {MAX_TTL_S:g}, or leave it out")
    if asked.extra_key is not None and len(asked.extra_key) > MAX_EXTRA_KEY_CHARS:
        raise DocumentError(f"extra_key has {len(asked.extra_key)} characters: at most {MAX_EXTRA_KEY_CHARS} are allowed")
    return asked


def check_id(document_id: str) -> None:
    """Refuse ids that are no plain names.

    Raises:
        DocumentError: other characters than those of a file name, or too many.
    """
    if not _ID.fullmatch(document_id):
        shown = document_id if len(document_id) <= 40 else f"{document_id[:40]}..."
        raise DocumentError(
            f"id {shown!r} is not allowed: give 1 to 128 letters, digits, dots, dashes and underscores, and begin with a "
            f"letter or a digit"
        )


def whole_pages(tokens: Sequence[int], page_size: int, vocab_size: int, max_tokens: int) -> tuple[int, ...]:
    """The tokens of the whole pages of a document, which are what is kept.

    Args:
        max_tokens: tokens of the longest prompt that is served.

    Raises:
        DocumentError: a token that does not exist, less than a page, or more than the longest prompt.
    """
    bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise DocumentError(f"token id {bad} does not exist: ids of this model are 0 to {vocab_size - 1}")
    if len(tokens) < page_size:
        raise DocumentError(
            f"the document has {len(tokens)} tokens, less than one page of {page_size}: only whole pages are kept, so give "
            f"a longer one"
        )
    if len(tokens) > max_tokens:
        raise DocumentError(
            f"the document has {len(tokens)} tokens, more than the longest prompt that this server takes ({max_tokens}): "
            f"split it"
        )
    return tuple(tokens[: len(tokens) // page_size * page_size])
