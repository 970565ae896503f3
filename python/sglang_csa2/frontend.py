"""Pinned documents in programs of the SGLang language.

    @sgl.function
    def answer(s, question):
        s += static("manual")
        s += "\\nQ: " + question + "\\nA:" + sgl.gen("answer", max_tokens=32)

    @sgl.function
    @fixed_prefix([{"role": "system", "content": "You answer ..."}])
    def chat(s, question): ...

A program's prompt is one string, so a document can only be found where the string begins with its text. Importing this
module starts nothing. The client needs no plugin, only a server with `--kv-compress csa2` behind the program's backend.

UPSTREAM(sglang 0.5.23): wraps `StreamExecutor.submit`, because an expression cannot see the program that it is put into.
"""

import functools
import hashlib
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from sglang.lang.interpreter import StreamExecutor
from sglang.lang.ir import SglArgument, SglConstantText, SglExpr, SglExprList, SglFunction
from sglang.lang.tracer import TracingScope

from csa2.errors import Csa2Error, DocumentConflictError, ProgramError, UnknownDocumentError
from sglang_csa2.document_client import Content, DocumentClient

__all__ = ["fixed_prefix", "static"]


def static(document_id: str, content: Content | None = None, *, format: str | None = None, ttl: float | None = None) -> Any:
    """The text of a pinned document, for the beginning of a program: `s += static("manual")`.

    Args:
        content: text, or messages for the chat template. Given, the document is pinned before it is first used, and again
            if it is gone (a server that was restarted, a `ttl` that is over). None: the server has it.
        format, ttl: as in `POST /csa2/documents`.

    `s +=` raises:
        ProgramError: something stands before it in the program, or a role is open.
        UnknownDocumentError: the server has no such document, and no `content` is given.
        DocumentConflictError: the id has other content, there is no room, or programs cannot find it.
        DocumentError: the server cannot make a document of `content`.
        BackendError: no server with pinned documents behind the program's backend.
    """
    for unknown in (document_id, content):
        if isinstance(unknown, SglArgument):
            return unknown  # of a tracer: the constant beginning of the program ends here
    if not document_id or not isinstance(document_id, str):
        raise ProgramError(f"static({document_id!r}): give the id of a document")
    if content is None and (format, ttl) != (None, None):
        raise ProgramError(f"static({document_id!r}): format and ttl are those of new content; the server has its own")
    return _Static(_Source(document_id, _frozen(content), format, ttl))


def fixed_prefix(
    content: Content, *, document_id: str | None = None, format: str | None = None, ttl: float | None = None
) -> Callable[[Any], Any]:
    """Decorator: the program begins with `content`, a document that is pinned before the first run.

    Args:
        content: text, or messages for the chat template, such as a system prompt. At least one page.
        document_id: its name among the documents; None: one made of the content, so that a change is another document.
        format, ttl: as in `POST /csa2/documents`.

    Goes below or above `@sgl.function`. Runs raise what `s += static(...)` raises.
    """
    if not content:
        raise ProgramError("fixed_prefix: the content is empty: give the text or the messages that every run begins with")
    source = _Source(document_id or _id_of(content), _frozen(content), format, ttl)

    def decorate(program: Any) -> Any:
        if isinstance(program, SglFunction):
            inner = decorate(program.func)
            return SglFunction(inner, program.num_api_spec_tokens, program.bind_arguments)

        @functools.wraps(program)
        def run(s: Any, *args: Any, **kwargs: Any) -> Any:
            s += _Static(source)
            return program(s, *args, **kwargs)

        # SGLang reads the names of the arguments without following wrappers.
        run.__signature__ = inspect.signature(program)  # type: ignore[attr-defined]
        return run

    return decorate


@dataclass(frozen=True)
class _Source:
    """A document as a program names it; `content` is JSON, so that it can be compared."""

    document_id: str
    content: str | None
    format: str | None
    ttl: float | None


class _Static(SglConstantText):
    """Stands in a program until `StreamExecutor.submit` puts the text there."""

    def __init__(self, source: _Source) -> None:
        SglExpr.__init__(self)
        self.source = source
        scope = TracingScope.get_current_scope()
        self._traced_for = None if scope is None else scope.tracer_state.backend

    @property
    def value(self) -> str:
        """The text, for a tracer, which runs programs to find their constant beginning."""
        return _resolve(self.source, self._traced_for)[0]

    def __repr__(self) -> str:
        return f"Static({self.source.document_id!r})"


def _frozen(content: Content | None) -> str | None:
    try:
        return None if content is None else json.dumps(content, ensure_ascii=False)
    except TypeError as error:
        raise ProgramError(f"the content of a document is text or a list of messages: {error}") from error


def _id_of(content: Content) -> str:
    return f"prefix-{hashlib.sha256(str(_frozen(content)).encode()).hexdigest()[:16]}"


_pinned: WeakKeyDictionary[Any, set[_Source]] = WeakKeyDictionary()
"""What was pinned through a backend."""
_pinning = threading.Lock()
"""The programs of a batch are threads: one pins, the others wait."""


def _resolve(source: _Source, backend: Any) -> tuple[str, list[dict[str, Any]] | None]:
    """(text, messages or None) of a document, which the server has afterwards."""
    client = DocumentClient(backend)
    if source.content is None:
        return client.text(source.document_id)
    content = json.loads(source.content)
    with _pinning:
        if source not in _pinned.setdefault(backend, set()):
            client.pin(source.document_id, content, source.format, source.ttl)
            _pinned[backend].add(source)
    try:
        text, messages = client.text(source.document_id)
    except UnknownDocumentError:
        with _pinning:
            client.pin(source.document_id, content, source.format, source.ttl)
        text, messages = client.text(source.document_id)
    if content != (text if messages is None else messages):
        raise DocumentConflictError(
            f"document {source.document_id!r} has other content than the program: DELETE it first, or choose another id"
        )
    return text, messages


def _place(executor: Any, static: _Static) -> SglConstantText:
    """The text of a document at the beginning of a program."""
    if executor.error_ is None:
        executor.sync()
    if executor.text_ or executor.cur_role is not None:
        before = executor.text_ if len(executor.text_) <= 40 else f"...{executor.text_[-40:]}"
        raise ProgramError(
            f"{static} is not at the beginning of the program: {before!r} stands before it, so no prompt would begin with "
            f"the document. Put it first and outside of roles; pin a system prompt as messages"
        )
    text, messages = _resolve(static.source, executor.backend)
    if messages is not None:
        executor.messages_ = list(messages)  # so that roles go on from them
    return SglConstantText(text)


def _placed(executor: Any, expr: Any) -> Any:
    """`expr` with its document replaced by its text."""
    statics = tuple(_statics(expr))
    if not statics:
        return expr
    first, *rest = [expr] if isinstance(expr, _Static) else expr.expr_list
    if statics != (first,):
        raise ProgramError(
            f"{statics[-1]} is not at the beginning of the program: put it first and outside of roles; pin a system prompt "
            f"as messages"
        )
    text = _place(executor, first)
    return SglExprList([text, *rest]) if rest else text


def _statics(expr: Any) -> Iterator[_Static]:
    """The documents in an expression, in order."""
    if isinstance(expr, _Static):
        yield expr
    elif isinstance(expr, SglExprList):
        for part in expr.expr_list:
            yield from _statics(part)


def _wrap_submit() -> None:
    """Let every program resolve its documents, in the thread of the program, so that errors are raised there."""
    orig = StreamExecutor.submit
    if hasattr(orig, "csa2_static"):
        return

    @functools.wraps(orig)
    def submit(self: Any, expr: Any) -> Any:
        try:
            placed = _placed(self, expr)
        except Csa2Error as error:
            self.error_ = error  # for who streams, and sees no exception
            raise
        return orig(self, placed)

    submit.csa2_static = True  # type: ignore[attr-defined]
    StreamExecutor.submit = submit


_wrap_submit()
