"""A document on its way to two replicas, of which one refuses: the whole way from the front end to two books."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.utils import TypeBasedDispatcher

from csa2.documents import Document, DocumentBody, DocumentBook, DocumentView
from csa2.errors import DocumentConflictError
from sglang_csa2 import control, document_pinning

IDS = [1, 2, 3, 4]


class FakeDocuments:
    """`PinnedDocuments` without a scheduler: a real book, and room for so many documents."""

    def __init__(self, room: int) -> None:
        self.book = DocumentBook()
        self.room = room
        self.ends: list[str] = []
        """How the encoding of the next documents ends; after these, well."""

    def add(self, document_id: str, input_ids: list[int], ttl: float | None, serial: int, **_: Any) -> DocumentView:
        document = self.book.known(document_id, tuple(input_ids), None, "fp8")
        if document is None:
            if len(self.book) == self.room:
                raise DocumentConflictError(f"no room for {document_id}")
            document = self.book.add(document_id, tuple(input_ids), None, "fp8", ttl, serial)
        return self.view(document)

    def view(self, document: Document) -> DocumentView:
        shown = {
            name: getattr(document, name) for name in ("id", "state", "format", "ttl", "extra_key", "serial", "message")
        }
        if document.state == "waiting":  # until the next look
            document.state = self.ends.pop(0) if self.ends else "resident"
            document.message = "its request was aborted" if document.state == "failed" else ""
        return DocumentView(**shown, tokens=len(document.tokens), pages=1, bytes=1, formats={"fp8": 1}, hits=0)

    def remove(self, document_id: str, serials: list[int] | None = None) -> DocumentView:
        return self.view(self.book.remove(document_id, serials))

    def held(self) -> dict[str, str]:
        return {document.id: document.state for document in self.book}


class FakeServer:
    """Two schedulers behind one communicator."""

    def __init__(self) -> None:
        self.documents = [FakeDocuments(room=4), FakeDocuments(room=4)]
        self.schedulers = []
        for rank, documents in enumerate(self.documents):
            steward = SimpleNamespace(documents=documents)
            scheduler = SimpleNamespace(csa2_steward=steward, _request_dispatcher=TypeBasedDispatcher([(int, str)]))
            control.attach(scheduler, rank)
            self.schedulers.append(scheduler)
        self.communicator = FanOutCommunicator(self.send, fan_out=2)
        self.tokenizer_manager = SimpleNamespace(
            server_args=SimpleNamespace(kv_compress="csa2"),
            auto_create_handle_loop=lambda: None,
            csa2_control_communicator=self.communicator,
        )

    def send(self, req: control.Csa2ControlReq) -> None:
        for scheduler in reversed(self.schedulers):
            reply = scheduler._request_dispatcher(msgspec.msgpack.decode(msgspec.msgpack.encode(req), type=type(req)))
            asyncio.get_running_loop().call_soon(self.communicator.handle_recv, reply)

    def pin(self, name: str, ids: list[int] = IDS) -> control.Outcome:
        return asyncio.run(document_pinning.pin(self.tokenizer_manager, DocumentBody(id=name, input_ids=ids), ids))

    def held(self) -> list[dict[str, str]]:
        return [documents.held() for documents in self.documents]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(document_pinning, "POLL_S", 0)
    yield FakeServer()
    document_pinning._expiries.clear()


def test_both_encode_it(server: FakeServer) -> None:
    ok, data, _ = server.pin("a")
    assert (ok, data["state"], len(data["replicas"])) == (True, "resident", 2)
    assert server.held() == [{"a": "resident"}] * 2


@pytest.mark.parametrize("full", [0, 1])
def test_one_without_room_leaves_it_in_neither(server: FakeServer, full: int) -> None:
    server.documents[full].room = 0
    ok, data, status = server.pin("a")
    assert (ok, status, data["message"]) == (False, 409, f"replica {full} of 2: no room for a")
    assert server.held() == [{}, {}]


def test_one_that_fails_is_told_and_sent_again(server: FakeServer) -> None:
    server.documents[1].ends = ["failed"]
    ok, data, status = server.pin("a")
    assert (ok, status) == (False, 503)
    assert data["message"] == "document 'a' could not be encoded: replica 1 of 2: its request was aborted. Send it again"
    assert server.held() == [{"a": "resident"}, {"a": "failed"}]
    ok, data, _ = server.pin("a")
    assert ok
    assert server.held() == [{"a": "resident"}] * 2
    zero, one = (part["serial"] for part in data["replicas"])
    assert zero < one


def test_taking_back_leaves_what_was_there_before(server: FakeServer) -> None:
    """One replica has it already, the other failed and has got no room: the first keeps what it had."""
    server.documents[1].ends = ["failed"]
    server.pin("a")
    server.documents[1].room = 1
    ok, data, status = server.pin("a")
    assert (ok, status, data["message"]) == (False, 409, "replica 1 of 2: no room for a")
    assert server.held() == [{"a": "resident"}, {"a": "failed"}]


def test_other_content_of_one_replica_is_a_conflict_and_the_other_is_taken_back(server: FakeServer) -> None:
    server.documents[1].ends = ["failed"]
    server.pin("a")
    ok, data, status = server.pin("a", [5, 6, 7, 8])
    assert (ok, status) == (False, 409)
    assert data["message"].startswith("replica 0 of 2: document 'a' exists with other content")
    assert server.held() == [{"a": "resident"}, {}]


def test_removing_what_one_replica_lacks_removes_it_from_the_other(server: FakeServer) -> None:
    server.pin("a")
    server.documents[0].book.remove("a")
    reply = asyncio.run(control.call(server.tokenizer_manager, "document_remove", {"document_id": "a"}))
    assert (reply.ok, server.held()) == (True, [{}, {}])
