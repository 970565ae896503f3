"""The HTTP routes of documents, on apps with SGLang's own middleware and a fake scheduler."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from sglang.srt.entrypoints import http_server
from sglang.srt.utils.auth import add_api_key_middleware
from starlette.testclient import TestClient

from csa2.errors import OptionError
from sglang_csa2 import control, document_pinning, document_routes, http
from sglang_csa2.control import Csa2ControlReqOutput

PATH = "/csa2/documents"


class FakeScheduler:
    """Keeps documents by id; each is encoded after so many looks."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.looks = 2
        self.answer: Callable[[str, dict[str, Any]], Csa2ControlReqOutput | None] = lambda op, payload: None
        self.left = 0

    async def call(self, _: Any, op: str, payload: Any = None) -> Csa2ControlReqOutput:
        self.calls.append((op, payload or {}))
        special = self.answer(op, payload or {})
        if special is not None:
            return special
        if op == "document_add":
            self.left = self.looks
            return ok(id=payload["document_id"], state="waiting", serial=7)
        if op == "document" and self.left:
            self.left -= 1
            return ok(id=payload["document_id"], state="resident" if self.left == 0 else "waiting", serial=7)
        return ok(id=(payload or {}).get("document_id"), state="resident", serial=7)

    def ops(self) -> list[str]:
        return [op for op, _ in self.calls]


def ok(**data: Any) -> Csa2ControlReqOutput:
    return Csa2ControlReqOutput(ok=True, status=200, data={"tokens": 64, **data})


def refused(message: str, status: int) -> Csa2ControlReqOutput:
    return Csa2ControlReqOutput(ok=False, status=status, data={"message": message})


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeScheduler]:
    fake = FakeScheduler()
    tokenizer = SimpleNamespace(encode=lambda text: [ord(c) for c in text])
    state = SimpleNamespace(tokenizer_manager=SimpleNamespace(tokenizer=tokenizer), template_manager=None)
    monkeypatch.setattr(control, "call", fake.call)
    monkeypatch.setattr(http_server, "_global_state", state)
    monkeypatch.setattr(document_pinning, "POLL_S", 0)
    monkeypatch.setattr(document_pinning, "_serials", itertools.count(7))
    yield fake
    document_pinning._expiries.clear()
    document_pinning.contents.clear()


@pytest.fixture
def client(scheduler: FakeScheduler) -> Iterator[TestClient]:
    app = FastAPI()
    http.add_routes(app)
    with TestClient(app) as client:  # one event loop for all requests, as on a server
        yield client


def test_a_document_is_tokenised_encoded_and_waited_for(client: TestClient, scheduler: FakeScheduler) -> None:
    response = client.post(PATH, json={"id": "a", "text": "AB C", "format": "fp4", "extra_key": "k"})
    assert (response.status_code, response.json()["state"]) == (200, "resident")
    wanted = {"document_id": "a", "input_ids": [65, 66], "page_format": "fp4", "extra_key": "k", "ttl": None, "serial": 7}
    assert scheduler.calls[0] == ("document_add", wanted)
    assert scheduler.ops() == ["document_add", "document", "document"]


def test_a_refusal_keeps_status_and_numbers(client: TestClient, scheduler: FakeScheduler) -> None:
    scheduler.answer = lambda op, _: refused("no room: 12 pages", 409) if op == "document_add" else None
    response = client.post(PATH, json={"id": "a", "input_ids": [1]})
    assert (response.status_code, response.json()) == (409, {"error": {"message": "no room: 12 pages"}})


def test_a_document_that_fails_on_the_way_is_503(client: TestClient, scheduler: FakeScheduler) -> None:
    failed = ok(id="a", state="failed", message="its request was aborted", serial=7)
    scheduler.answer = lambda op, _: failed if op == "document" else None
    response = client.post(PATH, json={"id": "a", "input_ids": [1]})
    assert response.status_code == 503
    assert "its request was aborted. Send it again" in response.json()["error"]["message"]


def test_a_document_removed_on_the_way_is_404_and_replaced_409(client: TestClient, scheduler: FakeScheduler) -> None:
    scheduler.answer = lambda op, _: refused("no document", 404) if op == "document" else None
    assert client.post(PATH, json={"id": "a", "input_ids": [1]}).status_code == 404
    scheduler.answer = lambda op, _: ok(id="a", state="resident", serial=8) if op == "document" else None
    assert client.post(PATH, json={"id": "a", "input_ids": [1]}).status_code == 409


def test_a_document_that_one_replica_refuses_is_taken_back_from_the_others(
    client: TestClient, scheduler: FakeScheduler
) -> None:
    message = "replica 1 of 2: no room"
    reply = Csa2ControlReqOutput(ok=False, status=409, data={"message": message, "done_by": [0]})
    scheduler.answer = lambda op, _: reply if op == "document_add" else None
    response = client.post(PATH, json={"id": "a", "input_ids": [1]})
    assert (response.status_code, response.json()) == (409, {"error": {"message": message}})
    assert scheduler.calls[1:] == [("document_remove", {"document_id": "a", "serials": [7]})]


def test_replicas_of_a_document_are_told_by_their_own_serials(client: TestClient, scheduler: FakeScheduler) -> None:
    """One of them had it already: from an earlier request, with an earlier serial."""

    def view(state: str) -> Csa2ControlReqOutput:
        return ok(id="a", state=state, serial=7, replicas=[{"serial": 3}, {"serial": 7}])

    states = iter(["waiting", "waiting", "resident"])
    scheduler.answer = lambda op, _: None if op == "document_remove" else view(next(states))
    assert client.post(PATH, json={"id": "a", "input_ids": [1], "ttl": 0.001}).status_code == 200
    scheduler.answer = lambda *_: None
    while "document_remove" not in scheduler.ops():
        client.get(PATH)
    assert ("document_remove", {"document_id": "a", "serials": [3, 7]}) in scheduler.calls


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is no document"),
        (b'{"id": "a"}', "none of them"),
        (b'{"id": "a", "text": "x", "input_ids": [1]}', "text and input_ids"),
        (b'{"id": "a/b", "text": "x"}', "is not allowed"),
        (b'{"id": "a", "text": "x", "ttl": -1}', "ttl is -1"),
        (b'{"id": "a", "text": 1}', "at `$.text`"),
    ],
)
def test_a_bad_document_is_400_and_goes_nowhere(
    client: TestClient, scheduler: FakeScheduler, body: bytes, message: str
) -> None:
    response = client.post(PATH, content=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert scheduler.calls == []


def test_a_huge_body_is_413_and_not_read_to_its_end(
    client: TestClient, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_routes, "MAX_DOCUMENT_BYTES", 1000)
    assert client.post(PATH, content=b'{"id": "a", "text": "' + b"x" * 2000 + b'"}').status_code == 413
    assert scheduler.calls == []
    read = []

    async def parts() -> Any:
        for i in range(100):
            read.append(i)
            yield b"x" * 300

    with pytest.raises(http.BodyTooLargeError):
        asyncio.run(http.read_bytes(SimpleNamespace(stream=parts), 1000))  # type: ignore[arg-type]
    assert len(read) == 4


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_reading_and_removing(client: TestClient, scheduler: FakeScheduler, method: str) -> None:
    assert client.request(method, f"{PATH}/a").status_code == 200
    assert client.request(method, PATH).status_code == 200
    wanted = {"GET": ["document", "documents"], "DELETE": ["document_remove", "documents_remove"]}
    assert scheduler.ops() == wanted[method]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("name", ["-a", "a%20b", "%2e%2e", "a%00", "x" * 200, "%C3%A4"])
def test_ids_with_tricks_are_400(client: TestClient, scheduler: FakeScheduler, method: str, name: str) -> None:
    assert client.request(method, f"{PATH}/{name}").status_code in (400, 404)
    assert scheduler.calls == []


@pytest.mark.parametrize("name", ["a/b", "..%2f..%2fetc%2fpasswd", "a%2fb"])
def test_ids_with_slashes_are_404(client: TestClient, scheduler: FakeScheduler, name: str) -> None:
    assert client.get(f"{PATH}/{name}").status_code == 404
    assert scheduler.calls == []


def test_a_document_is_removed_when_its_time_is_over(client: TestClient, scheduler: FakeScheduler) -> None:
    client.post(PATH, json={"id": "a", "input_ids": [1], "ttl": 0.001})
    while "document_remove" not in scheduler.ops():
        client.get(PATH)
    assert ("document_remove", {"document_id": "a", "serials": [7]}) in scheduler.calls
    assert document_pinning._expiries == {}


@pytest.mark.parametrize("then", ["again", "delete", "delete all"])
def test_a_later_request_ends_the_time_of_a_document(client: TestClient, scheduler: FakeScheduler, then: str) -> None:
    client.post(PATH, json={"id": "a", "input_ids": [1], "ttl": 1000})
    assert list(document_pinning._expiries) == ["a"]
    if then == "again":
        client.post(PATH, json={"id": "a", "input_ids": [1]})
    else:
        client.delete(PATH if then == "delete all" else f"{PATH}/a")
    assert document_pinning._expiries == {}


@pytest.mark.parametrize(
    ("api_key", "admin_api_key", "sent", "status"),
    [("key", None, None, 401), ("key", None, "key", 200), ("key", "admin", "key", 401), ("key", "admin", "admin", 200)],
)
def test_documents_are_protected_as_admin_routes_are(
    scheduler: FakeScheduler, api_key: str, admin_api_key: str | None, sent: str | None, status: int
) -> None:
    app = FastAPI()
    http.add_routes(app)
    add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_api_key)
    client = TestClient(app, headers={"Authorization": f"Bearer {sent}"} if sent else {})
    assert client.post(PATH, json={"id": "a", "text": "some text"}).status_code == status
    for method, path in (("GET", ""), ("GET", "/a"), ("GET", "/a/text"), ("DELETE", "/a"), ("DELETE", "")):
        assert client.request(method, PATH + path).status_code == status


def test_the_text_of_a_document_is_had_without_the_scheduler(client: TestClient, scheduler: FakeScheduler) -> None:
    client.post(PATH, json={"id": "a", "text": "some text", "extra_key": "k"})
    calls = len(scheduler.calls)
    response = client.get(f"{PATH}/a/text")
    shown = {"id": "a", "text": "some text", "messages": None, "extra_key": "k"}
    assert (response.status_code, response.json()) == (200, shown)
    assert len(scheduler.calls) == calls
    scheduler.answer = lambda op, _: refused("exists with other content", 409) if op == "document_add" else None
    assert client.post(PATH, json={"id": "a", "text": "another text"}).status_code == 409
    assert client.get(f"{PATH}/a/text").json() == shown


@pytest.mark.parametrize("how", ["delete", "delete all", "ttl"])
def test_the_text_goes_with_its_document(client: TestClient, scheduler: FakeScheduler, how: str) -> None:
    assert client.get(f"{PATH}/a/text").status_code == 404
    client.post(PATH, json={"id": "a", "text": "some text", "ttl": 0.001 if how == "ttl" else None})
    if how != "ttl":
        client.delete(PATH if how == "delete all" else f"{PATH}/a")
    while how == "ttl" and "document_remove" not in scheduler.ops():
        client.get(PATH)
    assert client.get(f"{PATH}/a/text").status_code == 404


def test_tokens_that_no_text_has_are_409(client: TestClient, scheduler: FakeScheduler) -> None:
    tokenizer = http_server.get_global_state().tokenizer_manager.tokenizer
    tokenizer.bos_token, tokenizer.decode = None, lambda ids, **_: "ABC"
    client.post(PATH, json={"id": "a", "input_ids": [*range(65, 129)]})
    response = client.get(f"{PATH}/a/text")
    assert response.status_code == 409
    assert "'a' has no text" in response.json()["error"]["message"]
    assert client.get(f"{PATH}/a%20b/text").status_code == 400


def app_with(folder: Path) -> FastAPI:
    app = FastAPI()
    document_routes.load_at_start(app, str(folder))
    return app


def test_a_folder_is_encoded_before_the_first_request(scheduler: FakeScheduler, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("B")
    (tmp_path / "a.md").write_text("A")
    with TestClient(app_with(tmp_path)):
        added = [payload["document_id"] for op, payload in scheduler.calls if op == "document_add"]
    assert added == ["a", "b"]


def test_a_folder_that_is_too_much_ends_the_start(scheduler: FakeScheduler, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("A")
    scheduler.answer = lambda op, _: refused("document 'a' has no room: 12 pages", 409)
    with pytest.raises(OptionError, match="document 'a' has no room: 12 pages"), TestClient(app_with(tmp_path)):
        pass
